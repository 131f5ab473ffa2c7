"""The planted slowdown on the device's runner: real programs, launches computed by what they mean, a made-up clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from device_engines import device_engine
from tiny_engines import Pair

from eagle3core.kernels.card import Call, Launch
from eagle3core.step.program import calls_of, launches_of
from eagle3core.step.replay import EagerReplayer, Enqueue, compute
from eagle3core.step.run import DeviceRunner
from lab.errors import ExperimentError, RunFailed
from lab.probes.ab.judging import judge
from lab.probes.ab.slowdown import (
    SHORTEST,
    Piece,
    PlantedSlowdown,
    SwitchedReplayer,
    calibrated,
    places_of,
    unexpected,
    with_waits,
)
from lab.probes.bench.record import Rows
from lab.probes.proofs import steps
from lab.probes.proofs.gpu_trace import Span
from lab.rows import environment

pytestmark = pytest.mark.reference

KERNEL = "target.mlp/gemm_swiglu"
PROMPTS = [list(range(1, 13))]
KERNEL_US, SPIN_US, CYCLES = 40.0, 0.5, 1900.0


class Clocked:
    """Kernels take 40 us, a spin 0.5 us and its cycles; kept while the profiler, in whose place it stands, is on."""

    def __init__(self) -> None:
        self.is_on, self.spans, self.now = False, list[Span](), 0.0
        self.calls: dict[int, Call] = {}  # by their first launch

    def start(self) -> None:
        self.is_on, self.spans = True, []

    def stop(self) -> None:
        self.is_on = False

    def ran(self, name: str, time_us: float) -> None:
        if self.is_on:
            self.spans.append(Span(name, self.now, self.now + time_us))
        self.now += time_us

    def know(self, calls: Sequence[Call]) -> None:
        self.calls |= {id(call.launches[0]): call for call in calls if call.launches}

    def execute(self, calls: Sequence[Call]) -> None:
        compute(calls)
        self.know(calls)
        for launch in (launch for call in calls for launch in call.launches):
            self.ran(launch.variant.name, KERNEL_US)

    def capture(self, pieces: Sequence[Piece]) -> Enqueue:
        def replay() -> None:
            for piece in pieces:
                if isinstance(piece, int):
                    self.ran("at::cuda::spin_kernel(long)", SPIN_US + piece / CYCLES)
                elif isinstance(piece, Launch):
                    compute([self.calls[id(piece)]] if id(piece) in self.calls else [])
                    self.ran(piece.variant.name, KERNEL_US)
                else:
                    compute([piece])

        return replay


@pytest.fixture
def found(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> PlantedSlowdown:
    clock = Clocked()
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: clock)
    monkeypatch.setattr(steps.ProfiledSteps, "kernels", lambda self: clock.spans)
    plain = EagerReplayer(clock.execute)
    engine = device_engine(nano_pair, None, plain, n_slots=1)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    runner.prepare()  # as an engine on a GPU is when it is made: what was captured must not stay
    for program in runner.all_programs:  # those over prompts have the kernel too, and run with waits from the first on
        clock.know(calls_of(program))
    replayer = SwitchedReplayer(KERNEL, plain, clock.capture)
    runner.replay_by(replayer)
    return PlantedSlowdown(
        engine, replayer, PROMPTS, "Baseline", Rows("ab", environment.collect(), []), tokens=7, n_steps=2
    )


def test_the_slowdown_lands_in_its_kernels_row_its_stage_and_its_step_and_nowhere_else(found: PlantedSlowdown) -> None:
    assert found.plant(1.05) > SHORTEST
    n_launches = len(places_of(found.program, KERNEL))
    assert n_launches == 2
    rows = [row for number in range(1, 12) for side in "AB" for row in found.once(side, number)]
    changes = [one for one in judge(rows) if not one.row.endswith("/timed")]  # the host's own clock, busy computing
    assert unexpected(changes, KERNEL) == []
    ratios = {one.row: one.verdict.ratio for one in changes if one.verdict.ratio is not None}  # nothing between steps
    moved = {row: ratio for row, ratio in ratios.items() if ratio != pytest.approx(1.0, abs=1e-9)}
    n_all = len(launches_of(found.program))
    assert moved == {
        f"Baseline/{KERNEL}": pytest.approx(1.05, rel=0.005),
        "Baseline/target.mlp": pytest.approx(1.025, rel=0.005),
        "Baseline/profiled": pytest.approx(1 + 0.05 * n_launches / n_all, rel=0.002),
    }


def test_a_kernel_that_the_step_has_not_is_refused_with_those_it_has(found: PlantedSlowdown) -> None:
    found.replayer.kernel = "target.mlp/nothing"
    with pytest.raises(ExperimentError, match=r"target\.mlp/nothing.*(?s:.*)target\.mlp/gemm_swiglu"):
        found.plant(1.05)


def test_waits_stand_before_every_launch_of_the_kernel(found: PlantedSlowdown) -> None:
    pieces = with_waits(found.program, KERNEL, 77)
    after = [pieces[i + 1] for i, piece in enumerate(pieces) if piece == 77]
    launches = launches_of(found.program)
    assert after == [launches[i] for i in places_of(found.program, KERNEL)]
    assert [piece for piece in pieces if not isinstance(piece, int)] == launches


def machine(price: float, us_per_cycle: float, n: int = 32, plain: float = 1640.0) -> Callable[[int], float]:
    """A kernel's time when a wait costs `price` a launch and `us_per_cycle` beside it."""
    return lambda cycles: plain + n * (price + cycles * us_per_cycle)


@pytest.mark.parametrize(("price", "us_per_cycle"), [(0.5, 1 / 1980), (2.0, 1 / 1500), (3.4, 1 / 1980)])
def test_the_waits_are_found_by_measuring_whatever_a_launch_and_a_cycle_cost(price: float, us_per_cycle: float) -> None:
    measure = machine(price, us_per_cycle)
    assert measure(calibrated(measure, 32, 1.05)) / measure(SHORTEST) == pytest.approx(1.05, abs=0.005)


def test_a_machine_on_which_waiting_changes_nothing_is_told() -> None:
    with pytest.raises(RunFailed, match="came out as"):
        calibrated(machine(0.0, 0.0), 32, 1.05)
