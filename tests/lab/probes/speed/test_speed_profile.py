"""A profile of real steps is taken apart: the device's runner and program, each launch computed by what it means.

Only the clock is not a GPU's: every launch is noted as a kernel of 2 us, 1 us after the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from device_engines import device_engine
from tiny_engines import Pair

from eagle3core.kernels.card import Call
from eagle3core.step.program import launches_of
from eagle3core.step.replay import EagerReplayer, compute
from lab.errors import RunFailed
from lab.probes.proofs import steps
from lab.probes.proofs.gpu_trace import Span
from lab.probes.proofs.steps import BETWEEN_STEPS, EDGE_STEPS, WARM_STEPS, profile_steps

pytestmark = pytest.mark.reference

PROMPTS = [list(range(1, 21)), list(range(30, 50))]


class Noted:
    """Stands where the profiler stands: keeps what is launched while it is on."""

    def __init__(self) -> None:
        self.is_on, self.spans = False, list[Span]()
        self.n_kernels = 0

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def execute(self, calls: Sequence[Call]) -> None:
        compute(calls)
        for launch in (launch for call in calls for launch in call.launches):
            self.n_kernels += 1
            if self.is_on:
                self.spans.append(Span(launch.variant.name, 3.0 * self.n_kernels, 3.0 * self.n_kernels + 2.0))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    made = Noted()
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: made)
    monkeypatch.setattr(steps.ProfiledSteps, "kernels", lambda self: made.spans)
    return made


@pytest.mark.parametrize("k", [None, 2])
def test_steps_of_the_devices_runner_are_given_to_their_stages(nano_pair: Pair, noted: Noted, k: int | None) -> None:
    engine = device_engine(nano_pair, k, EagerReplayer(noted.execute))
    n_steps = 3
    found = profile_steps(engine, PROMPTS, n_steps)
    program = engine.runner.programs[2]  # type: ignore[attr-defined]
    n_launches = len(launches_of(program))
    assert sum(stage.n_kernels for stage in found.stages) == n_launches
    assert len(found.step_us) == n_steps
    assert set(found.step_us) == {3.0 * n_launches}, "a step is its own kernels and nothing else"
    assert found.sum_over_step == pytest.approx(1.0)
    names = [stage.stage for stage in found.stages]
    assert names[-1] == BETWEEN_STEPS
    assert ("draft.fc" in names) == (k is not None)
    assert {"tree", "target.attn", "target.mlp", "target.head", "accept", "commit"} <= set(names)
    for stage in found.stages[:-1]:
        first_of_step = stage.stage == "tree"
        assert stage.own_us[0] == pytest.approx(3.0 * stage.n_kernels - (1.0 if first_of_step else 0.0))
    middle = WARM_STEPS + EDGE_STEPS + n_steps // 2
    most = middle * ((k or 0) + 1)
    assert 20 + middle <= found.cached <= 20 + most, "prompt, and what was committed until the middle of the profile"


def test_other_engines_and_half_filled_ones_are_refused(nano_pair: Pair, noted: Noted) -> None:
    engine = device_engine(nano_pair, 2, EagerReplayer(noted.execute))
    with pytest.raises(RunFailed, match="2 slots with 1 prompts: no captured step"):
        profile_steps(engine, PROMPTS[:1], 3)
