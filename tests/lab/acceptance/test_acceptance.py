"""Acceptance is counted as stated and explained without remainder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3core.metrics import RequestMetrics, StepRecord, spec_info_from_steps
from eagle3core.request import Response
from lab.acceptance import figures
from lab.acceptance.counts import (
    ACCEPTED,
    DEEP,
    NEAR,
    OUTSIDE,
    REFUSED,
    DepthAcceptance,
    acceptance_interval,
    cause_of,
    count_acceptance,
)
from lab.acceptance.loops import looped_tokens
from lab.acceptance.reference import Decision, ReferenceReport
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt

pytestmark = pytest.mark.reference


def response(tokens: list[int], steps: Sequence[tuple[int, int, tuple[int, ...]]], k: int) -> Response:
    """A response whose complete steps are (n_accepted, n_committed, ranks), after one prefill token."""
    records, start = [], 1
    for n_accepted, n_committed, ranks in steps:
        records.append(StepRecord(start, k, n_accepted, n_committed, n_committed < n_accepted + 1, ranks))
        start += n_committed
    return Response("", tokens, 2, "length", RequestMetrics(spec_info_from_steps(records, k), tuple(records)))


def hand_counted() -> DepthAcceptance:
    """Two prompts, six steps, one of them cut."""
    prompts = [Prompt((1, 2), "", "a"), Prompt((3, 4), "", "b")]
    first = response(list(range(10, 18)), [(2, 3, (0, 0)), (0, 1, (-1,)), (1, 2, (0, 2)), (2, 1, (0, 0))], k=2)
    second = response(list(range(20, 24)), [(0, 1, (7,)), (1, 2, (0, 1))], k=2)
    return count_acceptance(2, prompts, [first, second], lambda tokens: sum(t % 2 == 0 for t in tokens))


def test_a_hand_counted_run_gives_the_hand_counted_numbers() -> None:
    depth = hand_counted()
    assert (depth.n_steps, depth.n_cut, depth.n_tokens) == (5, 1, 12)
    assert depth.histogram == (2, 2, 1)
    assert depth.length.mean == pytest.approx(9 / 5)
    assert depth.by_position == (3 / 5, 1 / 5)
    assert depth.given_prefix == pytest.approx((3 / 5, 1 / 3))
    assert depth.expected_if_independent == pytest.approx(1 + 0.6 + 0.36)
    assert depth.coverage == 0.5
    assert depth.per_prompt == (2.0, 1.5)
    assert [(c.category, c.n_steps, c.length.mean) for c in depth.categories] == [("a", 3, 2.0), ("b", 2, 1.5)]


def test_the_loss_is_attributed_to_cause_and_position() -> None:
    depth = hand_counted()
    assert depth.loss_by_cause == {
        OUTSIDE: (2 / 5, 0.0),
        NEAR: (0.0, 2 / 5),
        DEEP: (2 / 5, 0.0),
        REFUSED: (0.0, 0.0),
    }
    assert depth.why == (
        "At spec-2 a step commits 1.80 of at most 3 tokens; of the 1.20 lost, 0.40 go to tokens outside the draft "
        "vocabulary, 0.40 to tokens at rank 2 to 4 and 0.40 at rank 5 or deeper of the draft's order; 67% of the loss "
        "is at the first drafted position."
    )
    shares = depth.rank_shares
    assert shares["rank 1, accepted"] == (3 / 5, 1 / 3)
    assert sum(values[0] for values in shares.values()) == pytest.approx(1.0)


def test_a_class_of_ranks_keeps_its_colour_whichever_others_are_there() -> None:
    mpl.use("agg")
    prompts = [Prompt((1, 2), "", "a")]
    # Nothing accepted: every first draft misses, outside the vocabulary or deep down the draft's order.
    refused = response(list(range(10, 13)), [(0, 1, (-1,)), (0, 1, (9,))], k=2)
    none = count_acceptance(2, prompts, [refused], lambda tokens: 0)
    colours: list[dict[str, Any]] = []
    for depth in (hand_counted(), none):
        figure, *_ = figures.ranks(depth)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        colours.append({label: bars[0].get_facecolor() for label, bars in zip(labels, handles, strict=True)})
    assert ACCEPTED in colours[0]
    assert ACCEPTED not in colours[1]
    assert set(colours[1]) == {OUTSIDE, DEEP}
    assert all(colours[0][name] == colour for name, colour in colours[1].items())


@pytest.mark.parametrize(("rank", "cause"), [(-1, OUTSIDE), (0, REFUSED), (1, NEAR), (3, NEAR), (4, DEEP), (900, DEEP)])
def test_a_rank_has_one_cause(rank: int, cause: str) -> None:
    assert cause_of(rank) == cause


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.data())
def test_length_and_losses_always_add_up(k: int, data: st.DataObject) -> None:
    accepted = data.draw(st.lists(st.integers(0, k), min_size=1, max_size=30))
    ranks = data.draw(st.lists(st.integers(-1, 40).filter(bool), min_size=len(accepted), max_size=len(accepted)))
    steps = [(a, a + 1, (*[0] * a, r)) for a, r in zip(accepted, ranks, strict=True)]
    n_tokens = 1 + sum(a + 1 for a in accepted)
    depth = count_acceptance(k, [Prompt((1,), "")], [response(list(range(n_tokens)), steps, k)], len)
    assert depth.length.mean is not None
    lost = sum(sum(values) for values in depth.loss_by_cause.values())
    assert depth.length.mean == pytest.approx(k + 1 - lost)
    assert depth.length.mean == pytest.approx(1 + sum(depth.by_position))
    for position in range(k):
        if sum(depth.histogram[position:]):
            assert sum(values[position] for values in depth.rank_shares.values()) == pytest.approx(1.0)


def test_a_run_without_complete_steps_has_no_acceptance_length() -> None:
    depth = count_acceptance(2, [Prompt((1,), "")], [response([5, 6], [(2, 1, (0, 0))], k=2)], len)
    assert (depth.length.mean, depth.n_steps, depth.per_prompt) == (None, 0, (None,))
    assert depth.why == "At spec-2 no verify step was complete, so there is no acceptance length."
    assert (depth.by_position, depth.given_prefix, depth.expected_if_independent) == ((None, None), (None, None), None)
    values = depth.row_values()
    unknown = [
        "mean_accepted_draft_tokens",
        "mean_acceptance_rate",
        "acceptance_by_position",
        "expected_if_independent",
    ]
    assert [values[name] for name in [*unknown, *(name for name in values if name.startswith("lost to"))]] == [None] * 8


def test_too_many_near_ties_are_neither_called_an_agreement_nor_a_contradiction() -> None:
    tie, equal, wrong = (Decision(0, 0, 0, True, 0, expected, gap) for expected, gap in ((1, 0.1), (0, 0.0), (1, 9.0)))
    words = {
        "agrees with": [equal], "has too many near-ties to agree with": [equal, tie], "contradicts": [tie, wrong]
    }  # fmt: skip
    for word, decisions in words.items():
        report = ReferenceReport(1, tuple(decisions), 0.5, 1, 2.0, 2.0)
        assert f"measured acceptance {word} the Hugging Face" in report.verdict


def test_steps_without_ranks_are_refused() -> None:
    bare = StepRecord(1, 2, 0, 1, False, None)
    made = Response("", [5, 6], 1, "length", RequestMetrics(None, (bare,)))
    with pytest.raises(ExperimentError, match="collect_draft_ranks"):
        count_acceptance(2, [Prompt((1,), "")], [made], len)


def test_a_repeated_run_is_a_loop_and_a_new_one_is_not() -> None:
    run = list(range(16))
    assert looped_tokens(run, run) == [True] * 16
    assert looped_tokens(run, run[:15]) == [False] * 15
    assert looped_tokens([], [*run, 99, *run]) == [False] * 17 + [True] * 16
    assert looped_tokens([], [7] * 16) == [False] * 16
    assert looped_tokens([], [7] * 17) == [False] + [True] * 16
    assert looped_tokens([7], [7] * 16) == [True] * 16


def test_steps_with_a_looped_token_are_left_out_of_the_length_outside_loops() -> None:
    run = list(range(16))
    steps = [(1, 2, (0, 5))] * 8 + [(2, 3, (0, 0))] * 5 + [(0, 1, (3,))]
    made = response([50, *run, *run], steps, k=2)
    depth = count_acceptance(2, [Prompt((1,), "")], [made], len)
    assert depth.looped_share == pytest.approx(16 / 33)
    assert depth.length.mean == pytest.approx(32 / 14)
    assert depth.outside_loops.mean == pytest.approx(2.0)


def test_the_interval_is_wide_between_prompts_and_closed_for_equal_ones() -> None:
    def steps(n_committed: int) -> list[StepRecord]:
        return [StepRecord(1, 3, n_committed - 1, n_committed, False, None)] * 5

    equal = acceptance_interval([steps(2), steps(2), steps(2)])
    assert (equal.mean, equal.low, equal.high) == (2.0, 2.0, 2.0)
    spread = acceptance_interval([steps(1), steps(4)] * 8)
    assert spread.mean == 2.5
    assert spread.low is not None
    assert spread.high is not None
    assert 1.5 < spread.low < 2.2 < 2.8 < spread.high < 3.5


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    # 60 simulated runs of 40 prompts; 95% intervals that were right at that rate would miss more than 9 of them in less
    # than one of 400 trials, and the seed is fixed.
    random = torch.Generator().manual_seed(3)
    missed = 0
    for _ in range(60):
        means = torch.rand(40, generator=random) * 2
        runs = [
            [StepRecord(1, 3, int(a), int(a) + 1, False, None) for a in torch.poisson(m.expand(12), generator=random)]
            for m in means
        ]
        interval = acceptance_interval(runs)
        assert interval.low is not None
        assert interval.high is not None
        missed += not interval.low <= 2.0 <= interval.high
    assert missed <= 9
