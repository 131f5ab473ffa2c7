"""Planted bugs of how an engine runs a head: the lamp of each is red and first, with what mending it really gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from broken_engines import ENGINE_FAULTS, H200_SPEED, broken_engine
from rings import exhaustive_but

from lab.doctor.draft.conditions import difference, mean_length
from lab.doctor.draft.lamp import Finding
from lab.doctor.draft.lamps.engine import ENGINE, tree_choices
from lab.doctor.draft.lamps.serving import SERVING

pytestmark = [pytest.mark.reference, pytest.mark.slow]

FIRST = [(lamp, faults[0]) for lamp, faults in ENGINE_FAULTS.items()]
EVERY = [(lamp, fault) for lamp, faults in ENGINE_FAULTS.items() for fault in faults]
SIZE = {"n_prompts": 6, "max_new_tokens": 48}  # as few as every bug is told by
LOOKS = {lamp.name: lamp.look for lamp in (*ENGINE, *SERVING)}


@cache
def right_length() -> float:
    """What the engine without a bug accepts."""
    return mean_length(broken_engine("", **SIZE).conditions.alone)


def red_ones(fault: str, **size: int) -> list[Finding]:
    """The red lamps of an engine with a bug, by gain and then by weight."""
    case = broken_engine(fault, **size)
    found = [lamp.look(case) for lamp in (*ENGINE, *SERVING)]
    red = [finding for finding in found if finding.repair is not None]
    return sorted(red, key=lambda one: (-one.repair.gain if one.repair else 0.0, -one.weight))


def test_a_right_engine_has_no_red_lamp() -> None:
    assert red_ones("", **SIZE) == []


@pytest.mark.parametrize(("lamp", "fault"), exhaustive_but(FIRST[:1], EVERY))
def test_the_lamp_of_a_planted_bug_is_first_or_second(lamp: str, fault: str) -> None:
    red = red_ones(fault, **SIZE)
    assert lamp in [finding.lamp for finding in red[:2]]
    repair = next(finding.repair for finding in red if finding.lamp == lamp)
    assert repair is not None
    if lamp not in ("as_distribution", "tree_below_chain"):
        assert repair.after == pytest.approx(right_length(), rel=0.1)


def test_rows_of_another_machine_say_where_speculation_stops_paying() -> None:
    case = broken_engine("", n_prompts=2, max_new_tokens=24)
    case.speed_rows = H200_SPEED
    found = LOOKS["slower"](case)
    assert found.colour != "unknown"
    assert "H200" in found.said
    far = replace(case, batch=32)
    far.__dict__ |= {"text": case.text, "plain": case.plain}
    assert LOOKS["slower"](far).colour == "unknown", "the rows end at batch 4"


def test_without_rows_or_a_gpu_the_lamp_of_speed_cannot_tell() -> None:
    found = LOOKS["slower"](broken_engine("", n_prompts=2, max_new_tokens=8))
    assert (found.colour, found.repair) == ("unknown", None)
    assert "CPU" in found.said


def test_two_runs_of_a_right_engine_share_every_root() -> None:
    at = broken_engine("", n_prompts=2, max_new_tokens=24).conditions
    found = difference(at.alone, at.in_chunks)
    assert (found.n_other, found.n_texts, found.first) == (0, 0, None)
    assert found.n_roots == sum(not step.cut for one in at.alone for step in one.req_metrics.steps)


def test_the_tree_that_is_tried_holds_its_chain() -> None:
    assert {(0,), (0, 0), (0, 0, 0)} < set(tree_choices(3))
