"""Acceptance of two systems compared position by position: is a difference more than chance?

Compared is the share of steps that accept a position among those that reached it, so that one early difference is not
counted again at every later position. The interval of a difference of two shares is Newcombe's, of two Wilson
intervals; its error rate is divided among the positions. Steps are taken for independent draws. Those of one text are
not quite, so a difference that is barely outside its interval is worth another run.
Source: Newcombe, Statistics in Medicine 17 (1998), method 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from lab.rows.verdict import wilson_interval

ERROR_RATE = 0.05  # of calling any position different where none is


@dataclass(frozen=True)
class PositionDifference:
    """One drafted position of two systems.

    Attributes:
        position: from 1. theirs, ours: accepted and reached steps. low, high: interval of the difference of the shares.
    """

    position: int
    theirs: tuple[int, int]
    ours: tuple[int, int]
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the difference is more than chance."""
        return self.low > 0 or self.high < 0

    def line(self) -> str:
        """In words."""
        (a, n), (b, m) = self.theirs, self.ours
        word = "differs" if self.differs else "same"
        return (
            f"{word} position {self.position}: theirs {a / n:.4f} of {n} that reached it, ours {b / m:.4f} of {m}, "
            f"difference {a / n - b / m:+.4f} ({self.low:+.4f} to {self.high:+.4f})"
        )


def differences(theirs: Sequence[int], ours: Sequence[int]) -> list[PositionDifference]:
    """Positions that both systems reached; both histograms count steps by accepted drafts."""
    depth = min(len(theirs), len(ours)) - 1
    counts = [
        (i + 1, (sum(theirs[i + 1 :]), sum(theirs[i:])), (sum(ours[i + 1 :]), sum(ours[i:]))) for i in range(depth)
    ]
    reached = [one for one in counts if one[1][1] and one[2][1]]
    z = NormalDist().inv_cdf(1 - ERROR_RATE / max(len(reached), 1) / 2)
    return [PositionDifference(*one, *_newcombe(one[1], one[2], z)) for one in reached]


def sentence(found: Sequence[PositionDifference]) -> str:
    """Which position differs first."""
    if not found:
        return "No position was reached by both, so none was compared."
    first = next((one for one in found if one.differs), None)
    if first is None:
        return f"None of {len(found)} positions differs beyond chance."
    how = "more" if first.low > 0 else "less"
    return f"Position {first.position} is the first that differs: theirs is accepted {how} often than ours."


def _newcombe(theirs: tuple[int, int], ours: tuple[int, int], z: float) -> tuple[float, float]:
    (a, n), (b, m) = theirs, ours
    (low, high), (our_low, our_high) = wilson_interval(a, n, z), wilson_interval(b, m, z)
    apart = a / n - b / m
    return (
        apart - math.hypot(a / n - low, our_high - b / m),
        apart + math.hypot(high - a / n, b / m - our_low),
    )
