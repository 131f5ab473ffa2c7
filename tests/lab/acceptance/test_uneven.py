"""Draft decisions on prompts of unequal lengths: right ones agree at every level, bugs hidden elsewhere contradict."""

from __future__ import annotations

import pytest
from rings import exhaustive_but

from lab.acceptance.reference import ReferenceReport
from lab.acceptance.uneven import N_PROMPTS, check_uneven
from lab.pairs import shipped_pair
from lab.parity.faults.of_reach import LATE, REACH_FAULTS

pytestmark = pytest.mark.reference

HIDDEN = sorted(fault.name for fault in REACH_FAULTS if "RoPE" not in fault.what)  # which the shipped pair cannot show


@pytest.mark.slow
@pytest.mark.exhaustive  # `make lab` asks the same
def test_every_decision_is_the_references_at_every_level() -> None:
    reference = checked()
    assert reference.passed(), reference.verdict
    assert {decision.prompt for decision in reference.decisions} == set(range(N_PROMPTS))
    assert {decision.level for decision in reference.decisions} == set(range(8)), "every level must be reached"


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_but([name for name in HIDDEN if name.startswith("late")], HIDDEN))
def test_a_bug_that_ordinary_prompts_hide_contradicts_the_reference(name: str) -> None:
    """Judged by ranks: some of these bugs leave the acceptance length as it is, and some raise it.

    What contradicts in the first tokens contradicts in all that the notebook continues by; a late bug needs them all.
    """
    reference = checked(name, max_new_tokens=64 if name.startswith("late") else 24)
    assert not reference.passed()
    assert reference.bugs, reference.verdict
    if name.startswith("late"):
        assert min(decision.level for decision in reference.bugs) == LATE


def checked(fault: str | None = None, **changed: int) -> ReferenceReport:
    """As notebook 31_acceptance checks the shipped pair."""
    shipped = shipped_pair()
    return check_uneven(shipped.target, shipped.draft, fault=fault, **changed)
