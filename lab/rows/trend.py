"""Numbers over many nights: one series a value, and the nights at which it stepped.

A step is found by Pettitt's test, which compares ranks on both sides of every night and so assumes nothing about the
noise; the series is then searched on either side of it. It takes some eight nights after a step to find it: what moved
since last night is `lab.rows.history`'s business.

Stated rate: without a step, at most 1 series in 50 of 10 to 60 nights is said to have one (checked by simulation in
tests/lab/rows/test_trend.py). Source: A. N. Pettitt, "A non-parametric approach to the change-point problem" (1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from lab.rows.history import metrics_of, throttled
from lab.rows.store import Row
from lab.rows.verdict import FALSE_ALARM, WORTH_RATIO, Better, Word

MIN_DRAWN_NIGHTS = 3
MAX_DRAWN_NIGHTS = 60
MAX_DRAWN_SERIES = 40
_SHORTEST = 10  # nights, below which no split can be certain


@dataclass(frozen=True)
class Step:
    """A lasting move: the values from night `at` on are `ratio` of those before it."""

    at: int
    run: str
    ratio: float
    word: Word

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class Series:
    """One value of one row over the nights.

    Attributes:
        notebook, row, parameters: which row.
        runs: names of the nights it has a value of, oldest first; of one timer, that of the last.
        n_lost: nights that measured it another way, lost it, or held the clocks back.
    """

    notebook: str
    row: str
    parameters: dict[str, Any]
    metric: str
    better: Better
    runs: tuple[str, ...]
    values: tuple[float, ...]
    steps: tuple[Step, ...]
    n_lost: int

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


def series_of(nights: Sequence[tuple[str, Sequence[Row]]]) -> list[Series]:
    """Every comparable value of the last night over the nights before it; those with steps first, then the widest.

    Args:
        nights: run name and rows, oldest first.
    """
    if not nights:
        return []
    index = [(name, {row.key(): row for row in rows}) for name, rows in nights]
    found = []
    for key, last in index[-1][1].items():
        for metric in metrics_of(last):
            points = [(name, _value(rows.get(key), metric.name, last.timer)) for name, rows in index]
            known = [(name, value) for name, value in points if value is not None]
            if metric.counted or len(known) < MIN_DRAWN_NIGHTS:
                continue
            runs, values = zip(*known, strict=True)
            steps, where = find_steps(values, runs, metric.better), dict(last.parameters)
            n_lost = len(points) - len(known)
            found.append(
                Series(last.notebook, last.name, where, metric.name, metric.better, runs, values, steps, n_lost)
            )
    return sorted(found, key=_interest, reverse=True)[:MAX_DRAWN_SERIES]


def _value(row: Row | None, metric: str, timer: str | None) -> float | None:
    if row is None or row.timer != timer or throttled(row):
        return None
    for found in metrics_of(row):
        if found.name == metric and found.sample.centre > 0:
            return found.sample.centre
    return None


def _interest(series: Series) -> tuple[int, float]:
    return len(series.steps), math.log(max(series.values) / min(series.values))


def find_steps(values: Sequence[float], runs: Sequence[str], better: Better, first: int = 0) -> tuple[Step, ...]:
    """The nights at which positive values step, in order."""
    split = _split(values)
    if split is None:
        return ()
    ratio = median(values[split:]) / median(values[:split])
    if abs(math.log(ratio)) < math.log(WORTH_RATIO):
        return ()
    word: Word = "faster" if (ratio < 1) == (better == "lower") else "slower"
    return (
        *find_steps(values[:split], runs[:split], better, first),
        Step(first + split, runs[split], ratio, word),
        *find_steps(values[split:], runs[split:], better, first + split),
    )


def _split(values: Sequence[float]) -> int | None:
    """Where the series most likely steps, if it certainly does."""
    n = len(values)
    if n < _SHORTEST:
        return None
    total, best, at = 0, 0, 0
    for i in range(n - 1):
        total += sum((values[i] < other) - (values[i] > other) for other in values)
        if abs(total) > best:
            best, at = abs(total), i + 1
    chance = 2 * math.exp(-6 * best**2 / (n**3 + n**2))
    return at if chance <= FALSE_ALARM else None
