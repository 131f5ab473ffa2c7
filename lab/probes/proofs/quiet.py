"""A step waits for nothing: no copy to the host, at most one wait for the step before, and a busy GPU.

The audit has to find a planted `.item()`, event synchronise, stream synchronise and copy first; what it cannot see it
must not vouch for. The host's time is taken before all that: once a profiler was on, every launch costs the host more.
Source: docs/requirements.md R-90, R-113(6).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from eagle3core.config import GenerationConfig
from eagle3core.performance import ALLOWED_IN_A_STEP, loud
from eagle3core.step import DeviceState, Replayer
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.gpu_trace import WINDOW, GpuTrace, StepCounts, busy_of, read_trace, steps_of
from lab.probes.proofs.host_time import HostStep, judge_host_time, loop_us, undisturbed
from lab.probes.proofs.subject import Setting, Subject, WatchedEngine
from lab.probes.proofs.timed import TimedReplayer

PART = "quiet"
LEAST_BUSY = 0.97
WARM_STEPS = 4  # before a profile: the prompt's own admission is not a step
PLANT_STEPS = 12
HOST_RUNS = 6  # at most, until enough steps were undisturbed

Plant = Callable[[], None]


@dataclass(frozen=True)
class QuietPlan:
    """What is audited: drafts a step, prompt tokens, steps."""

    k: int = 3
    context: int = 512
    n_steps: int = 100

    @property
    def n_tokens(self) -> int:
        """Tokens that every step's best case still leaves unspent."""
        return (max(self.n_steps, PLANT_STEPS) + WARM_STEPS + 6) * (self.k + 1)

    def setting(self) -> Setting:
        """The engine's."""
        return Setting(self.k, 1, self.context + self.n_tokens + 8)


def plants_for(state: DeviceState) -> dict[str, tuple[str, Plant]]:
    """Mistakes to put into a step of a runner with `state`, each with the count that must show it."""
    result = state.state[:1]
    pinned = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.is_cuda)

    def item() -> None:
        result[0, 0].item()

    def event() -> None:
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record()
        made.synchronize()

    def copy() -> None:
        pinned.copy_(result, non_blocking=True)

    return {
        "item": ("synchronises", item),
        "event synchronise": ("event_waits", event),
        "stream synchronise": ("synchronises", lambda: torch.cuda.current_stream().synchronize()),
        "copy to the host": ("copies", copy),
    }


def faults_of(counts: StepCounts) -> list[str]:
    """What a step did that it must not, in words; nothing for a quiet one."""
    return [f"{n} {name} where {ALLOWED_IN_A_STEP.get(name, 0)} may be" for name, n in loud(asdict(counts)).items()]


def judge_quiet(steps: Sequence[StepCounts]) -> Verdict:
    """Whether every step was quiet."""
    if not steps:
        return Verdict(None, "the profile holds no steps")
    if not any(step.event_waits for step in steps):
        return Verdict(
            None, "the profile shows no wait for an event, not even that for the results: it cannot see them"
        )
    bad = [(i, faults_of(step)) for i, step in enumerate(steps) if faults_of(step)]
    most = {f"most_{name}": max(getattr(step, name) for step in steps) for name in asdict(steps[0])}
    values = {"n_steps": len(steps), "n_loud_steps": len(bad), **most}
    if not bad:
        detail = f"{len(steps)} steps, at most {most['most_event_waits']} wait on an event, nothing else"
        return Verdict(True, detail, values)
    i, words = bad[0]
    return Verdict(False, f"{len(bad)} of {len(steps)} steps are loud, step {i} with {', '.join(words)}", values)


def is_found(steps: Sequence[StepCounts], count: str) -> bool:
    """Whether an audit of planted steps found the plant, in nearly all of them, under the count that must show it."""
    loud = [step for step in steps if any(count in words for words in faults_of(step))]
    return len(steps) > 2 and len(loud) >= len(steps) - 2  # the first and last may be cut by the profile


class Quiet:
    """Checks of one pair; all need a GPU."""

    def __init__(self, subject: Subject, prompt: Sequence[int], plan: QuietPlan) -> None:
        self.subject, self.prompt, self.plan = subject, list(prompt), plan
        self._engine: WatchedEngine | None = None
        self._found: dict[str, bool] = {}
        self._trace: GpuTrace | None = None

    def checks(self) -> list[Check]:
        """The host's time, then the plants: every later check refuses unless all were found."""
        shared = {"pair": self.subject.name, "spec_k": self.plan.k, "context": len(self.prompt)}
        names = ("item", "event synchronise", "stream synchronise", "copy to the host")
        judged: list[tuple[str, Callable[[], Verdict]]] = [("host time", self._host_time)]
        judged += [(f"finds a planted {name}", partial(self._finds, name)) for name in names]
        judged += [("steps wait for nothing", self._is_quiet), ("the GPU is busy", self._is_busy)]
        judged += [("step follows on step", self._follows)]
        return [Check(PART, f"{self.subject.name} {name}", shared, judge) for name, judge in judged]

    @property
    def engine(self) -> WatchedEngine:
        """One engine for all checks."""
        if self._engine is None:
            self._engine = self.subject.engine(self.plan.setting())
        return self._engine

    def _finds(self, name: str) -> Verdict:
        count, plant = plants_for(self.engine.runner.state)[name]
        steps = steps_of(self.profile(PLANT_STEPS, plant))
        found = self._found[name] = is_found(steps, count)
        words = "found" if found else "NOT found"
        return Verdict(found, f"{words} in {len(steps)} steps by {count}", {"count": count, "n_steps": len(steps)})

    def _refusal(self) -> str | None:
        missed = [name for name, found in self._found.items() if not found]
        if missed:
            return f"the audit did not find a planted {', '.join(missed)}"
        if len(self._found) < 4:
            return f"only {len(self._found)} of 4 planted mistakes were tried"
        return None

    def _is_quiet(self) -> Verdict:
        refusal = self._refusal()
        return Verdict(None, refusal) if refusal else judge_quiet(steps_of(self.trace))

    @property
    def trace(self) -> GpuTrace:
        """The profile of the steps as they are."""
        if self._trace is None:
            self._trace = self.profile(self.plan.n_steps)
        return self._trace

    def _is_busy(self) -> Verdict:
        busy, refusal = busy_of(self.trace), self._refusal()
        if busy is None or refusal:
            return Verdict(None, refusal or "the profile holds no kernels")
        free = median(self._free_steps())
        profiled = busy.wall_us / max(len(self.trace.windows) - 2, 1)
        values = {**asdict(busy), "threshold": LEAST_BUSY, "step_us": free, "profiled_step_us": profiled}
        detail = (
            f"{busy.share:.2%} of {busy.wall_us / 1e3:.1f} ms in {busy.n_kernels} kernels, longest gap "
            f"{busy.longest_gap_us:.1f} us; a step takes {free:.0f} us, {profiled:.0f} us under the profiler"
        )
        return Verdict(busy.share >= LEAST_BUSY, detail, values)

    def _follows(self) -> Verdict:
        """Without a profiler: the time that steps take on the device, of the time from the first to the last."""
        timers: list[TimedReplayer] = []

        def through(inner: Replayer) -> Replayer:
            timers.append(TimedReplayer(inner, self.subject.on_gpu))
            return timers[0]

        engine = self.subject.engine(self.plan.setting(), through=through)
        engine.generate([self.prompt], GenerationConfig(self.plan.n_tokens, ignore_eos=True))
        if self.subject.on_gpu:
            torch.cuda.synchronize()
        steps = [t for t in timers[0].times if any(t.program is one for one in engine.runner.programs.values())]
        steps = steps[WARM_STEPS : WARM_STEPS + self.plan.n_steps]
        wall = steps[-1].after.since_us(steps[0].before)
        times = [step.took_us() for step in steps]
        gaps = [after.before.since_us(before.after) for before, after in pairwise(steps)]
        share = sum(times) / wall
        values = {"share": share, "step_us": median(times), "gap_us": median(gaps), "longest_gap_us": max(gaps),
                  "n_steps": len(steps), "threshold": LEAST_BUSY}  # fmt: skip
        each = f"{len(steps)} steps of {median(times):.0f} us, {median(gaps):.1f} us apart"
        detail = f"{share:.2%} of {wall / 1e3:.1f} ms in {each}"
        return Verdict(share >= LEAST_BUSY, detail, values)

    def _host_time(self) -> Verdict:
        """Runs of the same steps until as many as asked for were undisturbed; the GPU is idle when a step begins."""
        samples: list[HostStep] = []
        for _ in range(HOST_RUNS):
            samples += self._host_steps()
            if len(undisturbed(samples)) >= self.plan.n_steps:
                break
        return judge_host_time(samples, self.plan.n_steps)

    def _host_steps(self) -> list[HostStep]:
        samples: list[HostStep] = []

        @contextmanager
        def watch(engine: WatchedEngine) -> Iterator[None]:
            if self.subject.on_gpu:
                torch.cuda.synchronize()
            before, start = loop_us(), time.perf_counter_ns()
            yield
            us = (time.perf_counter_ns() - start) / 1e3
            samples.append(HostStep(us, max(before, loop_us())))

        self._decode(watch)
        return samples[WARM_STEPS : WARM_STEPS + self.plan.n_steps]

    def _free_steps(self) -> list[float]:
        """From step to step on the host, us, with nothing about."""
        samples: list[float] = []

        @contextmanager
        def watch(engine: WatchedEngine) -> Iterator[None]:
            start = time.perf_counter_ns()
            yield
            samples.append((time.perf_counter_ns() - start) / 1e3)

        self._decode(watch)
        return samples[WARM_STEPS : WARM_STEPS + self.plan.n_steps]

    def _decode(self, watch: Callable[[WatchedEngine], object], n_tokens: int = 0) -> None:
        engine = self.engine
        engine.watch = watch  # type: ignore[assignment]
        try:
            engine.generate([self.prompt], GenerationConfig(n_tokens or self.plan.n_tokens, ignore_eos=True))
        finally:
            engine.watch = None

    def profile(self, n_steps: int, plant: Plant | None = None) -> GpuTrace:
        """The profile of `n_steps` steps after the first few, with `plant` in each of them."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.subject.on_gpu else []
        profiler, number = torch.profiler.profile(activities=kinds), 0

        @contextmanager
        def watch(engine: WatchedEngine) -> Iterator[None]:
            nonlocal number
            number += 1
            if number == WARM_STEPS:
                if self.subject.on_gpu:
                    torch.cuda.synchronize()  # what was asked for earlier must not be taken for the first step's
                profiler.start()
            is_inside = WARM_STEPS <= number < WARM_STEPS + n_steps
            if not is_inside:
                yield
                return
            with torch.profiler.record_function(WINDOW):
                yield
                if plant is not None:
                    plant()
            if number == WARM_STEPS + n_steps - 1:
                if self.subject.on_gpu:
                    torch.cuda.synchronize()
                profiler.stop()

        with tempfile.TemporaryDirectory() as folder:
            self._decode(watch, (n_steps + WARM_STEPS + 4) * (self.plan.k + 1))
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return read_trace(path)
