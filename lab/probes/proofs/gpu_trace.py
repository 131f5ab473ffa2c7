"""What the CPU asked of a GPU and what the GPU did, read from a profile in Chrome's trace format.

`torch.profiler` takes it from CUPTI: calls of the CUDA runtime and driver on the CPU's side, kernels and copies on the
GPU's, joined by a correlation number, all on one clock, microseconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WINDOW = "eagle3lab step"  # annotation around each step
CALLS, KERNELS, COPIES = ("cuda_runtime", "cuda_driver"), ("kernel",), ("gpu_memcpy",)

EVENT_WAITS = ("EventSynchronize", "EventQuery")
SYNCHRONISES = ("StreamSynchronize", "DeviceSynchronize", "CtxSynchronize", "StreamQuery")
# Copies that return when they are done, by their whole names: the asynchronous ones begin the same way.
BLOCKING_COPIES = ("Memcpy", "MemcpyDtoH", "MemcpyHtoD", "MemcpyDtoD", "Memcpy2D", "MemcpyToSymbol", "MemcpyFromSymbol")
ALLOCATIONS = ("Malloc", "MallocAsync", "MallocHost", "HostAlloc", "Free", "FreeAsync", "FreeHost", "MemAlloc",
               "MemFree", "MemHostAlloc", "MemAllocHost", "MemFreeHost", "MemCreate", "MemMap")  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A call or a piece of the GPU's work: name, begin and end in us, and what joins the two sides."""

    name: str
    start: float
    end: float
    correlation: int | None = None


@dataclass(frozen=True)
class GpuTrace:
    """One profile, each list in order of time.

    Attributes:
        windows: the annotated steps. calls: of CUDA, on the CPU. kernels, copies: on the GPU.
    """

    windows: tuple[Span, ...]
    calls: tuple[Span, ...]
    kernels: tuple[Span, ...]
    copies: tuple[Span, ...]


@dataclass(frozen=True)
class StepCounts:
    """What one step did that may hold it up.

    Attributes:
        copies: to the host. pageable: of those, to memory that is not pinned.
        event_waits: waits for an event, or queries of one. synchronises: other waits. allocations: of any memory.
    """

    copies: int = 0
    pageable: int = 0
    event_waits: int = 0
    synchronises: int = 0
    allocations: int = 0


def read_trace(path: Path) -> GpuTrace:
    """The trace of a profile exported by `torch.profiler`."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return trace_of(event for event in events if event.get("ph") == "X")


def trace_of(events: Iterable[dict[str, Any]]) -> GpuTrace:
    """The trace of complete events, as `traceEvents` holds them."""
    found: dict[str, list[Span]] = {"windows": [], "calls": [], "kernels": [], "copies": []}
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        where = "windows" if kind == "user_annotation" and name == WINDOW else None
        where = "calls" if kind in CALLS else where
        where = "kernels" if kind in KERNELS else "copies" if kind in COPIES else where
        if where:
            start = float(event["ts"])
            number = event.get("args", {}).get("correlation")
            found[where].append(Span(name, start, start + float(event.get("dur", 0)), number))
    return GpuTrace(**{key: tuple(sorted(spans, key=lambda span: span.start)) for key, spans in found.items()})


def steps_of(trace: GpuTrace) -> list[StepCounts]:
    """Counts of every step; what happens between two steps belongs to the earlier one.

    A copy belongs to the step whose call asked for it. The last step ends with its window, since what follows it is the
    profiler's own.
    """
    counts = [dict.fromkeys(StepCounts.__dataclass_fields__, 0) for _ in trace.windows]
    for at, name in loud_events(trace):
        i = _window_at(trace.windows, at)
        if i is not None:
            counts[i][name] += 1
    return [StepCounts(**one) for one in counts]


def loud_events(trace: GpuTrace) -> Iterator[tuple[float, str]]:
    """(when it was asked for, name of its count in `StepCounts`) of everything that may hold a step up."""
    within: dict[str, float] = {}
    for call in trace.calls:
        name = api_name(call.name)
        if call.start < within.get(name, call.start):
            continue  # the driver's call inside the runtime's of the same name
        within[name] = call.end
        if name in EVENT_WAITS:
            yield call.start, "event_waits"
        elif name in SYNCHRONISES or name in BLOCKING_COPIES:
            yield call.start, "synchronises"
        elif name in ALLOCATIONS:
            yield call.start, "allocations"
    asked_at: dict[int | None, float] = {c.correlation: c.start for c in trace.calls if c.correlation is not None}
    for copy in trace.copies:
        if "DtoH" in copy.name:
            at = asked_at.get(copy.correlation, copy.start)
            yield at, "copies"
            if "Pinned" not in copy.name:
                yield at, "pageable"


def api_name(name: str) -> str:
    """A CUDA function without its API and version: "EventSynchronize" of "cudaEventSynchronize"."""
    for ending in ("_ptsz", "_ptds"):
        name = name.removesuffix(ending)
    base, _, version = name.rpartition("_v")
    name = base if version.isdigit() else name
    return name.removeprefix("cuda").removeprefix("cu")


def _window_at(windows: Sequence[Span], at: float) -> int | None:
    i = bisect_right([window.start for window in windows], at) - 1
    is_after_last = i == len(windows) - 1 and i >= 0 and at > windows[i].end
    return None if i < 0 or is_after_last else i


@dataclass(frozen=True)
class Busy:
    """How much of the time a GPU worked.

    Attributes:
        share: union of its kernels' times over the time from the first one's begin to the last one's end.
        wall_us, n_kernels: of that time.
        longest_gap_us: with no kernel.
    """

    share: float
    wall_us: float
    n_kernels: int
    longest_gap_us: float


def busy_of(trace: GpuTrace) -> Busy | None:
    """Of the kernels that begin after the first step and end before the last one begins; None without any."""
    if len(trace.windows) < 3:
        return None
    first, last = trace.windows[1].start, trace.windows[-1].start
    kernels = [kernel for kernel in trace.kernels if kernel.start >= first and kernel.end <= last]
    if not kernels:
        return None
    covered, gap, end = 0.0, 0.0, kernels[0].start
    for kernel in kernels:
        if kernel.start > end:
            gap = max(gap, kernel.start - end)
        covered += max(0.0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    wall = end - kernels[0].start
    return Busy(covered / wall if wall else 0.0, wall, len(kernels), gap)
