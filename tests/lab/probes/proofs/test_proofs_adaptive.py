"""Adaptive speculation as a proof: its engines, its verdict, and a small pair on the CPU for its structure."""

from __future__ import annotations

import pytest
from proof_subjects import planted_subject

from eagle3core.adaptive import choose
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
    verdict = judge_rates([rate(adaptive)], {1: rate(50.0), 2: rate(fixed)}, [rate(100.0)])
    assert verdict.held is held
    assert verdict.values["best_depth"] == (2 if fixed > 100.0 else 0)


def test_wrong_tokens_fail_at_any_speed() -> None:
    assert judge_rates([rate(900.0, is_right=False)], {1: rate(50.0)}, [rate(100.0)]).held is False
    assert judge_rates([rate(900.0)], {1: rate(50.0)}, [rate(100.0), rate(99.0, is_right=False)]).held is False


def test_runs_by_turns_are_judged_by_their_medians() -> None:
    verdict = judge_rates([rate(99.5), rate(90.0), rate(99.4)], {1: rate(50.0)}, [rate(103.0), rate(100.0), rate(99.0)])
    assert verdict.held
    assert verdict.values["of_plain"] == pytest.approx(0.994)
    assert verdict.values["plain_tokens_per_s_samples"] == [103.0, 100.0, 99.0]


@pytest.mark.parametrize(("first", "n_runs"), [(104.0, 3), (106.0, 1)])
def test_adaptive_and_plain_run_by_turns_where_they_are_about_as_quick(
    monkeypatch: pytest.MonkeyPatch, first: float, n_runs: int
) -> None:
    subject, runs = planted_subject(), list[str]()

    def run(self: Adaptive, engine: object, batch: int, policy: object) -> Rate:
        runs.append({None: "plain", choose: "adaptive"}.get(policy, "fixed"))
        return rate(first if policy is choose else 100.0)

    monkeypatch.setattr(Adaptive, "_rate", run)
    plan = AdaptivePlan(k=1, batches=(1,), lengths=(1.0, 2.0))
    for check in Adaptive(subject, lambda length: subject.draft, lambda n, length: [], plan).checks():
        runs.clear()
        verdict = check.judge()
        assert len(verdict.values["tokens_per_s_samples"]) == n_runs
        assert len(verdict.values["plain_tokens_per_s_samples"]) == n_runs
        turns = ["adaptive", "plain"] * 3 if n_runs == 3 else ["adaptive"]
        assert runs[runs.index("fixed") + 1 :] == turns


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
