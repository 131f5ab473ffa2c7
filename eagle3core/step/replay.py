"""Ways to run a program: captured whole, captured stage by stage, by meaning, or lane by lane on the CPU.

On a GPU the whole program is one CUDA graph, so that a step costs the host one call. Stage by stage there is one graph
a stage, with the public ranges and the stage's own span around each, and taps after it: for profiling and parity.
`CapturedPrograms` makes each way of a program once and keeps it.
Source: docs/requirements.md R-90, R-118..R-120.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import groupby
from typing import Protocol

import torch

from eagle3core.kernels.card import Call
from eagle3core.kernels.cubins import compile_missing
from eagle3core.kernels.launch import bind, load
from eagle3core.step.program import Program, Stage, Tap, calls_of, variants_of, walk_ranges
from eagle3core.trace import Trace

Enqueue = Callable[[], None]
Staged = Callable[[Trace], None]


class Replayer(Protocol):
    """Makes programs callable; the callables only enqueue."""

    def whole(self, program: Program) -> Enqueue:
        """The program at once."""

    def staged(self, program: Program) -> Staged:
        """The program stage by stage."""


class GraphReplayer:
    """CUDA graphs. Operands must keep their addresses, and live as long as the callable.

    Args:
        device: the GPU that the operands lie on, current or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def whole(self, program: Program) -> Enqueue:
        return capture(calls_of(program), self.device)

    def staged(self, program: Program) -> Staged:
        captured = {id(stage): capture(stage.calls, self.device) for stage in program if stage.calls}
        return staged(program, lambda stage: captured[id(stage)]())


class EagerReplayer:
    """No graphs: `execute` is given the calls every time; by default it computes what they mean, in plain torch."""

    def __init__(self, execute: Callable[[Sequence[Call]], None] | None = None) -> None:
        self.execute = execute or compute

    def whole(self, program: Program) -> Enqueue:
        calls = calls_of(program)
        return lambda: self.execute(calls)

    def staged(self, program: Program) -> Staged:
        return staged(program, lambda stage: self.execute(stage.calls))


class CapturedPrograms:
    """Programs as a replayer makes them callable: each when it is first asked for, whole or stage by stage, then kept.

    A program is known by its identity, so whoever asks keeps it for as long as it may be asked for again.

    Args:
        replayer: what makes them callable.
    """

    def __init__(self, replayer: Replayer) -> None:
        self.replayer = replayer
        self._whole: dict[int, Enqueue] = {}
        self._staged: dict[int, Staged] = {}

    def prepare(self, programs: Sequence[Program], device: torch.device, arch: str | None, trace: Trace) -> None:
        """Capture all of these whole, so that no step has to; their kernels are compiled before, where they are
        missing, and loaded. Each of these is a span of the trace, `start.compile`, `start.load` and `start.capture`.

        Programs are so many objects that a full garbage collection is about due once they are made. Of a heap with
        torch in it one takes 0.3 s, so it is made here and not while the first prompts wait; the next one comes when
        the heap has grown by a quarter.

        Args:
            device: of their operands. arch: compile target of the kernels; None where no kernels run.
        """
        if arch is not None and device.type == "cuda":
            kernels = variants_of(programs)
            with trace.span("start.compile"):
                compile_missing(kernels, arch)
            with trace.span("start.load"):
                load(kernels, device)
        with trace.span("start.capture"):
            for program in programs:
                self.enqueue_of(program)
            gc.collect()

    def ready(self, program: Program, trace: Trace) -> None:
        """Capture what `run` will replay under such a trace, unless it is."""
        if trace.is_detailed:
            self._staged_of(program)
        else:
            self.enqueue_of(program)

    def run(self, program: Program, trace: Trace) -> None:
        """Enqueue the program: whole, or stage by stage where the trace is detailed."""
        if trace.is_detailed:
            self._staged_of(program)(trace)
        else:
            self.enqueue_of(program)()

    def enqueue_of(self, program: Program) -> Enqueue:
        """What enqueues the program whole."""
        if id(program) not in self._whole:
            self._whole[id(program)] = self.replayer.whole(program)
        return self._whole[id(program)]

    def _staged_of(self, program: Program) -> Staged:
        if id(program) not in self._staged:
            self._staged[id(program)] = self.replayer.staged(program)
        return self._staged[id(program)]


def compute(calls: Sequence[Call]) -> None:
    """What the calls mean, one after the other, in plain torch on the device of their operands."""
    with torch.no_grad():  # what gradients need costs small tensors time; inference mode would hide reads of the host
        for call in calls:
            call.meaning()


def emulate(calls: Sequence[Call]) -> None:
    """The kernels of the calls, lane by lane on the CPU."""
    from eagle3core.kernels.emulator.instructions import execute  # Numba's emulation is wanted by few

    for call in calls:
        execute(call.launches)


def capture(calls: Sequence[Call], device: torch.device) -> Enqueue:
    """One CUDA graph of the calls on `device`: their kernels, or plain torch for a call that has none.

    A replay goes to the current stream of `device`, whichever GPU is current.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        enqueues = bound(calls)
        with torch.cuda.graph(graph, stream=_capture_stream(torch.cuda.current_device())):
            for enqueue in enqueues:
                enqueue()

    def replay() -> None:
        graph.replay()  # makes the GPU of the capture current by itself

    replay.operands = (enqueues, calls)  # type: ignore[attr-defined]  # the graph holds addresses only
    return replay


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """Where graphs of a GPU are captured. Torch's own stream for that lies on the GPU that was the first to capture."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def bound(calls: Sequence[Call]) -> list[Enqueue]:
    """What enqueues the calls, neighbouring kernels together; kernels are found and loaded here."""
    found: list[Enqueue] = []
    for has_kernels, run in groupby(calls, lambda call: bool(call.launches)):
        group = list(run)
        found += [bind([launch for call in group for launch in call.launches])] if has_kernels else []
        found += [] if has_kernels else [call.meaning for call in group]
    return found


def staged(program: Program, run: Callable[[Stage], None]) -> Staged:
    """The program with ranges, spans and taps around `run(stage)`."""

    def play(trace: Trace) -> None:
        with ExitStack() as open_ranges:
            depth: list[ExitStack] = []
            for n_closed, opened_now, stage in walk_ranges(program):
                for _ in range(n_closed):
                    depth.pop().close()
                for name in opened_now:
                    depth.append(open_ranges.enter_context(ExitStack()))
                    depth[-1].enter_context(trace.span(name))
                with trace.span(stage.name):
                    if stage.calls:
                        run(stage)
                for name, tap in stage.taps.items():
                    offer(trace, name, tap)

    return play


def offer(trace: Trace, name: str, tap: Tap) -> None:
    """Hand a stage's tensor to a trace, as `[1, rows, ...]` with the rows that are real."""
    valid = None if tap.slots is None else (tap.slots >= 0)[None]
    with ExitStack() as stack:
        if tap.scope:
            stack.enter_context(trace.scope(tap.scope))
        trace.tap(name, tap.value[None], valid)
