"""The same head with its maps in another format: what a step commits, beside the maps as they are stored.

The output is the target's in both, so only acceptance can differ; its change is judged prompt by prompt, since both
formats drafted for the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from eagle3core.request import Response
from lab.acceptance.counts import DepthAcceptance
from lab.acceptance.intervals import Interval
from lab.figures import Drawing, look_of

_RESAMPLES = 2000


@dataclass(frozen=True)
class FormatComparison:
    """Acceptance at one depth with the draft's maps as stored and in another format, over the same prompts.

    Attributes:
        weights: the other format, as `SpeculativeConfig.draft_weights` names it.
        change: of the acceptance length, a share of the stored one's; its interval is over prompts, in pairs.
        n_different: prompts whose answers differ, which only a near tie of the target may bring about.
    """

    weights: str
    stored: DepthAcceptance
    other: DepthAcceptance
    change: Interval
    n_different: int

    @property
    def verdict(self) -> str:
        """One sentence."""
        change, (before, after) = self.change, (self.stored.length.mean, self.other.length.mean)
        if change.mean is None or change.low is None or change.high is None or before is None or after is None:
            return f"Too few steps are complete to compare the draft's maps in {self.weights} with the stored ones."
        same = "the answers are the same" if not self.n_different else f"{self.n_different} answers differ"
        return (
            f"With the draft's maps in {self.weights} a step of spec-{self.stored.k} commits {after:.3f} tokens in "
            f"place of {before:.3f} ({change.mean:+.2%}, 95% interval {change.low:+.2%} to {change.high:+.2%}); {same}."
        )

    def row_values(self) -> dict[str, Any]:
        """What is stored; lengths have names of their own, which nights do not compare."""
        return {
            **self.other.length.values("format_length"), **self.change.values("length_change"),
            "stored_length": self.stored.length.mean, "acceptance_by_position": list(self.other.by_position),
            "n_steps": self.other.n_steps, "n_different": self.n_different, "verdict": self.verdict,
        }  # fmt: skip


def compare_formats(weights: str, stored: DepthAcceptance, other: DepthAcceptance) -> FormatComparison:
    """What a format of the draft's maps changed, of two measurements at one depth over the same prompts."""
    n_different = sum(a.token_ids != b.token_ids for a, b in zip(stored.responses, other.responses, strict=True))
    return FormatComparison(weights, stored, other, length_change(stored.responses, other.responses), n_different)


def length_change(stored: Sequence[Response], other: Sequence[Response], level: float = 0.95) -> Interval:
    """Change of the acceptance length, a share, with a percentile bootstrap over prompts, each with both its runs."""
    pairs = [(*_committed(a), *_committed(b)) for a, b in zip(stored, other, strict=True)]
    pairs = [pair for pair in pairs if pair[1] and pair[3]]
    if not pairs:
        return Interval(None, None, None)

    def change(chosen: Sequence[tuple[int, int, int, int]]) -> float:
        before, n_before, after, n_after = (sum(column) for column in zip(*chosen, strict=True))
        return float(after / n_after / (before / n_before) - 1)

    source = random.Random(0)  # a fixed seed: the same responses give the same interval
    drawn = sorted(change(source.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    low, high = (drawn[round(q * (_RESAMPLES - 1))] for q in ((1 - level) / 2, (1 + level) / 2))
    return Interval(change(pairs), low, high)


def formats(comparison: FormatComparison) -> Drawing:
    """Share of steps that accept each drafted position, in both formats."""
    from matplotlib import pyplot as plt

    named = {"as stored": comparison.stored, comparison.weights: comparison.other}
    fig, axes = plt.subplots()
    for (name, measured), look in zip(named.items(), ("expected", "ours"), strict=True):
        axes.plot(range(1, measured.k + 1), measured.by_position, label=name, **look_of(look))
    axes.set_xticks(range(1, comparison.stored.k + 1))
    axes.set_xlabel("drafted position")
    axes.set_ylabel("share of steps that accept it")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8.5)
    rows = [
        {"draft_maps": name, "acceptance_length": m.length.mean, "low": m.length.low, "high": m.length.high,
         "steps": m.n_steps, **{f"position_{i + 1}": share for i, share in enumerate(m.by_position)}}
        for name, m in named.items()
    ]  # fmt: skip
    alt = f"Acceptance by position with the draft's maps as stored and in {comparison.weights}. {comparison.verdict}"
    caption = "The target's maps are the same in both, and so is what it says: only drafts may differ."
    return Drawing(fig, pd.DataFrame(rows), alt, caption)


def _committed(response: Response) -> tuple[int, int]:
    """Tokens that the complete steps of a response committed, and how many steps those are."""
    complete = [step for step in response.req_metrics.steps if not step.cut]
    return sum(step.n_committed for step in complete), len(complete)
