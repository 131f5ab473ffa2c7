"""How many drafted tokens the target accepts: the real engine, once a depth, over the same prompts.

Counting and its terms are in `lab.acceptance.counts`; what the count should have been is in `lab.acceptance.reference`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.request import without_errors
from lab.acceptance.counts import DepthAcceptance, count_acceptance
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt
from lab.parity import faults
from lab.parity.recording import PairUnderTest


@dataclass(frozen=True)
class AcceptanceReport:
    """Acceptance at every depth, over the same prompts."""

    dtype: str
    depths: tuple[DepthAcceptance, ...]

    def at(self, k: int) -> DepthAcceptance:
        """The depth `k`.

        Raises:
            ExperimentError: it was not measured.
        """
        for depth in self.depths:
            if depth.k == k:
                return depth
        raise ExperimentError(
            f"spec-{k} was not measured", f"one of {[d.k for d in self.depths]}", "measure it as well"
        )


def measure_acceptance(
    target: str | Path,
    draft: str | Path,
    prompts: Sequence[Prompt],
    ks: Sequence[int] = (3,),
    *,
    max_new_tokens: int = 128,
    dtype: str = "float32",
    device: str = "auto",
    batch: int = 8,
    ignore_eos: bool = False,
    fault: str | None = None,
    logs: Mapping[int, Path] | None = None,
    on_depth: Callable[[int], None] | None = None,
    norm_output: str = "",
    draft_weights: str = "as_stored",
) -> AcceptanceReport:
    """Generate greedily with speculation at every depth and count.

    Args:
        target, draft: checkpoint directories.
        prompts: what to continue.
        ks: depths, 1..8.
        max_new_tokens: tokens a prompt, fewer where an end token comes first.
        dtype, device: of the engine.
        batch: requests decoded together.
        ignore_eos: go on past end tokens, so that every prompt gives max_new_tokens tokens.
        fault: name of a bug to plant in the engine (`lab.parity.faults`).
        logs: by depth, files that its engine logs acceptance to; one that is there is written anew.
        on_depth: called with each k before it is measured.
        norm_output, draft_weights: as of `PairUnderTest`.

    Raises:
        ExperimentError: no prompt, no depth, or fewer than two tokens to generate.
    """
    if not prompts or not ks or min(ks) < 1 or max_new_tokens < 2:
        raise ExperimentError(
            f"{len(prompts)} prompts, depths {list(ks)}, max_new_tokens {max_new_tokens}",
            "at least one prompt, depths of 1 to 8, and two tokens or more (the first comes from prefill)",
            "correct the arguments",
        )
    pair = PairUnderTest(Path(target), Path(draft), dtype, device, norm_output=norm_output, draft_weights=draft_weights)
    generation = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    depths = []
    for k, engine in _engines(pair, prompts, ks, max_new_tokens, batch, logs or {}):
        if on_depth is not None:
            on_depth(k)
        spoiled = faults.plant(engine, fault) if fault else engine
        responses = without_errors(spoiled.generate([list(prompt.ids) for prompt in prompts], generation))
        depths.append(count_acceptance(k, prompts, responses, in_draft_vocabulary(engine)))
    return AcceptanceReport(dtype, tuple(depths))


def _engines(
    pair: PairUnderTest,
    prompts: Sequence[Prompt],
    ks: Sequence[int],
    max_new_tokens: int,
    batch: int,
    logs: Mapping[int, Path],
) -> Iterator[tuple[int, Engine]]:
    """An engine a depth; the weights are read once and shared."""
    n_tokens = max(len(prompt.ids) for prompt in prompts) + max_new_tokens + 2 * (max(ks) + 1)
    width = min(batch, len(prompts))
    first = pair.engine(max(ks), n_tokens=n_tokens, max_batch_size=width, collect_draft_ranks=True)
    spec = first.config.speculative_config
    assert spec is not None, "an engine of depth 1 or more has its speculative settings"
    for k in ks:
        # Limits left out are derived from k; a replaced copy would keep those of the deepest.
        shallow = replace(spec, num_speculative_tokens=k, max_path_len=None, max_decoding_tokens=None)
        if k in logs:
            logs[k].unlink(missing_ok=True)
        config = replace(first.config, speculative_config=shallow, acceptance_log=logs.get(k))
        yield k, Engine(copy.copy(first.target), first.draft, config)


def in_draft_vocabulary(engine: Engine) -> Callable[[Sequence[int]], int]:
    """A count of the tokens, of those given, that the engine's draft can propose."""
    draft = engine.draft
    assert draft is not None, "an engine of depth 1 or more has a draft"
    known = None if draft.draft_to_target is None else draft.draft_to_target[: draft.geometry.draft_vocab_size]

    def count(tokens: Sequence[int]) -> int:
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=engine.target.device)
        return len(ids) if known is None else int(torch.isin(ids, known).sum())

    return count
