"""A step in a series is found where it is, and seldom where there is none."""

from __future__ import annotations

import random

import pytest

from lab.rows.store import Row
from lab.rows.trend import find_steps, series_of

pytestmark = pytest.mark.reference


def runs(n: int) -> list[str]:
    return [f"night-{i}" for i in range(n)]


def noisy(n: int, source: random.Random, *, tails: bool) -> list[float]:
    return [100 * (1 + 0.02 * (source.gauss(0, 1) / (source.uniform(0.3, 1) if tails else 1))) for _ in range(n)]


@pytest.mark.parametrize("n", [10, 30, 60])
@pytest.mark.parametrize("tails", [False, True])
def test_at_most_one_series_in_fifty_without_a_step_is_said_to_have_one(n: int, tails: bool) -> None:
    source = random.Random(n)
    found = sum(bool(find_steps(noisy(n, source, tails=tails), runs(n), "lower")) for _ in range(300))
    assert found <= 6


def test_a_step_and_the_step_back_are_both_found_where_they_are() -> None:
    source = random.Random(3)
    values = [level * source.gauss(1, 0.005) for level in [100] * 14 + [110] * 14 + [100] * 14]
    steps = find_steps(values, runs(42), "lower")
    assert [(step.at, step.word) for step in steps] == [(14, "slower"), (28, "faster")]
    assert find_steps(values, runs(42), "higher")[0].word == "faster"


def test_a_certain_move_too_small_for_a_word_is_no_step() -> None:
    assert (
        find_steps([100.0 + i / 1e3 for i in range(15)] + [101.0 + i / 1e3 for i in range(15)], runs(30), "lower") == ()
    )


def row(value: float, **changes: object) -> Row:
    facts = {"run": "r", "job": "j", "notebook": "41_bench", "kind": "bench", "name": "point", "environment": "m"}
    return Row.model_validate(
        facts | {"recorded_at": "2026-01-01T00:00:00+00:00", "timer": "new", "values": {"step_us": value}} | changes
    )


def test_a_series_is_of_one_timer_and_leaves_out_nights_whose_clocks_were_held_back() -> None:
    nights = [("a", [row(50.0, timer="old")]), ("b", [row(100.0)]), ("c", [row(101.0)]), ("d", [row(102.0)])]
    nights.insert(3, ("t", [row(180.0, values={"step_us": 180.0, "throttled": "hw slowdown"})]))
    [series] = series_of(nights)
    assert series.runs == ("b", "c", "d")
    assert series.n_lost == 2
