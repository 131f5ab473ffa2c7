"""What every range of a capture cost: a kernel, copy or wait belongs to the ranges that its call lies in.

Kernels overlap, and the GPU runs behind the host, so a range's time on the GPU is the union of its kernels' times,
found by the number that joins a kernel to the call that asked for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lab.errors import ExperimentError, RunFailed
from lab.probes.profiles.capture import PUBLIC, Capture, class_of
from lab.probes.profiles.ncu import NcuKernel
from lab.probes.profiles.nsys import RangeSum
from lab.probes.proofs.gpu_trace import WINDOW, Span, StepCounts, loud_events

STEP, OUTSIDE = "step", "outside ranges"


@dataclass
class RangeCost:
    """One range, its layers and calls together.

    Attributes:
        level: "step", "range" (public) or "stage". stages: those that lie in it, itself included.
        calls: a step. host_us: a step each, begin to end on the host. gpu_us: a step each, union of its kernels.
        kernels: name -> us of each run. n_ops: of torch, all steps. loud: copies, waits, allocations, all steps.
    """

    name: str
    level: str
    calls: float = 0.0
    host_us: list[float] = field(default_factory=list)
    gpu_us: list[float] = field(default_factory=list)
    kernels: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    n_ops: int = 0
    loud: Counter[str] = field(default_factory=Counter)
    stages: set[str] = field(default_factory=set)

    @property
    def n_kernels(self) -> int:
        """Of all steps."""
        return sum(map(len, self.kernels.values()))


@dataclass(frozen=True)
class Profile:
    """A capture summed up.

    Attributes:
        n_steps: whole ones. costs: the step, the ranges in order of appearance, what lies outside them.
        n_unplaced: kernels whose call the capture does not hold.
    """

    n_steps: int
    costs: tuple[RangeCost, ...]
    n_unplaced: int


def summed(capture: Capture) -> Profile:
    """Costs of every range over the capture's steps.

    Raises:
        RunFailed: it holds no step.
    """
    windows = capture.trace.windows
    if not windows:
        raise RunFailed("the capture holds no steps", "annotated steps", "take it with `eagle3lab profile`")
    places = Places(capture.ranges, windows)
    costs = {STEP: RangeCost(STEP, STEP)}
    for span in capture.ranges:
        name = class_of(span.name)
        costs.setdefault(name, RangeCost(name, "range" if name in PUBLIC else "stage"))
    costs[OUTSIDE] = RangeCost(OUTSIDE, STEP)
    for cost in costs.values():
        cost.host_us, cost.gpu_us = [0.0] * len(windows), [0.0] * len(windows)
    _add_host(capture, places, costs)
    n_unplaced = _add_kernels(capture, places, costs)
    for at, name in loud_events(capture.trace):
        for cost in places.costs_at(at, costs):
            cost.loud[name] += 1
    for span in capture.ops:
        for cost in places.costs_at(span.start, costs):
            cost.n_ops += 1
    return Profile(len(windows), tuple(costs.values()), n_unplaced)


class Places:
    """Which step and which ranges a moment of the host's time lies in."""

    def __init__(self, ranges: Sequence[Span], windows: Sequence[Span]) -> None:
        self.ranges, self.windows = ranges, windows

    def step_at(self, at: float) -> int | None:
        """Number of the step, which ends where the next one begins; the last one with itself."""
        i = sum(window.start <= at for window in self.windows) - 1
        return None if i < 0 or (i == len(self.windows) - 1 and at > self.windows[i].end) else i

    def names_at(self, at: float) -> list[str]:
        """Classes of the ranges around a moment, outermost first."""
        return list(dict.fromkeys(class_of(span.name) for span in self.ranges if span.start <= at <= span.end))

    def costs_at(self, at: float, costs: Mapping[str, RangeCost]) -> list[RangeCost]:
        """The costs that something asked for at a moment belongs to; none outside the steps."""
        if self.step_at(at) is None:
            return []
        names = self.names_at(at)
        return [costs[STEP], *(costs[name] for name in names or [OUTSIDE])]


def _add_host(capture: Capture, places: Places, costs: Mapping[str, RangeCost]) -> None:
    n_steps = len(places.windows)
    for i, window in enumerate(places.windows):
        costs[STEP].host_us[i] = window.end - window.start
    costs[STEP].calls = 1.0
    for span in capture.ranges:
        step = places.step_at(span.start)
        if step is None:
            continue
        name = class_of(span.name)
        costs[name].host_us[step] += span.end - span.start
        costs[name].calls += 1 / n_steps
        for outer in places.names_at(span.start):
            costs[outer].stages.add(name)
        costs[STEP].stages.add(name)
        costs[name].stages.add(name)


def _add_kernels(capture: Capture, places: Places, costs: Mapping[str, RangeCost]) -> int:
    asked_at = {call.correlation: call.start for call in capture.trace.calls if call.correlation is not None}
    names_of = {number: places.names_at(at) for number, at in asked_at.items()}
    step_of = {number: places.step_at(at) for number, at in asked_at.items()}
    n_unplaced, busy = 0, defaultdict[tuple[str, int], list[Span]](list)
    for kernel in capture.trace.kernels:
        number = kernel.correlation
        if number not in asked_at:
            n_unplaced += 1
            continue
        step = step_of[number]
        if step is None:
            continue
        for name in (STEP, *(names_of[number] or [OUTSIDE])):
            costs[name].kernels[kernel.name].append(kernel.end - kernel.start)
            busy[name, step].append(kernel)
    for (name, step), kernels in busy.items():
        costs[name].gpu_us[step] = union_us(kernels)
    return n_unplaced


def of_counters(counters: Sequence[NcuKernel], n_steps: int) -> Profile:
    """Costs from Nsight Compute alone, which measured every kernel by itself: a range's time is their sum."""
    names = dict.fromkeys(class_of(name) for one in counters for name in one.ranges)
    costs = {name: RangeCost(name, "range" if name in PUBLIC else "stage", gpu_us=[0.0]) for name in names}
    costs = {STEP: RangeCost(STEP, STEP, gpu_us=[0.0]), **costs, OUTSIDE: RangeCost(OUTSIDE, STEP, gpu_us=[0.0])}
    for one in counters:
        inside = list(dict.fromkeys(map(class_of, one.ranges)))
        for name in (STEP, *(inside or [OUTSIDE])):
            cost = costs[name]
            cost.kernels[one.name].append(one.us)
            cost.gpu_us[0] += one.us / n_steps
            cost.stages.update(inside)
    return Profile(n_steps, tuple(costs.values()), 0)


def of_sums(sums: Sequence[RangeSum]) -> Profile:
    """Costs from the sums of `nsys stats`, which tell no kernel by name and no step by itself.

    Raises:
        ExperimentError: the steps are not among the ranges.
    """
    steps = next((one.instances for one in sums if one.name == WINDOW), 0)
    if not steps:
        raise ExperimentError(
            f"the report has no range {WINDOW!r}", "ranges of `eagle3lab profile`", "take it with that command"
        )
    costs: dict[str, RangeCost] = {}
    for one in sums:
        name = STEP if one.name == WINDOW else class_of(one.name)
        level = STEP if name == STEP else "range" if name in PUBLIC else "stage"
        cost = costs.setdefault(name, RangeCost(name, level, host_us=[0.0], gpu_us=[0.0]))
        cost.calls += one.instances / steps
        cost.host_us[0] += one.host_us / steps
        cost.gpu_us[0] += one.gpu_us / steps
        cost.kernels["of the GPU, unnamed"] += [one.gpu_us / max(one.n_ops, 1)] * one.n_ops
        if level == "stage":
            cost.stages.add(name)
    return Profile(steps, tuple(costs.values()), 0)


def union_us(kernels: Iterable[Span]) -> float:
    """Time in which at least one of the kernels ran."""
    covered, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda span: span.start):
        covered += max(0.0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    return covered


def values_of(
    profile: Profile, declared: Mapping[str, int], counters: Sequence[NcuKernel] = (), *, on_gpu: bool
) -> dict[str, dict[str, Any]]:
    """Row values by range, a step each unless the name says otherwise.

    Args:
        declared: bytes a step that each stage has to move. counters: kernels as Nsight Compute saw them.
    """
    found = {}
    for cost in profile.costs:
        time_us = cost.gpu_us if on_gpu else cost.host_us
        known = [declared[stage] for stage in cost.stages if stage in declared]
        n_bytes = sum(known) if known else None
        middle = median(time_us)
        runs = sorted(cost.kernels.items(), key=lambda item: -sum(item[1]))
        found[cost.name] = {
            "time_us": middle, "time_us_samples": list(time_us),
            "host_us": median(cost.host_us) if cost.host_us else None,
            "calls": cost.calls, "n_kernels": cost.n_kernels / profile.n_steps if on_gpu else None,
            "n_ops": None if on_gpu else cost.n_ops / profile.n_steps,
            "bytes": n_bytes, "gb_per_s": n_bytes / middle / 1e3 if n_bytes and middle else None,
            "kernel_names": [name for name, _ in runs], "kernel_runs": [len(us) for _, us in runs],
            "kernel_us_each": [median(us) for _, us in runs],
            **{f"n_{name}_all_steps": cost.loud[name] for name in StepCounts.__dataclass_fields__},
            **counter_values(cost, counters),
        }  # fmt: skip
    return found


def counter_values(cost: RangeCost, counters: Sequence[NcuKernel]) -> dict[str, float | int | None]:
    """Means over a range's kernels, by their time, as Nsight Compute counted them; None where it saw none of them."""
    known = [one for one in counters if cost.name == STEP or cost.name in map(class_of, one.ranges)]
    timed = [one for one in known if one.us > 0]
    us = sum(one.us for one in timed)
    moved = [one.dram_bytes for one in timed if one.dram_bytes is not None]
    warps = [(one.us, one.occupancy) for one in timed if one.occupancy is not None]
    return {
        "ncu_kernels": len(known) or None,
        "ncu_us": us or None,
        "dram_gb_per_s": sum(moved) / us / 1e3 if us and len(moved) == len(timed) else None,
        "occupancy": sum(t * share for t, share in warps) / sum(t for t, _ in warps) if warps else None,
    }
