"""A mean over prompts, with the interval that a bootstrap over prompts gives: its parts are not independent within one.

Source: Efron, Bootstrap methods: another look at the jackknife, 1979 (the percentile interval).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% bootstrap interval over prompts; None where nothing was measured."""

    mean: float | None
    low: float | None
    high: float | None

    @property
    def words(self) -> str:
        """`2.40 (2.23 to 2.53)`."""
        return "no" if self.mean is None else f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"

    def is_above(self, other: Interval) -> bool:
        """Whether the difference of both means, of independent errors, is above 0 by more than its own interval."""
        if self.mean is None or self.low is None or other.mean is None or other.high is None:
            return False
        return self.mean - other.mean > math.hypot(self.mean - self.low, other.high - other.mean)

    def values(self, name: str) -> dict[str, float | None]:
        """Row values: the mean as `name`, its bounds beside it."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


def mean_interval(sums: Sequence[tuple[float, int]], level: float = 0.95) -> Interval:
    """The mean of what prompts have in common: sums and counts of each, those without a count left out."""
    sums = [(total, n) for total, n in sums if n]
    if not sums:
        return Interval(None, None, None)
    source = random.Random(0)  # a fixed seed: the same responses give the same interval
    means = []
    for _ in range(_RESAMPLES):
        drawn = source.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(n for _, n in drawn))
    means.sort()
    low, high = (means[round(q * (_RESAMPLES - 1))] for q in ((1 - level) / 2, (1 + level) / 2))
    return Interval(sum(total for total, _ in sums) / sum(n for _, n in sums), low, high)
