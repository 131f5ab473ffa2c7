"""A slowdown of a known size planted in one kernel of a captured step, to see that its row is called slower.

Before every launch of the kernel the graph waits: a spin of so many clock cycles, in the same stage, whose time belongs
to the kernel it holds up (`lab.probes.proofs.steps.merged`). Both sides are the same engine on the same buffers
and the same graph, one with spins of a single cycle, so that nothing but their length differs: launches more would be
felt by the kernels beside them as well. How long to spin is found by measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.kernels import Call, Launch
from eagle3core.step import DeviceRunner, Enqueue, Program, Replayer, Staged, calls_of, launches_of
from lab.errors import ExperimentError, RunFailed
from lab.probes.ab.judging import RESOLUTION, tagged
from lab.probes.bench.clocks import bar_of
from lab.probes.bench.record import Rows
from lab.probes.bench.rounds import Work
from lab.probes.proofs.steps import OWN_RESOLUTION_US, StepProfile, kernel_name, profile_steps
from lab.probes.speed.stages import KERNEL, STAGE
from lab.rows.history import Change
from lab.rows.store import Row
from lab.rows.throttle import VALUE, held_back

STEP = "step"
CYCLES_PER_US = 1900.0  # first guess, about an H200's clock; what was measured corrects it
SHORTEST = 1  # cycles of the spins on the side that is not slowed down
CLOSE = 0.1  # of the slowdown wanted, by which the planted one may miss it
Piece = Launch | Call | int  # a kernel, a call that has none, or a wait of so many cycles before the next kernel


@dataclass
class SwitchedReplayer:
    """Replays programs as they are and, once a delay is planted, with short or long waits before one kernel.

    Attributes:
        kernel: "STAGE/KERNEL", as `lab.probes.speed` names its rows.
        plain: how programs are run as they are. capture: a callable of kernels and waits.
        is_slow: which waits, at this moment.
    """

    kernel: str
    plain: Replayer
    capture: Callable[[Sequence[Piece]], Enqueue]
    is_slow: bool = False
    _switched: dict[int, tuple[Program, list[Enqueue]]] = field(default_factory=dict)

    def whole(self, program: Program) -> Enqueue:
        as_is = self.plain.whole(program)
        if not places_of(program, self.kernel):
            return as_is
        sides = self._switched.setdefault(id(program), (program, []))[1]

        def replay() -> None:
            (sides[self.is_slow] if sides else as_is)()

        return replay

    def staged(self, program: Program) -> Staged:
        return self.plain.staged(program)

    def plant(self, cycles: int) -> None:
        """Makes both sides of every program that has the kernel: shortest waits, and waits of `cycles`."""
        for program, sides in self._switched.values():
            sides[:] = [self.capture(with_waits(program, self.kernel, n)) for n in (SHORTEST, cycles)]


def places_of(program: Program, kernel: str) -> list[int]:
    """Where a program launches the kernel."""
    names = [f"{bar_of(stage.name)}/{kernel_name(launch)}" for stage in program for launch in stage.launches]
    return [i for i, name in enumerate(names) if name == kernel]


def with_waits(program: Program, kernel: str, cycles: int) -> list[Piece]:
    """What a program runs, a wait before each launch of the kernel."""
    held_up = {id(launches_of(program)[i]) for i in places_of(program, kernel)}
    pieces: list[Piece] = []
    for call in calls_of(program):
        for launch in call.launches:
            pieces += [cycles, launch] if id(launch) in held_up else [launch]
        pieces += [] if call.launches else [call]
    return pieces


def capture_pieces(pieces: Sequence[Piece]) -> Enqueue:
    """One CUDA graph of kernels, spins, and plain torch for a call that has no kernel."""
    from eagle3core.kernels import launch

    def bound(piece: Launch | Call) -> Enqueue:
        return launch.bind([piece]) if isinstance(piece, Launch) else piece.meaning

    spin: Any = torch.cuda._sleep
    spin(1)  # loaded now, not inside the capture
    torch.cuda.synchronize()
    enqueues = [piece if isinstance(piece, int) else bound(piece) for piece in pieces]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for piece in enqueues:
            if isinstance(piece, int):
                spin(piece)
            else:
                piece()

    def replay() -> None:
        graph.replay()

    replay.operands = (enqueues, pieces)  # type: ignore[attr-defined]  # the graph holds addresses only
    return replay


def calibrated(measure: Callable[[int], float], n_launches: int, ratio: float) -> int:
    """The cycles to wait before each launch that make a kernel's time `ratio` of what it is with the shortest waits.

    Args:
        measure: the kernel's time in a step, microseconds, under waits of so many cycles.

    Raises:
        RunFailed: waiting changes nothing, or no length comes close.
    """
    short = measure(SHORTEST)
    wanted = short * (ratio - 1)
    more = max(1, round(wanted / n_launches * CYCLES_PER_US))
    for _ in range(3):
        planted = measure(SHORTEST + more) - short
        if planted <= 0:
            break
        if abs(planted - wanted) <= CLOSE * wanted:
            return SHORTEST + more
        more = max(1, round(more * wanted / planted))
    raise RunFailed(
        f"a slowdown of {ratio - 1:.0%} came out as {planted / short:.1%}", f"within {CLOSE:.0%} of it",
        "leave the machine to this command alone",
    )  # fmt: skip


@dataclass
class PlantedSlowdown:
    """An engine whose kernel is as it is, or slower, in turns.

    Attributes:
        name: of its rows' point, as the bench names it.
        rows: takes the rows of every round.
        n_steps: profiled a round.
    """

    engine: Engine
    replayer: SwitchedReplayer
    prompts: Sequence[Sequence[int]]
    name: str
    rows: Rows
    tokens: int = 128
    n_steps: int = 20

    def plant(self, ratio: float) -> int:
        """Finds and plants the waits; their cycles.

        Raises:
            ExperimentError: the step has no such kernel.
        """
        n_launches = len(places_of(self.program, self.replayer.kernel))
        if not n_launches:
            kernels = {f"{bar_of(s.name)}/{kernel_name(one)}" for s in self.program for one in s.launches}
            raise ExperimentError(
                f"no kernel {self.replayer.kernel!r} in the step", ", ".join(sorted(kernels)), "name one of these"
            )

        def measure(cycles: int) -> float:
            self.replayer.plant(cycles)
            self.replayer.is_slow = True
            return own_us(self.profile(), self.replayer.kernel)

        self.prepare()
        cycles = calibrated(measure, n_launches, ratio)
        self.replayer.plant(cycles)
        return cycles

    @property
    def program(self) -> Program:
        """The step of all slots."""
        runner = self._runner()
        return runner.programs[runner.n_slots]

    def prepare(self) -> None:
        """Captures every program as it is."""
        self._runner().prepare()

    def _runner(self) -> DeviceRunner:
        return self.engine.runner

    def profile(self) -> StepProfile:
        """A step taken apart, on the side that is on."""
        return profile_steps(self.engine, self.prompts, self.n_steps)

    def once(self, side: str, number: int) -> list[Row]:
        """One side's round: steps timed with nothing about, then steps taken apart."""
        self.replayer.is_slow = side == "B"
        timed = Work(self.engine, self.prompts, GenerationConfig(self.tokens, ignore_eos=True)).run()
        profile = self.profile()
        if timed.full is None:
            raise RunFailed("no step with every slot in use", "several", "raise --tokens")
        held = {VALUE: held_back()}
        self._row(STEP, f"{self.name}/timed", {"step_ms": timed.full.step_ms, **held}, "perf_counter")
        self._row(STEP, f"{self.name}/profiled", {"step_us": median(profile.step_us), **held}, "cupti")
        for kind, parts in ((STAGE, profile.stages), (KERNEL, profile.kernels)):
            for part in parts:
                values = {"own_us": median(part.own_us), **held}
                self._row(kind, f"{self.name}/{part.stage}", values, "cupti", {RESOLUTION: OWN_RESOLUTION_US})
        made, self.rows.rows = self.rows.rows, []
        return tagged(made, side, number)

    def _row(
        self, kind: str, name: str, values: dict[str, Any], timer: str, parameters: dict[str, Any] | None = None
    ) -> None:
        row = self.rows.maker.measured(kind, name, values, parameters, timer=timer, repeats=self.n_steps)
        self.rows.rows.append(row)


def own_us(profile: StepProfile, kernel: str) -> float:
    """A kernel's own time in a step, its launches together."""
    for part in profile.kernels:
        if part.stage == kernel:
            return median(part.own_us)
    raise RunFailed(f"the profile holds no {kernel}", "a kernel of the step", "correct its name")


def unexpected(changes: Sequence[Change], kernel: str) -> list[str]:
    """What the verdicts on a planted slowdown should not be; empty if all is as it should be.

    The kernel's own row has to be slower, a step or stage that holds it slower or unsure, and no other row slower.
    """
    stage = kernel.partition("/")[0]
    faults, n_own = [], 0
    for change in changes:
        word, part = change.verdict.word, change.row.partition("/")[2]
        is_own = change.kind == KERNEL and part == kernel
        holds_it = change.kind == STEP or (change.kind == STAGE and part == stage)
        n_own += is_own
        is_right = word == "slower" if is_own else word in ("slower", "unsure") if holds_it else word != "slower"
        if not is_right:
            faults.append(f"{change.kind} {change.row} {change.metric} is {word}")
    return faults if n_own else [*faults, f"no row of {kernel}"]
