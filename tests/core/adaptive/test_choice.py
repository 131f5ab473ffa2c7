"""Which depth is chosen: a pure function, run over steps whose times and acceptance are known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import slow_but
from step_curves import H200, KEEP_US, reading_us, step_us

from eagle3core.adaptive import Choice, History, Moment, StepCurve, choose
from eagle3core.step.depths import KEEPS, READS, StepKind, Unread
from eagle3core.step.sizes import STEPS_KEPT
from eagle3core.step.tree import chain_tree
from lab.pairs.planted import share_for_length

pytestmark = pytest.mark.reference

K = 3
N_STEPS = 256
BATCHES = (1, 2, 3, 4, 8, 16, 32, 64)
LENGTHS = (1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
# In this order every third cell has each batch and each length.
CELLS = [(batch, LENGTHS[(i + j) % len(LENGTHS)]) for i, batch in enumerate(BATCHES) for j in range(len(LENGTHS))]
Share = Callable[[int], float]


@dataclass
class Run:
    """Steps from a cold start: the host knows results one step late, as on a GPU."""

    batch: int
    share: Share
    k: int = K
    n: int = N_STEPS
    seed: int = 0
    took_us: float = 0.0
    tokens: float = 0.0
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        curve = StepCurve({(depth, self.batch): step_us(depth, self.batch) for depth in range(self.k + 1)})
        history, kinds = History(self.k), {d: StepKind(chain_tree(d), d + 1) for d in range(1, self.k + 1)}
        unread = Unread({**kinds, READS: StepKind(chain_tree(0), STEPS_KEPT), KEEPS: StepKind(chain_tree(0), 0)},
                        STEPS_KEPT)  # fmt: skip
        known: tuple[int, list[int], float, float, float] | None = None
        for step in range(self.n):
            choice = choose(curve, history, Moment(self.batch, 512, tuple(range(self.k + 1))))
            kind = unread.kind_for(choice.depth)
            unread.ran(kind)
            depth, risk = max(kind, 0), choice.risk if kind == choice.depth else 0.0
            history.chose(depth, risk)
            us = step_us(depth, self.batch)
            us += KEEP_US if kind <= READS else 0.0
            us += reading_us(self.batch, STEPS_KEPT) if kind == READS else 0.0
            accepted = [self._accepted(draw, depth, self.share(step)) for _ in range(self.batch)]
            self.took_us, self.tokens = self.took_us + us, self.tokens + self.batch + sum(accepted)
            self.choices.append(choice)
            if known is not None:
                history.saw(*known[:4])
                curve.saw(known[0], self.batch, 512, known[4])
            known = (depth, accepted, choice.over_plain if depth == choice.depth else 1.0, risk, us)

    @staticmethod
    def _accepted(draw: random.Random, depth: int, share: float) -> int:
        return next((n for n in range(depth) if draw.random() >= share), depth)

    @property
    def rate(self) -> float:
        return self.tokens / self.took_us


def fixed_rate(depth: int, batch: int, share: Share, n: int) -> float:
    """Tokens a microsecond that a fixed depth is expected to give."""
    length = mean(sum(share(step) ** i for i in range(depth + 1)) for step in range(n))
    return batch * length / step_us(depth, batch)


def shares_of_best_and_plain(batch: int, share: Share, k: int = K, n: int = N_STEPS) -> tuple[float, float, float]:
    """Of the best fixed depth and of plain, mean of several runs; and of plain, the worst of them."""
    rates = [Run(batch, share, k, n, seed).rate for seed in range(max(4, 24 // batch))]
    fixed = [fixed_rate(depth, batch, share, n) for depth in range(k + 1)]
    return mean(rates) / max(fixed), mean(rates) / fixed[0], min(rates) / fixed[0]


def test_the_curve_of_the_products_is_that_of_measured_steps() -> None:
    rows = [json.loads(line) for line in (H200 / "speed.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = {
        row["parameters"]["spec_k"]: 1e3 * row["values"]["step_ms_median"]
        for row in rows
        if "step_ms_median" in (row["values"] or {})
        and (row["parameters"].get("who"), row["parameters"]["context"], row["parameters"]["batch"])
        == ("engine", 512, 1)
    }
    assert sorted(measured) == list(range(8))
    for depth, us in measured.items():
        assert step_us(depth, 1) == pytest.approx(us, rel=0.02)


@pytest.mark.parametrize(
    ("batch", "length"),
    [each if i % 3 == 0 else pytest.param(*each, marks=pytest.mark.slow) for i, each in enumerate(CELLS)],
)
def test_at_least_97_percent_of_the_best_depth_and_99_of_plain_from_a_cold_start(batch: int, length: float) -> None:
    share = share_for_length(length, K)
    of_best, of_plain, worst = shares_of_best_and_plain(batch, lambda step: share)
    assert of_best >= 0.97
    assert of_plain >= 0.99
    assert worst >= 0.98


@pytest.mark.parametrize(
    ("before", "after", "batch"),
    slow_but(
        [(0.0, 0.9, 1), (0.9, 0.0, 4), (0.3, 0.8, 64)],
        [(*change, batch) for change in ((0.0, 0.9), (0.9, 0.0), (0.3, 0.8)) for batch in (1, 4, 64)],
    ),
)
def test_a_change_of_acceptance_is_followed(batch: int, before: float, after: float) -> None:
    """Over 1024 steps: where nothing is accepted a look costs, so at 64 sequences it comes every 150 steps."""
    of_best, of_plain, _ = shares_of_best_and_plain(batch, lambda step: before if step < 512 else after, n=1024)
    assert of_best >= 0.97
    assert of_plain >= 0.99


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_drafts_that_are_never_right_cost_less_than_0_4_percent_of_an_answer(batch: int) -> None:
    """Of 383 steps, as `eagle3lab prove adaptive` runs: what is left of its 1 % is for the states that wait."""
    run = Run(batch, lambda step: 0.0, n=383)
    lost = sum(step_us(choice.depth, batch) - step_us(0, batch) for choice in run.choices)
    assert 0.0 < lost < 0.004 * run.n * step_us(0, batch)
    assert run.rate >= 0.992 * batch / step_us(0, batch)


@pytest.mark.parametrize(("n_in_vain", "wait"), [(0, 150), (1, 150), (2, 300), (9, 300)])
def test_looks_come_half_as_often_after_two_in_vain(n_in_vain: int, wait: int) -> None:
    curve, moment = StepCurve({(0, 64): 100.0, (1, 64): 130.0}), Moment(64, 512, (0, 1))

    def after(n_plain: int) -> str:
        known = History(1, [192.0], [0.0], n_rows=192, n_plain=n_plain, n_in_vain=n_in_vain)
        return choose(curve, known, moment).reason

    assert (after(wait - 1), after(wait + 1)) == ("plain", "look")


def test_a_step_that_gave_more_than_it_took_ends_the_count_of_those_in_vain() -> None:
    history = History(1)
    for n in (1, 2, 3):
        history.saw(1, [0, 0], 1.1, 0.1)
        history.saw(0, [0, 0], 1.0, 0.0)
        assert history.n_in_vain == n
        assert history.regained == (0.002 if n < 2 else 0.001)
    history.saw(1, [1, 0], 1.1, 0.1)
    assert (history.n_in_vain, history.regained) == (0, 0.002)


def test_a_change_for_the_worse_is_followed() -> None:
    run = Run(4, lambda step: 0.95 if step < 128 else 0.0)
    assert {choice.depth for choice in run.choices[100:128]} == {3}
    assert sum(choice.depth > 0 for choice in run.choices[192:]) <= 8


def test_more_sequences_take_fewer_drafts() -> None:
    usual = [max(set(depths), key=depths.count) for depths in (
        [choice.depth for choice in Run(batch, lambda step: 0.55, k=7).choices[64:]] for batch in (1, 16, 64)
    )]  # fmt: skip
    assert usual == sorted(usual, reverse=True)
    assert usual[0] > usual[-1]


def test_the_choice_is_a_pure_function() -> None:
    curve, history = StepCurve({(d, 4): 1.0 + 0.1 * d for d in range(4)}), History(3)
    history.saw(3, [3, 2, 0, 1], 1.3, 0.0)
    before = repr((history, vars(curve)))
    moment = Moment(4, 100, (0, 1, 2, 3))
    assert choose(curve, history, moment) == choose(curve, history, moment)
    assert repr((history, vars(curve))) == before


def test_a_request_that_uses_fewer_drafts_limits_the_depth() -> None:
    curve, history = StepCurve(), History(3)
    history.saw(3, [3] * 64, 1.2, 0.0)
    assert choose(curve, history, Moment(64, 1, (0, 1, 2, 3))).depth == 3
    assert choose(curve, history, Moment(64, 1, (0, 1))).depth == 1
    assert choose(curve, history, Moment(64, 1, (0,))).depth == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=5)), max_size=40))
def test_chances_lengths_and_choices_stay_in_their_ranges(steps: list[tuple[int, list[int]]]) -> None:
    curve, history = StepCurve({(d, 4): 1.0 + 0.3 * d for d in range(4)}), History(3)
    for depth, accepted in steps:
        history.chose(depth, 0.1)
        history.saw(depth, [min(n, depth) for n in accepted], 1.0 + 0.3 * depth, 0.1)
        assert all(0.0 <= chance <= 1.0 for chance in history.chances())
        assert history.lengths() == sorted(history.lengths())
        assert all(a <= b for a, b in zip(history.sure_lengths(), history.lengths(), strict=True))
        assert choose(curve, history, Moment(4, 9, (0, 1, 2, 3))).depth in (0, 1, 2, 3)


def test_what_one_depth_takes_more_in_a_long_context_the_others_take_too() -> None:
    curve = StepCurve({(0, 4): 100.0, (3, 4): 130.0})
    curve.saw(0, 4, 9000, 150.0)
    assert curve.time_us(3, 4, 9000) == pytest.approx(180.0)
    assert curve.time_us(3, 4, 10) == pytest.approx(180.0), "nothing is nearer"
    curve.saw(3, 4, 9000, 200.0)
    assert curve.time_us(3, 4, 9000) == pytest.approx(200.0)


def test_a_late_host_is_no_slow_step() -> None:
    curve = StepCurve({(0, 1): 100.0})
    for _ in range(20):
        curve.saw(0, 1, 10, 100.0)
    curve.saw(0, 1, 10, 1e6)
    assert curve.time_us(0, 1, 10) < 112.0
