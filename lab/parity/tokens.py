"""Token parity: every generated token against Hugging Face, teacher-forced, and with speculation against without.

Each position is classed: *equal* (our token is the reference's argmax), *near-tie* (the reference puts our token so
close to its best that rounding decides), or *bug*. Teacher forcing keeps one near-tie from being counted as a hundred
differences. Source: docs/requirements.md R-141; the near-tie rule is stated in `near_tie_gap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from eagle3core.config import GenerationConfig
from lab.errors import ExperimentError, RunFailed
from lab.parity.hf_target import TargetReference
from lab.parity.recording import PairUnderTest, check_prompts

MAX_NEAR_TIE_SHARE = 0.01
GAP_FACTOR = 2.0


@dataclass(frozen=True)
class Judged:
    """Teacher-forced reference along one generated sequence of n tokens.

    Attributes:
        best: `[n]` int64 the reference's argmax (lowest id of equals), at the dtype under test.
        gap: `[n]` fp64 the reference's largest logit minus its logit of our token.
        error: largest logit error of plain torch against one precision up over these positions.
    """

    best: Tensor
    gap: Tensor
    error: float


@dataclass(frozen=True)
class TokenRow:
    """One prompt at one depth of speculation (0 is plain decoding).

    Attributes:
        n_equal, n_near_tie, n_bug: positions by class; they add up to n_positions.
        first_divergence: first position whose token differs from plain decoding's, None if none does.
        divergence: class of that position, "equal" when there is none.
        bugs: positions classed as bugs, at most the first eight.
    """

    prompt: int
    k: int
    n_positions: int
    n_equal: int
    n_near_tie: int
    n_bug: int
    first_divergence: int | None
    divergence: str
    bugs: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenReport:
    """Rows by depth and prompt, and the gap under which a difference is a near-tie."""

    rows: list[TokenRow]
    dtype: str
    near_tie_gap: float

    @property
    def near_tie_share(self) -> float:
        """Positions classed as near-ties over all positions; 0 when there are none."""
        total = sum(row.n_positions for row in self.rows)
        return sum(row.n_near_tie for row in self.rows) / total if total else 0.0

    @property
    def n_bugs(self) -> int:
        """Positions classed as bugs, and divergences from plain decoding that are no near-tie."""
        return sum(row.n_bug for row in self.rows) + sum(row.divergence == "bug" for row in self.rows)

    @property
    def passed(self) -> bool:
        """No bug, at most 1% near-ties, and at least one position compared."""
        compared = any(row.n_positions for row in self.rows)
        return compared and self.n_bugs == 0 and self.near_tie_share <= MAX_NEAR_TIE_SHARE

    @property
    def n_equal_outputs(self) -> int:
        """Prompt-and-depth pairs, depth 0 left out, whose whole output equals plain decoding's."""
        return sum(row.first_divergence is None for row in self.rows if row.k)

    @property
    def verdict(self) -> str:
        """One sentence."""
        total, speculative = sum(row.n_positions for row in self.rows), sum(bool(row.k) for row in self.rows)
        ties = sum(row.n_near_tie for row in self.rows)
        word = "Tokens agree" if self.passed else "Tokens disagree"
        return (
            f"{word} with Hugging Face in {self.dtype}: of {total} positions {ties} are near-ties, with {self.n_bugs} "
            f"bugs; "
            f"{self.n_equal_outputs} of {speculative} speculative outputs equal plain decoding token for token."
        )

    def table(self) -> pd.DataFrame:
        """One row a prompt and depth."""
        return pd.DataFrame([asdict(row) for row in self.rows])

    def by_depth(self) -> pd.DataFrame:
        """One row a depth: positions by class, and outputs equal to plain decoding's."""
        table = self.table()
        table["equal_output"] = table["first_divergence"].isna()
        sums = ["n_positions", "n_equal", "n_near_tie", "n_bug", "equal_output"]
        grouped = table.groupby("k")[sums].sum()
        grouped.insert(0, "n_prompts", table.groupby("k").size())
        return grouped.rename(columns={"equal_output": "n_equal_outputs"}).reset_index()


def run_token_parity(
    target_dir: str | Path,
    draft_dir: str | Path,
    *,
    prompts: Sequence[Sequence[int]],
    dtype: str = "float32",
    device: str = "auto",
    ks: Sequence[int] = (1, 3),
    max_new_tokens: int = 64,
    batch: int = 8,
    fault: str | None = None,
    capture_layers: tuple[int, ...] | None = None,
    capture_convention: str | None = None,
    norm_output: str = "",
) -> TokenReport:
    """Generate greedily without and with speculation, and class every token.

    Args:
        target_dir, draft_dir: checkpoint directories.
        prompts: token ids.
        dtype: "float32", "bfloat16", "float16" or "float64".
        ks: depths of speculation; plain decoding (0) always runs, as the baseline.
        max_new_tokens: tokens generated per prompt; an end-of-sequence token does not stop them.
        batch: requests decoded together.
        fault: name of a bug to plant in the engine (`lab.parity.faults`).
        norm_output: as of `PairUnderTest`.

    Raises:
        ExperimentError: an unusable prompt, dtype or depth.
    """
    check_prompts(prompts)
    if not ks or any(k < 1 for k in ks):
        raise ExperimentError(f"ks is {tuple(ks)}", "depths from 1 to 8", "give at least one depth")
    taps = (capture_layers, capture_convention)
    pair = PairUnderTest(
        Path(target_dir), Path(draft_dir), dtype, device, *taps, fault=fault or "", norm_output=norm_output
    )
    outputs = {k: generate(pair, prompts, k, max_new_tokens, batch) for k in (0, *ks)}
    judged = judge(
        pair, [(p, out) for by_prompt in outputs.values() for p, out in zip(prompts, by_prompt, strict=True)]
    )
    gap = near_tie_gap(pair.dtype, max(j.error for j in judged.values()))
    rows = [
        _row(i, k, (out, judged[_key(prompts[i], out)]), (plain := outputs[0][i], judged[_key(prompts[i], plain)]), gap)
        for k, by_prompt in outputs.items()
        for i, out in enumerate(by_prompt)
    ]
    return TokenReport(rows, dtype, gap)


def generate(
    pair: PairUnderTest, prompts: Sequence[Sequence[int]], k: int, max_new_tokens: int, batch: int
) -> list[list[int]]:
    """Greedy tokens of every prompt at depth `k`, `batch` requests together."""
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    engine = pair.engine(k, n_tokens=longest, max_batch_size=min(batch, len(prompts)))
    settings = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
    return [list(response.token_ids) for response in engine.generate([list(p) for p in prompts], settings)]


def near_tie_gap(dtype: str, error: float) -> float:
    """Largest gap to the best logit that rounding may close: twice the largest logit error of plain torch.

    Both logits can be wrong by that error in opposite directions. fp64 is compared with itself, and there no rounding
    of that size exists: equality is exact.
    """
    return 0.0 if dtype == "float64" else GAP_FACTOR * error


def judge(
    pair: PairUnderTest, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[tuple[int, ...], Judged]:
    """Teacher-forced reference along each distinct (prompt, generated) sequence, by their joined ids."""

    def load(compute_dtype: torch.dtype) -> TargetReference:
        return TargetReference(
            pair.target, dtype=pair.torch_dtype, compute_dtype=compute_dtype, device=pair.torch_device
        )

    plain = load(pair.torch_dtype)
    truth = None if pair.dtype == "float64" else load(pair.truth_dtype)
    judged: dict[tuple[int, ...], Judged] = {}
    for prompt, generated in sequences:
        key = _key(prompt, generated)
        if key in judged:
            continue
        fed, rows = [*prompt, *generated[:-1]], slice(len(prompt) - 1, None)
        logits = plain.run(fed)["head"][rows].double().cpu()
        error = 0.0 if truth is None else float((logits - truth.run(fed)["head"][rows].double().cpu()).abs().max())
        judged[key] = judged_from(logits, torch.tensor(list(generated)), error)
    return judged


def judged_from(logits: Tensor, generated: Tensor, error: float) -> Judged:
    """What the reference's logits `[n, V]` say about `generated: [n]`."""
    if not bool(logits.isfinite().all()):
        raise RunFailed("the reference's logits hold NaN or infinity", "finite logits", "check the target's weights")
    largest = logits.max(dim=-1, keepdim=True).values
    best = torch.stack([row.nonzero()[0, 0] for row in logits == largest])
    return Judged(best, (largest - logits.gather(1, generated[:, None]))[:, 0], error)


def classes(generated: Sequence[int], judged: Judged, near_tie: float) -> list[str]:
    """Class of each generated token: "equal", "near-tie" or "bug"."""
    named = []
    for token, best, gap in zip(generated, judged.best.tolist(), judged.gap.tolist(), strict=True):
        is_near = near_tie > 0 and gap <= near_tie
        named.append("equal" if token == best else "near-tie" if is_near else "bug")
    return named


def _row(
    prompt: int, k: int, ours: tuple[list[int], Judged], plain: tuple[list[int], Judged], near_tie: float
) -> TokenRow:
    out, judged = ours
    named = classes(out, judged, near_tie)
    differing = [i for i, (a, b) in enumerate(zip(out, plain[0], strict=False)) if a != b]
    first = differing[0] if differing else None
    divergence = "equal"
    if first is not None:
        # Up to here both saw the same tokens; rounding may swap two tokens only if both are near the best.
        gaps = float(judged.gap[first]), float(plain[1].gap[first])
        divergence = "near-tie" if near_tie > 0 and max(gaps) <= near_tie else "bug"
    elif len(out) != len(plain[0]):
        first, divergence = min(len(out), len(plain[0])), "bug"
    bugs = tuple(i for i, name in enumerate(named) if name == "bug")[:8]
    n_equal, n_near_tie, n_bug = (named.count(name) for name in ("equal", "near-tie", "bug"))
    return TokenRow(prompt, k, len(out), n_equal, n_near_tie, n_bug, first, divergence, bugs)


def _key(prompt: Sequence[int], generated: Sequence[int]) -> tuple[int, ...]:
    return (*prompt, -1, *generated)
