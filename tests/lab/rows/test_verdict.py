"""Verdicts cry wolf at most as often as stated, and see what is there to be seen; checked by simulation."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from lab.rows.verdict import FALSE_ALARM, Sample, compare, median_error, student_quantile

pytestmark = pytest.mark.reference

Draw = Callable[[random.Random], float]
SHAPES: dict[str, Draw] = {
    "normal": lambda rng: math.exp(rng.gauss(0, 0.03)),
    "skewed": lambda rng: 1 + rng.expovariate(1 / 0.05),
    "heavy-tailed": lambda rng: math.exp(0.02 * rng.gauss(0, 1) / max(math.sqrt(rng.random()), 0.05)),
}


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def night(rng: random.Random, draw: Draw, n: int, level: float = 1.0) -> Sample:
    samples = tuple(level * draw(rng) for _ in range(n))
    return Sample(median(list(samples)), samples)


def alarms(words: Counter[str]) -> float:
    return (words["faster"] + words["slower"]) / words.total()


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("n_samples", [5, 30])
@pytest.mark.parametrize("n_nights", [1, 6, 15])
def test_with_nothing_changed_at_most_one_verdict_in_a_hundred_says_so(
    shape: str, n_samples: int, n_nights: int
) -> None:
    # Nights move by 4%. With 600 trials, 1% false alarms stay within 13 but for one time in 200.
    rng, draw, words = random.Random(f"{shape} {n_samples} {n_nights}"), SHAPES[shape], Counter[str]()
    for _ in range(600):
        nights = [night(rng, draw, n_samples, math.exp(rng.gauss(0, 0.04))) for _ in range(n_nights + 1)]
        words[compare(nights[-2], nights[-1], "lower", [one.centre for one in nights[:-1]]).word] += 1
    assert alarms(words) <= 13 / 600, (FALSE_ALARM, words)


def test_a_real_change_beyond_the_spread_of_the_nights_is_found_with_its_direction() -> None:
    rng, draw, words = random.Random(5), SHAPES["normal"], Counter[str]()
    for _ in range(300):
        nights = [night(rng, draw, 30, math.exp(rng.gauss(0, 0.01))) for _ in range(12)]
        after = night(rng, draw, 30, 1.12 * math.exp(rng.gauss(0, 0.01)))
        words[compare(nights[-1], after, "lower", [one.centre for one in nights]).word] += 1
    assert words["slower"] >= 0.95 * words.total(), words
    assert words["faster"] == 0


def test_two_quiet_nights_of_a_quiet_machine_are_the_same() -> None:
    rng, draw, words = random.Random(6), SHAPES["normal"], Counter[str]()
    for _ in range(300):
        nights = [night(rng, draw, 60, math.exp(rng.gauss(0, 0.003))) for _ in range(16)]
        words[compare(nights[-2], nights[-1], "lower", [one.centre for one in nights[:-1]]).word] += 1
    assert words["same"] >= 0.9 * words.total(), words


def test_two_nights_alone_are_unsure_unless_clearly_apart() -> None:
    before = Sample(100.0, tuple(100.0 + i for i in range(-5, 6)))
    near = Sample(110.0, tuple(110.0 + i for i in range(-5, 6)))
    far = Sample(150.0, tuple(150.0 + i for i in range(-5, 6)))
    assert compare(before, near, "lower").word == "unsure"
    assert "15% between nights is assumed" in compare(before, near, "lower").reason
    assert compare(before, far, "lower").word == "slower"
    assert compare(before, far, "higher").word == "faster"
    assert compare(far, before, "lower").word == "faster"


def test_the_spread_within_the_two_nights_widens_the_interval_of_quiet_earlier_nights() -> None:
    """Medians of earlier nights may agree by luck; samples that scatter by half still leave a move of 8% open."""
    quiet = [100.0, 100.1, 99.9, 100.0, 100.1, 99.9, 100.0, 100.1]

    def sample(centre: float, scatter: float) -> Sample:
        return Sample(centre, tuple(centre * (1 + scatter * i / 10) for i in range(-10, 11)))

    calm = compare(sample(100.0, 0.01), sample(108.0, 0.01), "lower", quiet)
    wild = compare(sample(100.0, 0.5), sample(108.0, 0.5), "lower", quiet)
    assert (calm.word, wild.word) == ("slower", "unsure")
    assert wild.high is not None
    assert calm.high is not None
    assert wild.high > 1.2 > calm.high
    # With too few nights it counts beside what is assumed between them, on either side.
    assert compare(sample(100.0, 0.01), sample(120.0, 0.01), "lower").word == "slower"
    for before, after in ((0.5, 0.01), (0.01, 0.5)):
        assert compare(sample(100.0, before), sample(120.0, after), "lower").word == "unsure"


def test_the_interval_holds_the_ratio_and_turns_over_with_the_order() -> None:
    before, after = Sample(100.0, p10=98, p90=102, n=20), Sample(120.0, p10=117, p90=123, n=20)
    there, back = compare(before, after, "lower"), compare(after, before, "lower")
    assert there.ratio == pytest.approx(1.2)
    assert there.low is not None
    assert there.high is not None
    assert there.low < 1.2 < there.high
    assert back.low == pytest.approx(1 / there.high)


def test_a_count_that_changed_is_a_change_and_an_equal_one_is_the_same() -> None:
    assert compare(Sample(2.5), Sample(2.5), "higher", counted=True).word == "same"
    assert compare(Sample(2.5), Sample(2.4), "higher", counted=True).word == "slower"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_positive_number_is_unsure(value: float) -> None:
    assert compare(Sample(1.0), Sample(value), "lower").word == "unsure"


def test_the_error_of_a_median_matches_its_spread_over_many_draws() -> None:
    rng = random.Random(9)
    medians, errors = [], []
    for _ in range(400):
        one = night(rng, SHAPES["normal"], 40)
        medians.append(math.log(one.centre))
        errors.append(median_error(one) or 0.0)
    spread = math.sqrt(sum((m - sum(medians) / 400) ** 2 for m in medians) / 399)
    assert 0.8 * spread < sum(errors) / 400 < 1.4 * spread


def test_the_quantiles_of_student_are_those_of_the_tables() -> None:
    # Two-sided 99%, from any printed table of the distribution.
    for freedom, printed in ((1, 63.657), (2, 9.925), (4, 4.604), (10, 3.169), (30, 2.750)):
        assert student_quantile(freedom) == pytest.approx(printed, rel=0.011)
