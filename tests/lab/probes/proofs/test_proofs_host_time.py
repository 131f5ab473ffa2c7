"""Which steps count for the host's time: those beside loops that nothing slowed."""

from __future__ import annotations

import pytest

from lab.probes.proofs.host_time import DISTURBED, MOST_HOST_US, HostStep, judge_host_time, loop_us, undisturbed

pytestmark = pytest.mark.reference

QUICK, SLOW = 28.0, 45.0


def test_steps_beside_a_slow_loop_are_set_aside_and_a_slow_step_beside_quick_ones_is_not() -> None:
    steps = [HostStep(70, QUICK), HostStep(250, SLOW), HostStep(400, QUICK * 1.1), HostStep(72, QUICK * DISTURBED)]
    assert undisturbed(steps) == [steps[0], steps[2], steps[3]]
    assert undisturbed([]) == []


def test_the_verdict_is_of_the_undisturbed_steps_and_tells_what_all_of_them_took() -> None:
    steps = [HostStep(70, QUICK)] * 30 + [HostStep(300, SLOW)] * 70
    found = judge_host_time(steps, 100)
    assert found.held is True
    assert (found.values["host_us"], found.values["host_us_of_all"], found.values["n_undisturbed"]) == (70, 300, 30)
    assert "30 of 100 steps undisturbed, all: 300 us" in found.detail
    slow = judge_host_time([HostStep(MOST_HOST_US + 10, QUICK)] * 30 + [HostStep(70, SLOW)] * 70, 100)
    assert slow.held is False, "quick steps beside slow loops do not help"


def test_too_few_undisturbed_steps_give_no_verdict() -> None:
    found = judge_host_time([HostStep(70, QUICK)] * 19 + [HostStep(70, SLOW)] * 81, 100)
    assert found.held is None
    assert "all but 19 of 100" in found.detail
    assert len(found.values["host_us_samples"]) == len(found.values["loop_us_samples"]) == 100
    assert judge_host_time([], 100).held is None


def test_the_loop_takes_time() -> None:
    assert 1.0 < min(loop_us() for _ in range(20)) < 1000.0
