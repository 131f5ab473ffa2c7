"""Did a number move? Five words: same, faster, slower, unsure, missing. Pure functions of numbers.

Two spreads matter and neither bounds the other. Within one night, the standard error of the median comes from its order
statistics. Between nights, clocks, heat and neighbours move the median itself; that spread is read off earlier nights,
and until there are enough of them a generous constant stands in, so that two nights alone are called apart only when
nothing short of a real change explains them.

Stated rate: with nothing changed, at most 1 comparison in 100 is called faster or slower (checked by simulation in
tests/lab/rows/test_verdict.py for normal, skewed and heavy-tailed samples).
Source: McKean and Schrader, "A comparison of methods for studentizing the sample median" (1984), for the standard
error; von Neumann, "Distribution of the ratio of the mean square successive difference" (1941), between nights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, stdev
from typing import Literal

from lab.options.values import MIN_ROUNDS

Word = Literal["same", "faster", "slower", "unsure", "missing"]
Better = Literal["lower", "higher"]
WORST_FIRST: tuple[Word, ...] = ("slower", "missing", "unsure", "faster", "same")

# Chance of a false "faster" or "slower" in one comparison.
FALSE_ALARM = 0.01
# An interval within this ratio of no change is "same"; a certain move below half of it is not worth a word.
SAME_RATIO = 1.05
WORTH_RATIO = 1.02
# Medians of unchanged nights were seen to move by 10 to 13% on shared hosts; assumed until the history says better.
UNKNOWN_NIGHT_RATIO = 1.15
# Rounds in turns on one machine tell smaller moves than nights do, and a certain one of less than this says little.
ROUNDS_WORTH_RATIO = 1.01
ROUNDS_SAME_RATIO = 1.02
# Sums in another order may differ in the last bits of a double.
_ROUNDING = 1e-9
# With fewer earlier nights than this, their spread is itself too uncertain to be used.
MIN_SPREAD_NIGHTS = 6
# Below this many samples the order statistics are too coarse, and the normal formula with Student's t is used.
_MIN_ORDERED = 12


@dataclass(frozen=True)
class Sample:
    """One night's measurement: its centre and, as far as known, its spread.

    Either `samples` (raw), or `p10` and `p90` with the number of repeats `n`, or neither.
    """

    centre: float
    samples: tuple[float, ...] = ()
    p10: float | None = None
    p90: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What can be said of a move. `ratio` is after / before; `low` and `high` bound it where an interval exists."""

    word: Word
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare(
    before: Sample, after: Sample, better: Better, nights: Sequence[float] = (), *, counted: bool = False
) -> Verdict:
    """The verdict on `after` against `before`.

    Args:
        better: whether a lower or a higher value is the faster one.
        nights: centres of earlier comparable nights, oldest first, `before` included.
        counted: the value is a count of a repeatable computation, not a time, so any difference is a change.
    """
    if not (_usable(before.centre) and _usable(after.centre)):
        return Verdict("unsure", f"not positive numbers: {before.centre} and {after.centre}")
    move = math.log(after.centre / before.centre)
    ratio = after.centre / before.centre
    if counted:
        return _counted(move, ratio, better)
    errors = [median_error(before), median_error(after)]
    known = [error for error in errors if error is not None]
    within = math.sqrt(sum(error**2 for error in known))
    usable = [night for night in nights if _usable(night)]
    if len(usable) >= MIN_SPREAD_NIGHTS:
        half = _half_from_nights(usable, within)
        basis = f"spread of {len(usable)} earlier nights"
    else:
        half = _normal_quantile() * within + math.log(UNKNOWN_NIGHT_RATIO)
        few = f"only {len(usable)} earlier night{'' if len(usable) == 1 else 's'}"
        basis = f"{few}, so {UNKNOWN_NIGHT_RATIO - 1:.0%} between nights is assumed"
        if len(known) < 2:
            basis += "; no spread within the night recorded"
    return _worded(move, half, better, basis)


def compare_rounds(
    before: Sequence[float],
    after: Sequence[float],
    better: Better,
    *,
    worth: float = ROUNDS_WORTH_RATIO,
    same: float = ROUNDS_SAME_RATIO,
    resolution: float = 0.0,
) -> Verdict:
    """The verdict on two sides measured in turns, A B A B, on one machine: round i of one beside round i of the other.

    What drifts between rounds meets both sides, so only the moves within rounds count. Their median has an interval of
    order statistics, which assumes nothing about the noise but that either side is as likely to be the slower one.

    Args:
        worth: a certain move below this ratio is "unsure": there, but too little to be blamed on anything.
        same: an interval within this ratio of no change, and around it, is "same".
        resolution: of the timer, in the values' unit; a certain move of no more than that is "unsure" as well.
    """
    if len(before) != len(after) or len(before) < MIN_ROUNDS:
        return Verdict("unsure", f"{len(before)} and {len(after)} rounds; a verdict takes {MIN_ROUNDS} of each")
    if not all(map(_usable, (*before, *after))):
        return Verdict("unsure", "not positive numbers")
    moves = sorted(math.log(new / old) for old, new in zip(before, after, strict=True))
    n, depth = len(moves), interval_depth(len(moves))
    low, high, centre = moves[depth - 1], moves[n - depth], median(moves)
    basis = f"{n} rounds in turns"
    spread = {"ratio": math.exp(centre), "low": math.exp(low), "high": math.exp(high)}
    if low > _ROUNDING or high < -_ROUNDING:
        if abs(centre) < math.log(worth):
            return Verdict("unsure", f"{basis}: a certain move, but below {worth - 1:.0%}", **spread)
        if abs(median(after) - median(before)) <= resolution:
            tick = f"the timer's resolution of {resolution:g}"
            return Verdict("unsure", f"{basis}: a certain move, but within {tick}", **spread)
        return Verdict(_direction(centre, better), basis, **spread)
    is_same = -math.log(same) <= low and high <= math.log(same)
    return Verdict("same" if is_same else "unsure", basis, **spread)


def interval_depth(n: int) -> int:
    """How many of `n` ordered values lie outside a sign-test interval for their median, one more, on either side.

    The largest depth whose interval misses the median with a chance of at most `FALSE_ALARM`.
    """
    missed, depth = 2 / 2**n, 1
    while depth < n // 2:
        missed += 2 * math.comb(n, depth) / 2**n
        if missed > FALSE_ALARM:
            break
        depth += 1
    return depth


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _counted(move: float, ratio: float, better: Better) -> Verdict:
    if abs(move) < _ROUNDING:
        return Verdict("same", "equal counts", ratio, ratio, ratio)
    return Verdict(_direction(move, better), "a repeatable count changed", ratio, ratio, ratio)


def _direction(move: float, better: Better) -> Word:
    return "faster" if (move < 0) == (better == "lower") else "slower"


def _worded(move: float, half: float, better: Better, basis: str) -> Verdict:
    low, high = math.exp(move - half), math.exp(move + half)
    ratio = math.exp(move)
    apart = abs(move) > half
    if apart and abs(move) >= math.log(WORTH_RATIO):
        return Verdict(_direction(move, better), basis, ratio, low, high)
    if move - half >= -math.log(SAME_RATIO) and move + half <= math.log(SAME_RATIO):
        return Verdict("same", basis, ratio, low, high)
    return Verdict("unsure", basis, ratio, low, high)


def median_error(sample: Sample) -> float | None:
    """Standard error of the median, relative to it; None where nothing about the spread is known."""
    samples = [value for value in sample.samples if _usable(value)]
    if len(samples) >= 2:
        return _ordered_error(samples)
    if sample.p10 is not None and sample.p90 is not None and _usable(sample.p10) and _usable(sample.p90):
        sigma = (math.log(sample.p90) - math.log(sample.p10)) / (2 * NormalDist().inv_cdf(0.9))
        return 1.2533 * abs(sigma) / math.sqrt(max(sample.n or 1, 1))  # sqrt(pi / 2): median against mean
    return None


def _ordered_error(samples: list[float]) -> float:
    logs = sorted(math.log(value) for value in samples)
    n = len(logs)
    if n < _MIN_ORDERED:
        widened = student_quantile(n - 1) / _normal_quantile()
        return 1.2533 * stdev(logs) / math.sqrt(n) * widened
    z = _normal_quantile()
    rank = max(round((n + 1) / 2 - z * math.sqrt(n / 4)), 1)
    return (logs[n - rank] - logs[rank - 1]) / (2 * z)


def _half_from_nights(nights: Sequence[float], within: float) -> float:
    """Half width of the interval of a move, from successive moves of earlier nights (which hold both spreads)."""
    moves = [math.log(after / before) for before, after in itertools.pairwise(nights)]
    square = sum(move**2 for move in moves) / len(moves)
    freedom = max(2 * len(moves) // 3, 2)  # successive differences carry two thirds of the information
    return student_quantile(freedom) * math.sqrt(max(square, within**2))


def _normal_quantile() -> float:
    return NormalDist().inv_cdf(1 - FALSE_ALARM / 2)


def wilson_interval(n_yes: int, n: int, z: float) -> tuple[float, float]:
    """Interval of a share of `n_yes` in `n` at `z` standard deviations; 0 to 1 for n of 0.

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927).
    """
    if n == 0:
        return 0.0, 1.0
    share, weight = n_yes / n, z * z / n
    half = z * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    middle = share + weight / 2
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))


def student_quantile(freedom: int) -> float:
    """The two-sided `FALSE_ALARM` quantile of Student's t.

    Exact for 1 and 2 degrees of freedom, else the Cornish-Fisher expansion (within 1% from 3 on).
    """
    p = 1 - FALSE_ALARM / 2
    if freedom <= 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        a = 2 * p - 1
        return a * math.sqrt(2 / (1 - a**2))
    z, v = _normal_quantile(), freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
