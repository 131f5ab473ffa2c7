"""Rules of acceptance through the engine: what they commit, what responses and counters say, and who refuses them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from device_engines import engine_by_meaning
from rings import slow_but
from tiny_engines import (
    DYNAMIC_TREE,
    FIXED_TREE,
    Pair,
    accepted_counts,
    drafting_engine,
    is_empty,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
)

from eagle3core import (
    ConfigError,
    Engine,
    ForcedAcceptance,
    MedusaAcceptance,
    RejectionAcceptance,
    RelaxedAcceptance,
    Response,
    SpeculativeDecodingStats,
)
from eagle3core.acceptance import AcceptanceRule
from eagle3core.metrics import EagleMetricsSummary
from eagle3core.request import own_tokens

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17]
CHAIN = {"num_speculative_tokens": 3}
FORCED = ForcedAcceptance(length=2.5)


def engine_by(pair: Pair, rule: AcceptanceRule | None, how: dict[str, Any], **changes: Any) -> Engine:
    return drafting_engine(pair, {**how, "acceptance": rule}, **changes)


def lengths_of(responses: list[Response]) -> list[float]:
    """Mean acceptance length of each."""
    infos = [response.req_metrics.spec_info for response in responses]
    return [info.mean_acceptance_length or 0.0 for info in infos if info is not None]


@pytest.mark.parametrize(
    ("how", "temperature"),
    slow_but([(CHAIN, 0.0), (FIXED_TREE, 1.0)], [(how, heat) for heat in (0.0, 1.0) for how in (CHAIN, FIXED_TREE)]),
    ids=["chain", "tree", "chain drawn", "tree drawn"],
)
def test_a_forced_length_is_what_every_step_commits(pair: Pair, how: dict[str, Any], temperature: float) -> None:
    prompts = random_prompts(LENGTHS)
    draws = {"temperature": temperature, "seed": 1} if temperature else {}
    for n in range(4):
        engine = engine_by(pair, ForcedAcceptance(accepted_drafts=n), how)
        responses = engine.generate(prompts, new_tokens(1 + 6 * (n + 1), **draws))
        steps = [step for response in responses for step in response.req_metrics.steps]
        assert {step.n_accepted for step in steps} == {n}
        assert {step.n_committed for step in steps} == {n + 1}
        assert lengths_of(responses) == [n + 1.0] * 4
        assert is_empty(engine)


def test_a_forced_fraction_comes_out_over_many_steps_whatever_runs_beside(pair: Pair) -> None:
    prompts = random_prompts([3] * 12)
    together = engine_by(pair, FORCED, CHAIN).generate(prompts, new_tokens(50))
    counts = [step.n_accepted for each in together for step in each.req_metrics.steps if not step.cut]
    assert set(counts) == {1, 2}
    # Four standard deviations.
    assert abs(sum(counts) / len(counts) - 1.5) < 4 * 0.5 / len(counts) ** 0.5
    # The same requests with one slot: ids and positions are the same, and so is what is forced.
    alone = engine_by(pair, FORCED, CHAIN, max_batch_size=1).generate(prompts[:3], new_tokens(50))
    assert tokens_of(alone) == tokens_of(together[:3])


def test_whoever_reads_a_forced_answer_is_told(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eagle3core")
    engine = engine_by(pair, FORCED, {**CHAIN, "eagle_metrics_debug": True})
    responses = engine.generate(random_prompts([4]), new_tokens(12))
    told = "acceptance forced to 2.5 tokens a step"
    assert told in engine.speculation.reason
    for response in responses:
        assert response.lossy == f"{told}: tokens are not the target's own"
        assert told in repr(response)
        info = response.req_metrics.spec_info
        assert info is not None
        assert info.to_dict()["acceptance"] == FORCED.label
        assert {step.acceptance for step in response.req_metrics.steps} == {FORCED.label}
    lines = [record.message for record in caplog.records if "[EAGLE][Metrics]" in record.message]
    assert lines
    assert all(line.endswith(told) for line in lines)
    handle = engine.add_request([1, 2], new_tokens(4))
    while engine.step():
        pass
    assert handle.response().lossy == responses[0].lossy
    stats = SpeculativeDecodingStats(3)
    stats.update_from_output(responses[0])
    summary = EagleMetricsSummary.from_stats(stats)
    assert summary is not None
    assert summary.to_dict()["acceptance"] == FORCED.label
    usual = tiny_engine(pair, 3).generate(random_prompts([4]), new_tokens(12))[0]
    assert usual.lossy is None
    assert usual.req_metrics.spec_info is not None
    assert "acceptance" not in usual.req_metrics.spec_info.to_dict()
    with pytest.raises(ConfigError, match="acceptance of the target's own choice"):
        stats.update_from_output(usual)


@pytest.mark.parametrize("how", [CHAIN, FIXED_TREE, DYNAMIC_TREE], ids=["chain", "fixed", "dynamic"])
def test_rules_that_let_everything_through_accept_every_draft_and_strict_ones_decode_plainly(
    pair: Pair, how: dict[str, Any]
) -> None:
    prompts = random_prompts(LENGTHS)
    plain = plain_tokens(pair, prompts, 17)
    open_ = engine_by(pair, RelaxedAcceptance(6, 100.0), how).generate(prompts, new_tokens(17))
    if how is not DYNAMIC_TREE:  # a dynamic one need not reach its depth
        assert lengths_of(open_) == [4.0] * 4
    assert min(lengths_of(open_)) >= 2.0
    strict = engine_by(pair, RelaxedAcceptance(1, 0.0), how).generate(prompts, new_tokens(17))
    assert tokens_of(strict) == plain
    assert all(response.lossy is not None for response in [*open_, *strict])


def test_a_relaxed_answer_holds_no_token_outside_its_bounds_and_some_that_are_not_the_best(pair: Pair) -> None:
    """Log-probabilities of the committed tokens are those of the target, so the bounds can be read from them."""
    top_n, delta = 2, 0.9
    engine = engine_by(pair, RelaxedAcceptance(top_n, delta), CHAIN)
    responses = engine.generate(random_prompts(LENGTHS), new_tokens(30, logprobs=6))
    n_others = 0
    for response in responses:
        for place in response.logprobs or []:
            likeliest = [token for token, _ in place.top]
            assert place.token_id in likeliest[:top_n]
            assert place.top[0][1] - place.logprob <= delta + 1e-9
            n_others += place.token_id != likeliest[0]
    assert n_others > 0


def test_medusas_rule_is_lossy_for_drawn_requests_and_plain_decoding_for_greedy_ones(pair: Pair) -> None:
    prompts, engine = random_prompts(LENGTHS), engine_by(pair, MedusaAcceptance(), CHAIN)
    limits = [new_tokens(16), new_tokens(16, temperature=1.0, seed=1)] * 2
    responses = engine.generate(prompts, limits)
    assert [response.lossy is None for response in responses] == [True, False, True, False]
    plain = plain_tokens(pair, prompts, 16)
    assert [responses[0].token_ids, responses[2].token_ids] == [plain[0], plain[2]]
    matched = tiny_engine(pair, 3).generate(prompts, limits)
    drawn = [sum(lengths_of([each[1], each[3]])) for each in (responses, matched)]
    assert drawn[0] > drawn[1], "typical drafts are accepted beside those that equal the draw"


def test_greedy_requests_by_rejection_decode_plainly(pair: Pair) -> None:
    prompts = random_prompts(LENGTHS)
    plain = plain_tokens(pair, prompts, 20)
    responses = engine_by(pair, RejectionAcceptance(), CHAIN).generate(prompts, new_tokens(20))
    assert tokens_of(own_tokens(responses)) == plain


@pytest.mark.parametrize("rule", [FORCED, RelaxedAcceptance(2, 0.5), MedusaAcceptance(), RejectionAcceptance()])
def test_performance_mode_takes_no_rule_of_acceptance(
    pair: Pair, rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_by(pair, rule, CHAIN)
    monkeypatch.setenv("EAGLE3_PERF_MODE", "1")
    with pytest.raises(ConfigError, match=f"acceptance is {rule.label[:12]}.* in performance mode") as caught:
        engine.generate(random_prompts([4]), new_tokens(4))
    assert "acceptance out" in caught.value.remedy
    assert is_empty(engine)


def test_whoever_compares_tokens_refuses_answers_that_are_not_the_targets_own(pair: Pair) -> None:
    for rule in (FORCED, RelaxedAcceptance(2, 0.5)):
        with pytest.raises(ConfigError, match="tokens are not the target's own"):
            own_tokens(engine_by(pair, rule, CHAIN).generate(random_prompts([4]), new_tokens(4)))


@pytest.mark.parametrize("n_slots", slow_but([3], [2, 3]))
def test_a_draft_that_knows_a_quarter_of_the_tokens_draws_the_same_alone_and_in_company(
    nano_pair: Pair, n_slots: int
) -> None:
    """The kernels' path, each launch by its meaning, results read a step late, a draft of 64 of the 256 tokens."""
    prompts, rule = random_prompts([3, 70, 9, 17], n_vocab=256), RejectionAcceptance()
    limits = [new_tokens(20, temperature=1.0, seed=i) for i in range(4)]
    alone = engine_by_meaning(nano_pair, 3, n_slots=1, acceptance=rule)
    expected = [tokens_of(alone.generate([prompt], each))[0] for prompt, each in zip(prompts, limits, strict=True)]
    engine = engine_by_meaning(nano_pair, 3, n_slots=n_slots, n_behind=1, acceptance=rule)
    responses = engine.generate(prompts, limits)
    assert tokens_of(responses) == expected
    assert len(accepted_counts(responses)) > 1
    assert is_empty(engine)
