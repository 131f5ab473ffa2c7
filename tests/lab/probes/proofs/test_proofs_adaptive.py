"""Adaptive speculation as a proof: its engines, its verdict, and a small pair on the CPU for its structure."""

from __future__ import annotations

import pytest
from proof_subjects import planted_subject

from eagle3core.weights import PackedDraft
from lab.pairs.planted import PlantedGeometry
from lab.probes.proofs.adaptive import Adaptive, AdaptivePlan, Rate, draft_of_length, judge_rates
from lab.probes.proofs.plans import planted_prompts

pytestmark = pytest.mark.reference


def rate(tokens_per_s: float, *, is_right: bool = True) -> Rate:
    return Rate(tokens_per_s, is_right, "9 of depth 0 (plain)")


@pytest.mark.parametrize(
    ("adaptive", "fixed", "held"),
    [(98.0, 99.0, False), (99.5, 90.0, True), (194.5, 200.0, True), (193.0, 200.0, False)],
)
def test_both_shares_have_to_be_kept(adaptive: float, fixed: float, held: bool) -> None:
    verdict = judge_rates(rate(adaptive), {1: rate(50.0), 2: rate(fixed)}, rate(100.0))
    assert verdict.held is held
    assert verdict.values["best_depth"] == (2 if fixed > 100.0 else 0)


def test_wrong_tokens_fail_at_any_speed() -> None:
    assert judge_rates(rate(900.0, is_right=False), {1: rate(50.0)}, rate(100.0)).held is False


def test_every_batch_and_acceptance_is_run_and_gives_the_maps_tokens() -> None:
    subject = planted_subject()
    assert subject.tokens is not None
    tokens = subject.tokens
    geometry = PlantedGeometry("small", subject.target.geometry, subject.draft.geometry)
    plan = AdaptivePlan(k=2, batches=(1, 2), lengths=(3.0,), context=8, n_tokens=8)

    def draft(length: float) -> PackedDraft:
        return draft_of_length(subject, geometry, plan.k, length, 64)

    checks = Adaptive(subject, draft, lambda n, length: planted_prompts(tokens, n, length), plan).checks()
    assert [check.parameters["slots"] for check in checks] == [1, 2]
    verdict = checks[1].judge()
    assert verdict.values["is_right"], verdict.detail
    assert {f"fixed_tokens_per_s.{depth}" for depth in (1, 2)} <= verdict.values.keys()
    assert verdict.values["steps"]
