"""Ways to run a program: captured whole, captured stage by stage, or lane by lane on the CPU.

On a GPU the whole program is one CUDA graph, so that a step costs the host one call. Stage by stage there is one graph
a stage, with the public ranges and the stage's own span around each, and taps after it: for profiling and parity.
Source: docs/requirements.md R-90, R-118..R-120.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from eagle3core.kernels.card import Launch
from eagle3core.step.program import Program, Tap, launches_of, walk_ranges
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
    """CUDA graphs. Operands must keep their addresses, and live as long as the callable."""

    def whole(self, program: Program) -> Enqueue:
        return capture(launches_of(program))

    def staged(self, program: Program) -> Staged:
        captured = {id(stage): capture(stage.launches) for stage in program if stage.launches}
        return staged(program, lambda stage: captured[id(stage)]())


class EagerReplayer:
    """No graphs: `execute` is given the launches every time, e.g. `emulator.execute`."""

    def __init__(self, execute: Callable[[Sequence[Launch]], None]) -> None:
        self.execute = execute

    def whole(self, program: Program) -> Enqueue:
        launches = launches_of(program)
        return lambda: self.execute(launches)

    def staged(self, program: Program) -> Staged:
        return staged(program, lambda stage: self.execute(stage.launches))


def capture(launches: Sequence[Launch]) -> Enqueue:
    """One CUDA graph of the launches."""
    from eagle3core.kernels.launch import bind

    enqueue = bind(launches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()

    def replay() -> None:
        graph.replay()

    replay.operands = enqueue  # type: ignore[attr-defined]  # the graph holds addresses only
    return replay


def staged(program: Program, run: Callable[..., None]) -> Staged:
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
                    if stage.launches:
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
