"""Times on a GPU: of calls captured into a CUDA graph, and kernels that only read, whose rate is a run's ceiling.

Source: docs/requirements.md R-129; timing rules derived here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3core.kernels import Variant, parameters

TIMER = "CUDA events around graph replays, warm, settled, in turns"  # named in rows: times of another are not compared

_REPLAYS, _LEAST_CALLS = 11, 8
_WARM_S = 0.05  # an idle GPU takes some milliseconds of work to reach its clocks


@dataclass
class Timing:
    """Time of one call inside a graph, us: median over replays, and the spread."""

    median_us: float
    p10_us: float
    p90_us: float


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
    """Times of graphs that are compared: after a warm-up of all, a replay of each in turn, again and again."""
    until = time.monotonic() + _WARM_S
    while time.monotonic() < until:
        for one in graphs:
            one.replay_us()
    rounds = [[one.settled_us() for one in graphs] for _ in range(_REPLAYS)]
    deciles = [statistics.quantiles(times, n=10) for times in zip(*rounds, strict=True)]
    return [Timing(at[4], at[0], at[-1]) for at in deciles]


def time_graphs(alternatives: Sequence[Sequence[Callable[[], Any]]]) -> list[Timing]:
    """Times of one call of each alternative, each captured into one CUDA graph; see `time_captured`."""
    return time_captured([capture(calls) for calls in alternatives])


def time_graph(calls: Sequence[Callable[[], Any]]) -> Timing:
    """Time of one call when all are captured into one CUDA graph."""
    return time_graphs([calls])[0]


def make_read(isa: Any, *, loads: int) -> Any:
    """Reads every byte once, `loads` 16-byte loads a lane under way, and writes nothing that could be left out."""

    def read(x: Any, y: Any, n_bytes: Any) -> None:
        cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
        step = i64(cuda.gridDim.x) * cuda.blockDim.x * 16
        at = x + (i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) * 16
        end = x + n_bytes
        mixed = i32(0)
        while at < end:
            for i in range(loads):
                if at + i * step < end:
                    v = isa.load_u32x4_stream(at + i * step)
                    mixed = i32(mixed ^ v[0] ^ v[1] ^ v[2] ^ v[3])
            at += loads * step
        if mixed == 0x12345678:
            isa.store_u32(y, mixed)

    return read


def read_variants() -> list[Variant]:
    """Read-only kernels whose best rate is the memory ceiling of a run."""
    text = "x:in y:out n_bytes:i64"
    return [Variant(f"read_{n}", make_read, {"loads": n}, parameters(text), 512) for n in (4, 8)]
