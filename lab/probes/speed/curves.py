"""Speed-up as a function of acceptance: arithmetic on what a step costs, with nothing measured here.

A step of k drafts takes r times as long as a plain one and commits L tokens, 1 to k + 1, so it is L / r times as fast.
Where each drafted token is accepted with chance a given those before it, L = 1 + a + ... + a^k. Derived here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.pairs.planted.tokens import expected_length, share_for_length

GRID = 512  # shares at which the best depth is looked up; borders between two are then found by halving
HALVINGS = 40


@dataclass(frozen=True)
class Range:
    """A median with the 10th and 90th percentile of the rounds it comes from."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Best:
    """The best depth somewhere, 0 for plain decoding.

    Attributes:
        speedup: over plain decoding. next_k: the second best, None where nothing else was measured.
        advantage: over the second best, a share: 0.02 is 2% faster.
    """

    k: int
    speedup: float
    next_k: int | None
    advantage: float


@dataclass(frozen=True)
class BestSpan:
    """A span of acceptance shares over which one depth is best.

    Attributes:
        best: in the middle of the span.
    """

    k: int
    low: float
    high: float
    best: Best


def speedup_line(k: int, over_base: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """(length, speed-up) at both ends of what k drafts can commit: 1 and k + 1 tokens a step."""
    return (1.0, 1.0 / over_base), (k + 1.0, (k + 1.0) / over_base)


def break_even_length(k: int, over_base: float) -> float | None:
    """Tokens a step at which k drafts are as fast as plain decoding; None: never, all k + 1 would not be enough."""
    return over_base if over_base <= k + 1 else None


def break_even_share(k: int, over_base: float) -> float | None:
    """The same as the chance of a drafted token to be accepted; 0 where even rejected drafts cost nothing."""
    if over_base <= 1.0:
        return 0.0
    return share_for_length(over_base, k) if over_base <= k + 1 else None


def lengths_at(share: float, ks: Mapping[int, object]) -> dict[int, float]:
    """Tokens a step of every depth at an acceptance share."""
    return {k: expected_length(share, k) for k in ks}


def best_of(over_base: Mapping[int, float], lengths: Mapping[int, float]) -> Best:
    """The depth that decodes fastest.

    Args:
        over_base: step over plain step by depth, 1.0 at depth 0. lengths: tokens a step by depth.
    """
    speeds = sorted(((lengths[k] / over_base[k], -k) for k in over_base if k in lengths), reverse=True)
    (speed, k), others = speeds[0], speeds[1:]
    if not others:
        return Best(-k, speed, None, 0.0)
    return Best(-k, speed, -others[0][1], speed / others[0][0] - 1)


def best_at(over_base: Mapping[int, float], share: float) -> Best:
    """The depth that decodes fastest at an acceptance share."""
    return best_of(over_base, lengths_at(share, over_base))


def is_clear(over_base: Mapping[int, Range], lengths: Mapping[int, float]) -> bool:
    """Whether the best depth stays ahead of every other at the bad end of its own rounds and the good end of theirs."""
    best = best_of({k: one.median for k, one in over_base.items()}, lengths)
    own = lengths[best.k] / over_base[best.k].high
    return all(lengths[k] / one.low < own for k, one in over_base.items() if k != best.k and k in lengths)


def envelope(over_base: Mapping[int, float]) -> tuple[BestSpan, ...]:
    """Which depth is best over acceptance shares from 0 to 1, in order."""
    shares = [i / GRID for i in range(GRID + 1)]
    found: list[tuple[int, float, float]] = []
    for share in shares:
        k = best_at(over_base, share).k
        if found and found[-1][0] == k:
            found[-1] = (k, found[-1][1], share)
            continue
        border = _border(over_base, found[-1][2], share) if found else 0.0
        if found:
            found[-1] = (*found[-1][:2], border)
        found.append((k, border, share))
    return tuple(BestSpan(k, low, high, best_at(over_base, (low + high) / 2)) for k, low, high in found)


def _border(over_base: Mapping[int, float], low: float, high: float) -> float:
    """Where the depth that is best at `low` stops being best, below `high`."""
    before = best_at(over_base, low).k
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if best_at(over_base, middle).k == before else (low, middle)
    return (low + high) / 2
