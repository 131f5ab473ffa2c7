"""What acceptance should have been: the draft rebuilt from Hugging Face's modules, led along the engine's own text.

A bug inside the draft never shows in the output, because verification repairs it; it only costs acceptance. So every
drafted position of every step is made again: features from Hugging Face's target over the finished text, one draft pass
over the committed entries, then one a level, fed the text's own token. The engine said at which rank of its draft's
order the target's token lay; the reference must find it at the same rank, unless rounding decides (near-ties).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.metrics import StepRecord
from eagle3core.request import Response
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt
from lab.parity.recording import PairUnderTest
from lab.parity.replay import Reference
from lab.parity.tokens import near_tie_gap


@dataclass(frozen=True)
class Decision:
    """One drafted position of one complete step.

    Attributes:
        prompt, step, level: where; level 0 is the first draft of the step.
        accepted: what the engine decided.
        rank: of the target's token in the engine's draft order, from 0; -1 outside the draft vocabulary.
        expected: the same in the reference.
        gap: how far the reference's logits would have to move for the engine's rank; 0 where they agree, infinite where
            only one has the token in its vocabulary, or where the engine's decision contradicts its own rank.
    """

    prompt: int
    step: int
    level: int
    accepted: bool
    rank: int
    expected: int
    gap: float


@dataclass(frozen=True)
class ReferenceReport:
    """Engine against reference over the same text.

    Attributes:
        k: depth.
        decisions: every drafted position up to each step's first miss.
        near_tie: gap up to which rounding may decide.
        n_steps: complete steps compared.
        measured: the engine's acceptance length over them.
        expected: the reference's over the same steps.
    """

    k: int
    decisions: tuple[Decision, ...]
    near_tie: float
    n_steps: int
    measured: float | None
    expected: float | None

    @property
    def n_near_ties(self) -> int:
        """Positions decided otherwise than the reference would, where rounding may decide."""
        return sum(d.accepted != (d.expected == 0) and d.gap <= self.near_tie for d in self.decisions)

    @property
    def n_shifted(self) -> int:
        """Positions whose rank differs, by no more than rounding may do; common far down a draft's order."""
        return sum(d.rank != d.expected and d.gap <= self.near_tie for d in self.decisions)

    @property
    def bugs(self) -> tuple[Decision, ...]:
        """Positions whose ranks differ by more, or contradict the engine's own decision."""
        return tuple(d for d in self.decisions if d.gap > self.near_tie)

    def passed(self, max_near_tie_share: float = 0.01) -> bool:
        """At least one position compared, no bug, and near-ties at most that share of the positions."""
        return bool(self.decisions) and not self.bugs and self.n_near_ties <= max_near_tie_share * len(self.decisions)

    def row_values(self) -> dict[str, Any]:
        """What is stored of the comparison."""
        return {
            "expected_length": self.expected,
            "measured_length": self.measured,
            "n_steps": self.n_steps,
            "n_positions": len(self.decisions),
            "n_near_ties": self.n_near_ties,
            "n_shifted_ranks": self.n_shifted,
            "n_bugs": len(self.bugs),
            "near_tie_gap": self.near_tie,
            "verdict": self.verdict,
        }

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.measured is None or self.expected is None:
            return f"Spec-{self.k}: no complete step, so nothing was compared."
        word = "agrees with" if self.passed() else "has too many near-ties to agree with"
        word = "contradicts" if self.bugs else word
        first = self.bugs[0] if self.bugs else None
        where = f", first at prompt {first.prompt}, step {first.step}, position {first.level}" if first else ""
        return (
            f"Spec-{self.k}: measured acceptance {word} the Hugging Face reference over {self.n_steps} steps: "
            f"{self.measured:.3f} against {self.expected:.3f} tokens a step; of {len(self.decisions)} drafted "
            f"positions {self.n_near_ties} are decided otherwise by rounding, and {len(self.bugs)} ranks differ by "
            f"more{where}."
        )


def check_acceptance(
    target: str | Path,
    draft: str | Path,
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
    k: int,
    *,
    dtype: str = "float32",
    device: str = "auto",
    norm_output: str = "",
) -> ReferenceReport:
    """Every drafted position of `responses`, made again by the reference.

    Args:
        target, draft: checkpoint directories.
        prompts, responses: as given to and by the engine at depth `k`, with metrics and draft ranks.
        dtype: the engine's; the reference computes in it, and once more one precision up for the near-tie gap.
        device: where the references run.
        norm_output: as of `PairUnderTest`.

    Raises:
        ExperimentError: prompts and responses that do not pair up.
    """
    if len(prompts) != len(responses):
        raise ExperimentError(f"{len(responses)} responses to {len(prompts)} prompts", "one each", "pass both in order")
    pair = PairUnderTest(Path(target), Path(draft), dtype, device, norm_output=norm_output)
    plain = Reference(pair, pair.torch_dtype)
    truth = None if pair.truth_dtype == pair.torch_dtype else Reference(pair, pair.truth_dtype)
    decisions: list[Decision] = []
    error = 0.0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        walk = DraftWalk(plain, prompt, response, k)
        exact = DraftWalk(truth, prompt, response, k) if truth is not None else None
        for step, record in enumerate(response.req_metrics.steps):
            logits = walk.step(record)
            if exact is not None:
                error = max(error, float((logits - exact.step(record)).abs().max()))
            if not record.cut:
                decisions += _decisions(plain, i, step, record, walk.text(record), logits)
    steps = {(d.prompt, d.step) for d in decisions}
    lengths = _lengths(decisions)
    return ReferenceReport(k, tuple(decisions), near_tie_gap(dtype, error), len(steps), *lengths)


class DraftWalk:
    """One request retold: its text, the target's features along it, and how much of it the draft has read."""

    def __init__(self, reference: Reference, prompt: Prompt, response: Response, k: int) -> None:
        self.draft, self.k = reference.draft, k
        self.n_prompt = len(prompt.ids)
        self.sequence = [*prompt.ids, *response.token_ids]
        stages = reference.target.run(self.sequence)
        self.features = reference.target.taps(stages, self.draft.taps)
        self.draft.forget(self.draft.n_cached)
        self.n_read = 0

    def text(self, record: StepRecord) -> list[int]:
        """The tokens that the target chose where the step drafted, the bonus included."""
        return self.sequence[self.n_prompt + record.start :][: record.n_accepted + 1]

    def step(self, record: StepRecord) -> Tensor:
        """Draft logits `[levels, Vd]` fp64 on the CPU, for the levels up to the step's first miss.

        The first pass reads every entry up to the root, so that the cache holds true features only.
        """
        root = self.n_prompt + record.start - 1  # index of the last committed token
        positions = range(self.n_read, root)
        seen = self.draft.run(
            self.sequence[self.n_read + 1 : root + 1], positions, self.features[self.n_read : root], fuse=True
        )
        self.n_read = root
        logits = [seen["head"][-1]]
        fed = self.sequence[root + 1 :][: min(record.n_accepted, self.k - 1)]
        for level, token in enumerate(fed):
            seen = self.draft.run([token], [root + level], seen["feedback"][-1:], fuse=False)
            logits.append(seen["head"][-1])
        self.draft.forget(len(fed))
        return torch.stack(logits).double().cpu()


def _decisions(
    reference: Reference, prompt: int, step: int, record: StepRecord, text: Sequence[int], logits: Tensor
) -> list[Decision]:
    if record.ranks is None:
        raise ExperimentError(
            "responses without draft ranks",
            "responses of an engine that keeps them",
            "set EngineConfig(collect_draft_ranks=True)",
        )
    made = []
    for level, row in enumerate(logits):
        at = _place_of(reference.draft.target_ids, text[level])
        expected = rank_of(reference.draft.target_ids, row, text[level])
        rank, accepted = record.ranks[level], level < record.n_accepted
        gap = _gap(row, at, rank, expected)
        if accepted != (rank == 0):
            gap = float("inf")
        made.append(Decision(prompt, step, level, accepted, rank, expected, gap))
    return made


def rank_of(target_ids: Tensor, row: Tensor, token: int) -> int:
    """How many tokens come before `token` in the order of a draft's logits, of equal ones the lower id; -1 outside.

    Args:
        target_ids: `[Vd]` int64, the target's id of each token of the draft vocabulary. row: `[Vd]`.
    """
    at = _place_of(target_ids, token)
    return _rank(row, at) if at >= 0 else -1


def _place_of(target_ids: Tensor, token: int) -> int:
    at = (target_ids == token).nonzero()
    return int(at[0]) if len(at) else -1


def _rank(row: Tensor, token: int) -> int:
    """How many entries come before `token`; of equal ones the lower id does."""
    before = (row > row[token]) | ((row == row[token]) & (torch.arange(len(row)) < token))
    return int(before.sum())


def _gap(row: Tensor, token: int, rank: int, expected: int) -> float:
    """Smallest distance by which logits must cross for `token` to lie at `rank` in place of `expected`."""
    if rank == expected:
        return 0.0
    if min(rank, expected) < 0 or rank >= len(row):
        return float("inf")
    distances = (row.sort(descending=True, stable=True).values - row[token]).abs()
    # Nearest first on either side of the token's own place: the last one that has to change sides decides.
    return float(distances[rank])


def _lengths(decisions: Sequence[Decision]) -> tuple[float | None, float | None]:
    """Mean acceptance length of engine and reference; where the reference goes on past the engine's first miss it
    counts one more, since the text beyond was drafted from another root."""
    if not decisions:
        return None, None
    by_step: dict[tuple[int, int], list[Decision]] = {}
    for decision in decisions:
        by_step.setdefault((decision.prompt, decision.step), []).append(decision)
    measured = sum(d.accepted for d in decisions)
    expected = sum(_leading_zeros([d.expected for d in own]) for own in by_step.values())
    return 1 + measured / len(by_step), 1 + expected / len(by_step)


def _leading_zeros(ranks: Sequence[int]) -> int:
    """How many drafts in a row were the target's own choice."""
    return next((i for i, rank in enumerate(ranks) if rank != 0), len(ranks))
