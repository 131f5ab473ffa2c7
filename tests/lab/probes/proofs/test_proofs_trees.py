"""What a tree may cost: judged from profiles whose numbers are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle3core import Response
from lab.probes.proofs.check import Verdict
from lab.probes.proofs.steps import BETWEEN_STEPS, StageTime, StepProfile
from lab.probes.proofs.tree_cost import H200_TREES, MOST_BOOKKEEPING_US, TreeCostPlan, judge_cost

pytestmark = pytest.mark.reference

RIGHT = Verdict(True, "1 prompts, 9 tokens equal", {"n_tokens": 9})


def profile(accepted: tuple[int, ...] = (2, 3), **stages: float) -> StepProfile:
    """Steps whose stages take the times named; dots in names are written as double underscores."""
    times = [StageTime(name.replace("__", "."), (us, us, us), (0.0,) * 3, 1) for name, us in stages.items()]
    steps = [SimpleNamespace(n_accepted=n) for n in accepted]
    response: Any = SimpleNamespace(req_metrics=SimpleNamespace(steps=steps))
    return StepProfile((*times, StageTime(BETWEEN_STEPS, (5.0,), (5.0,), 0)), (sum(stages.values()),) * 3, 512.0,
                       responses=(cast(Response, response),))  # fmt: skip


PLAIN = profile(target__attn=600.0, target__mlp=300.0, commit=100.0)


def judged(bound: float, **stages: float) -> Verdict:
    wanted = {"draft__mlp": 400.0, "target__attn": 700.0, "target__head": 350.0, "tree": 30.0, "accept": 10.0}
    return judge_cost(RIGHT, profile(**{**wanted, **stages}), PLAIN, bound)


def test_the_targets_pass_is_held_against_the_plain_step() -> None:
    found = judged(1.06)
    assert found.held
    assert found.values["target_over_plain"] == pytest.approx(1.05)
    assert found.values["bookkeeping_us"] == 40.0
    assert found.values["mean_acceptance_length"] == 3.5
    assert found.values["speedup"] == pytest.approx(3.5 * 1000 / 1490)
    assert judged(1.04).held is False


@pytest.mark.parametrize("stage", ["tree", "accept", "commit", "rewind"])
def test_every_stage_of_the_bookkeeping_counts(stage: str) -> None:
    assert judged(1.06, **{stage: MOST_BOOKKEEPING_US + 1}).held is False
    assert judged(1.06, draft__mlp=4000.0).held, "the draft's passes are no bookkeeping"


def test_wrong_tokens_fail_whatever_they_cost() -> None:
    wrong = Verdict(False, "1 of 1 prompts differ")
    assert judge_cost(wrong, profile(target__attn=1.0), PLAIN, 9.0).held is False
    assert judge_cost(Verdict(None, "no tokens"), profile(target__attn=1.0), PLAIN, 9.0).held is None


def test_every_tree_is_measured_beside_a_plain_step_of_the_same_session() -> None:
    plan = TreeCostPlan({"dynamic-8/3/4": 1.06}, contexts=(16, 64))
    assert [(s.k, s.tree) for s in plan.settings()] == [(0, None), (4, "dynamic-8/3/4")] * 2
    assert len({s.session_len for s in plan.settings()[:2]}) == 1


def test_the_bounds_name_trees_of_eight_to_sixty_four_nodes() -> None:
    found = {s.speculation("draft").n_nodes for s in H200_TREES.settings() if s.tree}  # type: ignore[union-attr]
    assert found == {8, 16, 32, 60, 64}
