"""The clock of captured graphs: CUDA events around replays, warm, settled, in turns. Beside `lab.rows.clock`.

A single launch is shorter than the gap before it, so calls are captured into one CUDA graph and a replay is timed as a
whole. Needs torch and a GPU; nothing else in this room imports it.

Source: docs/requirements.md R-129; timing rules derived here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lab.rows.clock import Timing

METHOD = 2
TIMER = f"cuda_graph/{METHOD}"  # named in rows: times of another are not compared

REPLAYS = 11
_LEAST_CALLS = 8
_WARM_S = 0.2  # the first 70 ms of work after a pause may take 7% longer a call than all that follows (docs/log.md)


@dataclass
class Captured:
    """Calls as one CUDA graph; they are kept, for what they hold is what the graph reads."""

    graph: torch.cuda.CUDAGraph
    calls: list[Callable[[], Any]]

    def replay_us(self) -> float:
        """Time of one call in one replay, us."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / len(self.calls)

    def settled_us(self) -> float:
        """The same, of a replay that follows one of the same graph: what ran before it leaves no mark."""
        self.replay_us()
        return self.replay_us()


def capture(calls: Sequence[Callable[[], Any]]) -> Captured:
    """All calls in one CUDA graph, repeated to at least `_LEAST_CALLS` calls; two run before, outside of it."""
    calls = list(calls) * max(1, -(-_LEAST_CALLS // len(calls)))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Captured(graph, calls)


def time_captured(graphs: Sequence[Captured]) -> list[Timing]:
    """Times of one call of each graph, a sample a replay: after a warm-up of all, a replay of each in turn."""
    until, n_warm = time.monotonic() + _WARM_S, 0
    while time.monotonic() < until:
        for one in graphs:
            one.replay_us()
        n_warm += 1
    rounds = [[one.settled_us() for one in graphs] for _ in range(REPLAYS)]
    return [Timing(times, TIMER, n_warm) for times in zip(*rounds, strict=True)]


def time_graphs(alternatives: Sequence[Sequence[Callable[[], Any]]]) -> list[Timing]:
    """Times of one call of each alternative, each captured into one CUDA graph; see `time_captured`."""
    return time_captured([capture(calls) for calls in alternatives])


def time_graph(calls: Sequence[Callable[[], Any]]) -> Timing:
    """Time of one call when all are captured into one CUDA graph."""
    return time_graphs([calls])[0]
