"""Which ring a test runs in, and counting a run by ring, so that what did not run is said aloud."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

# From the least demanding to the most.
RINGS = ("reference", "emulated", "compiled", "gpu")


def slow_from(n: int, values: Iterable[object]) -> list[object]:
    """Values of a parametrised test: the first `n` are in the fast ring, the others in the slow one."""
    return [value if i < n else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def slow_but(kept: Iterable[object], values: Iterable[object]) -> list[object]:
    """Values of a parametrised test, tuples where it has several: `kept` are in the fast ring, the others in the slow
    one.

    Raises:
        ValueError: a kept one is none of the values.
    """
    kept, every = list(kept), list(values)
    if missing := [value for value in kept if value not in every]:
        raise ValueError(f"kept are {missing}, the values {every}: name values that there are")
    return [value if value in kept else _marked(value, pytest.mark.slow) for value in every]


def exhaustive_but(kept: Iterable[object], values: Iterable[object]) -> list[object]:
    """As `slow_but`, of a test of the slow ring: `kept` stay there, the others are run by hand (docs/kernels.md)."""
    kept = list(kept)
    return [value if value in kept else _marked(value, pytest.mark.exhaustive) for value in values]


def seeds(fast: int, slow: int, exhaustive: int) -> list[object]:
    """Of a random test, as many in each ring, from 0 on."""
    marks = [()] * fast + [(pytest.mark.slow,)] * slow + [(pytest.mark.slow, pytest.mark.exhaustive)] * exhaustive
    return [_marked(seed, *own) for seed, own in enumerate(marks)]


def _marked(value: object, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)


def ring_counts(stats: dict[str, list[pytest.TestReport]]) -> list[str]:
    """Per ring "<ring> <n> run" and "<ring> <n> not run (<reason>)", from a reporter's reports by outcome."""
    n_run: Counter[str] = Counter()
    not_run: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "xfailed", "xpassed", "error"):
        for report in stats.get(outcome, []):
            n_run[_ring(report)] += 1
    for report in stats.get("skipped", []):
        location = report.longrepr
        reason = str(location[2] if isinstance(location, tuple) else location).removeprefix("Skipped: ")
        not_run[_ring(report)][reason] += 1
    lines = []
    for ring in (*RINGS, "no ring"):
        if n_run[ring]:
            lines.append(f"{ring} {n_run[ring]} run")
        lines += [f"{ring} {count} not run ({reason})" for reason, count in not_run[ring].items()]
    return lines


def _ring(report: pytest.TestReport) -> str:
    # A test that needs more than the rest of its file carries both marks; the more demanding one counts. Reports of
    # collection, which an import error gives, have no keywords.
    return next((ring for ring in reversed(RINGS) if ring in getattr(report, "keywords", {})), "no ring")
