"""Rules of acceptance as settings: what they refuse, in three parts, and what responses and records say of them."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3core import (
    ConfigError,
    EngineConfig,
    ForcedAcceptance,
    MedusaAcceptance,
    RejectionAcceptance,
    RelaxedAcceptance,
    SpeculativeConfig,
)
from eagle3core.acceptance import AcceptanceRule

pytestmark = pytest.mark.reference

TREE = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 10}


def spec(rule: Any, **changes: Any) -> SpeculativeConfig:
    return SpeculativeConfig(**{"model": "draft", "num_speculative_tokens": 3, "acceptance": rule, **changes})


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ForcedAcceptance(), "length is None with accepted_drafts None"),
        (lambda: ForcedAcceptance(length=2.0, accepted_drafts=1.0), "length is 2.0 with accepted_drafts 1.0"),
        (lambda: ForcedAcceptance(length=0.5), "length is 0.5"),
        (lambda: ForcedAcceptance(length=float("nan")), "length is nan"),
        (lambda: ForcedAcceptance(length=True), "length is True"),
        (lambda: ForcedAcceptance(accepted_drafts=-1), "accepted_drafts is -1"),
        (lambda: RelaxedAcceptance(0, 0.5), "top_n is 0"),
        (lambda: RelaxedAcceptance(10, -0.5), "delta is -0.5"),
        (lambda: RelaxedAcceptance(10, float("inf")), "delta is inf"),
        (lambda: MedusaAcceptance(epsilon=0.0), "epsilon is 0.0"),
        (lambda: MedusaAcceptance(delta=1.0), "delta is 1.0"),
        (lambda: spec("forced"), "acceptance is 'forced'"),
        (lambda: spec(ForcedAcceptance), "acceptance is "),
        (lambda: spec(ForcedAcceptance(length=4.5)), "acceptance is forced to 4.5 tokens a step with 3 drafts"),
        (lambda: spec(ForcedAcceptance(accepted_drafts=4)), "acceptance is forced to 5 tokens a step with 3 drafts"),
        (lambda: spec(ForcedAcceptance(length=2), method="ngram", model=None), "with method 'ngram'"),
        (lambda: spec(RejectionAcceptance(), method="suffix", model=None), "with method 'suffix' and a chain"),
        (lambda: spec(RejectionAcceptance(), method="draft_target"), "with method 'draft_target' and a chain"),
        (lambda: spec(RejectionAcceptance(), **TREE), "with method 'eagle3' and a dynamic tree"),
        (lambda: spec(ForcedAcceptance(length=2), **TREE), "with method 'eagle3' and a dynamic tree"),
        (lambda: spec(ForcedAcceptance(length=2), adaptive=True), "adaptive is True with acceptance forced to 2"),
        (lambda: spec(RejectionAcceptance(), adaptive=True), "adaptive is True with acceptance by rejection"),
        (lambda: ForcedAcceptance(length=2.5).check_request(1), "max_draft_tokens is 1 with acceptance forced to 2.5"),
        (lambda: EngineConfig(speculative_config=spec(RelaxedAcceptance(2, 1.0)), collect_draft_ranks=True),
         "collect_draft_ranks is on with acceptance relaxed to the top 2 within 1"),
    ],
)  # fmt: skip
def test_what_is_no_rule_or_contradicts_one_is_refused_in_three_parts(make: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert what in caught.value.what
    assert caught.value.allowed
    assert caught.value.remedy


@pytest.mark.parametrize("rule", [None, RelaxedAcceptance(3, 0.5), MedusaAcceptance()])
def test_rules_that_hold_at_any_depth_go_with_depths_chosen_anew(rule: AcceptanceRule | None) -> None:
    assert spec(rule, adaptive=True).adaptive


def test_a_forced_length_takes_requests_that_use_as_many_drafts() -> None:
    for most in (None, 2, 3):
        ForcedAcceptance(length=2.5).check_request(most)


def test_a_rule_of_its_own_is_nobodys_default() -> None:
    assert SpeculativeConfig(model="draft").acceptance is None
    assert SpeculativeConfig(method="ngram").acceptance is None
    assert SpeculativeConfig.from_tensorrt_llm({"max_draft_len": 3}, model="draft").acceptance is None


def test_both_public_ways_of_counting_name_the_same_forced_length() -> None:
    """TensorRT-LLM counts accepted drafts; SGLang and vLLM count tokens, with the bonus."""
    for length in (1, 2.25, 4):
        by_length, by_drafts = ForcedAcceptance(length=length), ForcedAcceptance(accepted_drafts=length - 1)
        assert by_length.drafts == by_drafts.drafts == length - 1
        assert by_length.label == by_drafts.label == f"forced to {length:g} tokens a step"
        assert spec(by_length).acceptance is by_length


@pytest.mark.parametrize(
    ("rule", "greedy", "drawn"),
    [
        (RejectionAcceptance(), True, True),
        (MedusaAcceptance(), True, False),
        (RelaxedAcceptance(10, 0.6), False, False),
        (ForcedAcceptance(accepted_drafts=0), False, False),
    ],
)
def test_each_rule_says_whose_tokens_are_the_targets_own(rule: AcceptanceRule, greedy: bool, drawn: bool) -> None:
    for draws, is_own in ((False, greedy), (True, drawn)):
        assert rule.is_lossless(draws=draws) is is_own
        lossy = rule.lossy(draws=draws)
        assert (lossy is None) is is_own
        assert lossy is None or rule.label in lossy


def test_labels_tell_rules_and_their_numbers_apart() -> None:
    rules = [
        RejectionAcceptance(), MedusaAcceptance(), MedusaAcceptance(0.2), RelaxedAcceptance(2, 0.5),
        RelaxedAcceptance(2, 0.6), RelaxedAcceptance(3, 0.5), ForcedAcceptance(2), ForcedAcceptance(2.1),
    ]  # fmt: skip
    assert len({rule.label for rule in rules}) == len(rules)
