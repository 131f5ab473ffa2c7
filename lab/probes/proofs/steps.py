"""The kernels of a captured step, one by one: how long each held the step up, and where nothing ran.

In a captured graph the i-th kernel of a step is the i-th launch of its program, so a profile's kernels are given to
stages by place. Kernels overlap (a dependent one starts before the one before has ended), so a kernel's own time is its
end minus the latest end before it; own times and the time between two steps add up to the whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median

import torch

from eagle3core import Engine, Response
from eagle3core.config import GenerationConfig
from eagle3core.kernels import Launch
from eagle3core.request import without_errors
from eagle3core.step import Program, launches_of
from eagle3core.trace import Trace
from lab.errors import RunFailed
from lab.probes.bench.clocks import SPANS, bar_of, rest, synchronise
from lab.probes.bench.rounds import committed_by_step
from lab.probes.proofs.gpu_trace import Span, read_trace

WARM_STEPS = 4  # before a profile: the graph's first replay, and steps beside the end of the prefill
EDGE_STEPS = 2  # of a profile at its begin, left out: what the profiler itself sets up
BETWEEN_STEPS = "between steps"
OWN_RESOLUTION_US = 1 / 16  # of an own time: between two ends, each known to the profiler's 1/32 us
SPIN = "spin_kernel"  # the name of `torch.cuda._sleep`'s kernel holds it


@dataclass(frozen=True)
class StageTime:
    """A stage's share of a step.

    Attributes:
        own_us: a profiled step each, what the step would lack without the stage.
        gap_us: part of it in which no kernel ran.
        n_kernels: of a step.
    """

    stage: str
    own_us: tuple[float, ...]
    gap_us: tuple[float, ...]
    n_kernels: int


@dataclass(frozen=True)
class StepProfile:
    """Steps of one engine, taken apart.

    Attributes:
        stages: in the order of `SPANS`, the time between two steps last.
        kernels: the same by stage and kernel, without the time between two steps.
        step_us: from a step's first kernel to the next one's.
        cached: tokens a sequence in the cache, on average over the steps.
        responses: of the run.
    """

    stages: tuple[StageTime, ...]
    step_us: tuple[float, ...]
    cached: float
    kernels: tuple[StageTime, ...] = ()
    responses: tuple[Response, ...] = ()

    @property
    def sum_over_step(self) -> float:
        """Stages' medians together over the median step: how well the parts make the whole."""
        return sum(median(stage.own_us) for stage in self.stages) / median(self.step_us)


class ProfiledSteps(Trace):
    """Leaves steps as they are, and has the profiler on during `n_steps` of them."""

    def __init__(self, device: torch.device, n_steps: int) -> None:
        self.device, self.n_steps = device, n_steps
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.n_seen = 0

    @property
    def is_complete(self) -> bool:
        """Whether all steps were profiled."""
        return self.n_seen >= WARM_STEPS + self.n_steps

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        if not name.startswith("step"):
            yield
            return
        if self.n_seen == 0:
            rest(self.device)
        if self.n_seen == WARM_STEPS:
            synchronise(self.device)  # nothing of an earlier step may be taken for the first one's
            self.profiler.start()
        yield
        self.n_seen += 1
        if self.n_seen == WARM_STEPS + self.n_steps:
            synchronise(self.device)
            self.profiler.stop()

    def kernels(self) -> list[Span]:
        """The GPU's kernels, by begin."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            return list(read_trace(path).kernels)


def profile_steps(engine: Engine, prompts: Sequence[Sequence[int]], n_steps: int) -> StepProfile:
    """`n_steps` steps of a run over `prompts`, which fill every slot, taken apart.

    Raises:
        RunFailed: the engine runs no captured program, or the profile does not hold its kernels.
    """
    runner = engine.runner
    if not runner.has_kernels or len(prompts) != runner.n_slots:
        raise RunFailed(
            f"an engine in plain torch, or one of {runner.n_slots} slots with {len(prompts)} prompts: no captured step",
            "the kernels' path, with a prompt a slot",
            "use a GPU and bfloat16",
        )
    total = n_steps + EDGE_STEPS + 1  # the last one has no next step to end at
    trace = ProfiledSteps(engine.target.device, total)
    engine.trace = trace
    generation = GenerationConfig(tokens_for(n_steps, runner.depth), ignore_eos=True)
    responses = without_errors(engine.generate(prompts, generation))
    if not trace.is_complete:
        raise RunFailed(f"{trace.n_seen} steps ran", f"{WARM_STEPS + total} steps", "give more tokens")
    middle = WARM_STEPS + EDGE_STEPS + n_steps // 2
    committed = sum(sum(committed_by_step(response)[:middle]) for response in responses)
    cached = sum(map(len, prompts)) + committed
    profile = taken_apart(merged(trace.kernels()), runner.programs[runner.n_slots], total, cached / len(prompts))
    return replace(profile, responses=tuple(responses))


def merged(kernels: Sequence[Span]) -> list[Span]:
    """The kernels, each spin (`lab.probes.ab.slowdown`) part of the kernel that it holds up."""
    found: list[Span] = []
    waiting: Span | None = None
    for kernel in kernels:
        if SPIN in kernel.name:
            waiting = waiting or kernel
            continue
        found.append(replace(kernel, start=min(waiting.start, kernel.start)) if waiting else kernel)
        waiting = None
    return found


def tokens_for(n_steps: int, depth: int) -> int:
    """Tokens that a profiled run cannot come to the end of, whatever is accepted."""
    return (WARM_STEPS + EDGE_STEPS + n_steps + 4) * (depth + 1)


def taken_apart(kernels_of_steps: Sequence[Span], program: Program, n_steps: int, cached: float) -> StepProfile:
    """A profile of `n_steps` whole steps of `program`, its first steps and its last left out.

    Raises:
        RunFailed: the kernels are not those steps'.
    """
    launched = [(bar_of(stage.name), launch) for stage in program for launch in stage.launches]
    names = [stage for stage, _ in launched]
    kernels = [f"{stage}/{kernel_name(launch)}" for stage, launch in launched]
    steps = steps_of_kernels(kernels_of_steps, program, n_steps)[EDGE_STEPS - n_steps :]
    alone = [own_and_gap(step) for step in steps[:-1]]
    waits = [following[0].start - max(one.end for one in step) for step, following in pairwise(steps)]
    stages = summed([stage for stage in SPANS if stage in names], names, alone)
    between = StageTime(BETWEEN_STEPS, tuple(waits), tuple(waits), 0)
    step_us = tuple(b[0].start - a[0].start for a, b in pairwise(steps))
    return StepProfile((*stages, between), step_us, cached, summed(list(dict.fromkeys(kernels)), kernels, alone))


def own_and_gap(step: Sequence[Span]) -> list[tuple[float, float]]:
    """Of each kernel of a step, in order: what the step would lack without it, and the part of it in which none ran."""
    found, end = [], step[0].start
    for kernel in step:
        found.append((max(0.0, kernel.end - end), max(0.0, kernel.start - end)))
        end = max(end, kernel.end)
    return found


def summed(
    names: Sequence[str], of_kernels: Sequence[str], steps: Sequence[Sequence[tuple[float, float]]]
) -> tuple[StageTime, ...]:
    """Own times and gaps of each step, the kernels of one name together."""
    found = []
    for name in names:
        places = [i for i, one in enumerate(of_kernels) if one == name]
        own, gap = (tuple(sum(step[i][part] for i in places) for step in steps) for part in (0, 1))
        found.append(StageTime(name, own, gap, len(places)))
    return tuple(found)


def kernel_name(launch: Launch) -> str:
    """What a launch computes, without the sizes and tiles that sweeps change: "gemm_swiglu", "attention_streams"."""
    epilogue = dict(launch.variant.constants).get("epilogue")
    if epilogue is not None:
        return f"gemm_{epilogue.kind}"
    return "_".join(takewhile(str.isalpha, launch.variant.name.split("_")))


def steps_of_kernels(kernels: Sequence[Span], program: Program, n_steps: int) -> list[list[Span]]:
    """Kernels step by step, counted from the end: a profiler may miss kernels while it starts.

    Raises:
        RunFailed: another number of kernels, or one variant under two names: then places do not say what ran.
    """
    variants = [f"{one.variant.name} {dict(one.variant.constants)}" for one in launches_of(program)]
    n = len(variants)
    if not n * (n_steps - EDGE_STEPS) <= len(kernels) <= n * n_steps:
        raise RunFailed(
            f"the profile holds {len(kernels)} kernels", f"{n_steps} steps of {n}", "profile nothing else meanwhile"
        )
    steps = [list(kernels[i : i + n]) for i in range(len(kernels) % n, len(kernels), n)]
    named: dict[str, set[str]] = {}
    for step in steps:
        for variant, kernel in zip(variants, step, strict=True):
            named.setdefault(variant, set()).add(kernel.name)
    mixed = {variant: names for variant, names in named.items() if len(names) > 1}
    if mixed:
        variant, names = next(iter(mixed.items()))
        raise RunFailed(
            f"{variant} ran as {', '.join(sorted(names))}", "one kernel a variant, in the program's order",
            "profile nothing else meanwhile",
        )  # fmt: skip
    return steps
