"""Counters add up to the tokens that were given out, and means are those counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import Pair, new_tokens, random_prompts, tiny_engine, tokens_of, write_tiny_pair

from eagle3core import (
    ConfigError,
    EagleMetricsSummary,
    GenerationConfig,
    InvariantViolated,
    RequestMetrics,
    Response,
    SpecInfo,
    SpeculativeDecodingStats,
    StepRecord,
)
from eagle3core.metrics import spec_info_from_steps
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.reference

HAND = [
    StepRecord(start=1, n_draft=3, n_accepted=0, n_committed=1, cut=False),
    StepRecord(start=2, n_draft=3, n_accepted=2, n_committed=3, cut=False),
    StepRecord(start=5, n_draft=3, n_accepted=3, n_committed=4, cut=False),
    StepRecord(start=9, n_draft=3, n_accepted=2, n_committed=3, cut=False),
    StepRecord(start=12, n_draft=3, n_accepted=3, n_committed=2, cut=True),
]


def hand_counted() -> SpecInfo:
    """Counters of the steps above."""
    info = spec_info_from_steps(HAND, 3)
    assert info is not None
    return info


def response_of(steps: list[StepRecord], k: int) -> Response:
    """A response that carries `steps`."""
    return Response("", [], 1, "length", RequestMetrics(spec_info_from_steps(steps, k), tuple(steps)))


def test_counters_of_a_request_are_those_counted_by_hand() -> None:
    info = hand_counted()
    assert (info.num_drafts, info.num_draft_tokens, info.num_accepted_tokens) == (5, 15, 9)  # the cut step kept 2
    assert (info.num_rewound_tokens, info.rewind_steps, info.num_cut_steps) == (5, 3, 1)
    assert info.accepted_histogram == (1, 0, 2, 1)
    assert info.n_complete == 4


def test_means_leave_the_cut_step_out_and_count_the_bonus() -> None:
    info = hand_counted()
    assert info.mean_accepted_draft_tokens == pytest.approx(7 / 4)
    assert info.mean_acceptance_length == pytest.approx(11 / 4)
    assert info.mean_acceptance_rate == pytest.approx(7 / 12)
    assert info.acceptance_by_position == pytest.approx((3 / 4, 3 / 4, 1 / 4))


def test_the_block_users_read_has_the_documented_keys() -> None:
    assert hand_counted().to_dict() == {
        "num_drafts": 5,
        "num_draft_tokens": 15,
        "num_accepted_tokens": 9,
        "num_rewound_tokens": 5,
        "rewind_steps": 3,
        "mean_acceptance_length": 2.75,
        "mean_accepted_draft_tokens": 1.75,
        "mean_acceptance_rate": pytest.approx(7 / 12),
    }


def test_zero_rewinds_and_missing_means_are_left_out() -> None:
    full = spec_info_from_steps([HAND[2]], 3)
    assert full is not None
    assert "num_rewound_tokens" not in full.to_dict()
    only_cut = spec_info_from_steps([HAND[4]], 3)
    assert only_cut is not None
    assert set(only_cut.to_dict()) == {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
    assert (only_cut.mean_acceptance_length, only_cut.acceptance_by_position) == (None, ())


def test_there_is_no_spec_info_without_a_speculative_step() -> None:
    assert spec_info_from_steps([], 3) is None
    assert spec_info_from_steps([StepRecord(1, 0, 0, 1, False)], 0) is None


steps = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=20).map(
    lambda drawn: [StepRecord(0, 4, a, max(a, 1) if cut and a else a + 1, cut and a > 0) for a, cut in drawn]
)


@given(steps)
def test_means_stay_in_their_ranges_and_agree_with_one_another(records: list[StepRecord]) -> None:
    info = spec_info_from_steps(records, 4)
    assert info is not None
    assert info.n_complete + info.num_cut_steps == info.num_drafts
    assert info.num_accepted_tokens <= info.num_draft_tokens
    if info.mean_acceptance_length is not None and info.mean_acceptance_rate is not None:
        assert 1.0 <= info.mean_acceptance_length <= 5.0
        assert 0.0 <= info.mean_acceptance_rate <= 1.0
        assert info.mean_acceptance_length == pytest.approx(1 + sum(info.acceptance_by_position))
        assert list(info.acceptance_by_position) == sorted(info.acceptance_by_position, reverse=True)


@given(steps, steps)
def test_counters_over_responses_are_those_of_all_their_steps(a: list[StepRecord], b: list[StepRecord]) -> None:
    stats = SpeculativeDecodingStats(4)
    for records in (a, b):
        stats.update_from_output(response_of(records, 4))
    together = spec_info_from_steps(a + b, 4)
    assert together is not None
    assert (stats.num_drafts, stats.num_draft_tokens) == (together.num_drafts, together.num_draft_tokens)
    assert stats.num_accepted_tokens == together.num_accepted_tokens
    assert tuple(stats.accepted_histogram) == together.accepted_histogram
    summary = EagleMetricsSummary.from_stats(stats)
    if summary is None:
        assert together.n_complete == 0
    else:
        assert summary.mean_acceptance_length == together.mean_acceptance_length


def test_a_response_without_spec_info_changes_no_counter() -> None:
    stats = SpeculativeDecodingStats(3)
    stats.update_from_output(response_of([], 3))
    assert stats == SpeculativeDecodingStats(3)
    assert EagleMetricsSummary.from_stats(stats) is None


def test_counters_of_two_depths_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="a response drafted at depth 3\n  allowed: depth 2"):
        SpeculativeDecodingStats(2).update_from_output(response_of(HAND, 3))


def test_steps_can_be_counted_one_by_one() -> None:
    by_step, by_response = SpeculativeDecodingStats(3), SpeculativeDecodingStats(3)
    for step in HAND[:4]:
        by_step.update_per_draft(step.n_draft, step.n_accepted)
    by_response.update_from_output(response_of(HAND[:4], 3))
    assert by_step == by_response


@pytest.mark.parametrize(("drafted", "accepted"), [(3, 4), (2, 3), (3, -1)])
def test_more_accepted_than_drafted_is_an_error(drafted: int, accepted: int) -> None:
    with pytest.raises(InvariantViolated, match="0 <= accepted <= drafted"):
        SpeculativeDecodingStats(3).update_per_draft(drafted, accepted)


def test_the_summary_of_a_run_is_the_block_of_a_benchmark_record() -> None:
    stats = SpeculativeDecodingStats(3)
    stats.update_from_output(response_of(HAND, 3))
    summary = EagleMetricsSummary.from_stats(stats)
    assert summary is not None
    assert summary.to_dict() == {
        "enabled": True,
        "num_drafts": 5,
        "total_draft_tokens": 15,
        "total_accepted_tokens": 9,
        "mean_acceptance_rate": pytest.approx(7 / 12),
        "mean_acceptance_length": 2.75,
        "mean_accepted_draft_tokens": 1.75,
        "fraction_steps_ge_2": 0.75,
        "max_acceptance_length": 4,
        "acceptance_by_position": [0.75, 0.75, 0.25],
    }


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("limits", [new_tokens(17), GenerationConfig(max_new_tokens=17, stop_token_ids=(4,))])
def test_steps_account_for_every_generated_token_but_the_first(pair: Pair, k: int, limits: GenerationConfig) -> None:
    for response in tiny_engine(pair, k).generate(random_prompts([3, 9, 1, 17]), limits):
        metrics = response.req_metrics
        assert 1 + sum(step.n_committed for step in metrics.steps) == len(response.token_ids)
        assert metrics.spec_info == spec_info_from_steps(list(metrics.steps), k)
        at = 1
        for step in metrics.steps:
            assert (step.start, step.n_draft, step.ranks) == (at, k, None)
            assert step.cut == (step.n_committed < step.n_accepted + 1)
            at += step.n_committed
        assert not any(step.cut for step in metrics.steps[:-1])


def test_acceptances_are_those_a_trace_of_the_run_shows(pair: Pair) -> None:
    trace = RecordingTrace()
    (response,) = tiny_engine(pair, 3, trace=trace).generate([random_prompts([9])[0]], new_tokens(17))
    for r, step in enumerate(response.req_metrics.steps):
        row = trace.tensors[f"step{r}/accept.tokens"].tolist()
        committed = [token for token in row if token >= 0]
        assert row == [*committed, *[-1] * (4 - len(committed))]
        drafted = trace.tensors[f"step{r}/tree.tokens"].tolist()[1:]
        assert step.n_accepted == len(committed) - 1
        assert drafted[: step.n_accepted] == committed[:-1]
        assert step.n_accepted == 3 or drafted[step.n_accepted] != committed[-1]
        kept = committed[: step.n_committed]
        assert response.token_ids[step.start : step.start + step.n_committed] == kept


def test_a_request_that_ends_in_prefill_has_no_spec_info(pair: Pair) -> None:
    (response,) = tiny_engine(pair, 3).generate([[1, 2]], new_tokens(1))
    assert response.req_metrics == RequestMetrics(None, ())


def test_plain_decoding_has_no_spec_info(pair: Pair) -> None:
    (response,) = tiny_engine(pair, None).generate([[1, 2]], new_tokens(5))
    assert response.req_metrics == RequestMetrics(None, ())


def test_counters_can_be_switched_off_without_a_change_of_tokens(pair: Pair) -> None:
    prompts = random_prompts([9, 4])
    on = tiny_engine(pair, 3).generate(prompts, new_tokens(9))
    off = tiny_engine(pair, 3, enable_metrics=False).generate(prompts, new_tokens(9))
    assert tokens_of(on) == tokens_of(off)
    assert all(response.req_metrics == RequestMetrics(None, ()) for response in off)


def test_ranks_are_those_of_the_targets_token_in_the_drafts_order(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, vocab=8, draft_vocab=5)
    trace = RecordingTrace()
    engine = tiny_engine(pair, 4, trace=trace, collect_draft_ranks=True)
    assert engine.draft is not None
    assert engine.draft.draft_to_target is not None
    mapped = engine.draft.draft_to_target.tolist()
    (response,) = engine.generate([random_prompts([9], n_vocab=8)[0]], new_tokens(40))
    seen = set()
    for r, step in enumerate(response.req_metrics.steps):
        assert step.ranks is not None
        assert len(step.ranks) == min(step.n_committed, 4)
        for level, rank in enumerate(step.ranks):
            name = "extend" if level == 0 else f"chain{level}"
            logits = trace.tensors[f"step{r}/{name}/draft.head"][0]
            order = [mapped[i] for i in torch.argsort(logits, descending=True, stable=True).tolist()]
            wanted = response.token_ids[step.start + level]
            assert rank == (order.index(wanted) if wanted in mapped else -1)
            assert (rank == 0) == (level < step.n_accepted)
            seen.add(rank)
    assert {-1, 0, 1} <= seen


def test_ranks_of_a_cut_step_end_where_the_text_ends(pair: Pair) -> None:
    n_cut = 0
    for token in range(6):
        limits = GenerationConfig(max_new_tokens=20, stop_token_ids=(token,))
        engine = tiny_engine(pair, 5, collect_draft_ranks=True)
        for response in engine.generate(random_prompts([3, 9, 1, 17]), limits):
            for step in response.req_metrics.steps:
                assert step.ranks is not None
                assert len(step.ranks) == min(step.n_committed, 5)
                n_cut += step.cut
    assert n_cut
