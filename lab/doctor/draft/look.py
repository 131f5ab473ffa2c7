"""Lamps looked at, one after the other or side by side; whichever way, they find the same.

Side by side, each lamp has a process that parts from this one, in which the head and the target are open. What lamps
share, the text with its base measurement, the engine's answers to it and the runs of `Conditions`, is made once, each
in a process too, and is here before a lamp that reads it begins.
"""

from __future__ import annotations

import math
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle3core.backend import processes_for
from lab.doctor.draft.case import Case
from lab.doctor.draft.conditions import RESTS_ON
from lab.doctor.draft.forked import Job, outcomes
from lab.doctor.draft.lamp import Finding, Lamp

# What nearly every lamp reads of a case: attributes that are made together, by the name of the job that makes them.
BASIS = {"text": ("plain", "text", "base"), "by_engine": ("by_engine",)}
LEAST_BYTES = 2**30  # of a process: lamps of the shipped pair, the smallest that is examined, take as much


@dataclass(frozen=True)
class Judged:
    """A lamp with what it found. `seconds`: what that took."""

    lamp: Lamp
    finding: Finding
    seconds: float


@dataclass(frozen=True)
class Limit:
    """Seconds from `begun` on after which no lamp is begun."""

    seconds: float = math.inf
    begun: float = field(default_factory=time.perf_counter)

    @property
    def is_over(self) -> bool:
        """Whether they have passed."""
        return time.perf_counter() - self.begun > self.seconds

    def left_out(self, lamp: Lamp) -> Judged:
        """A lamp that was not begun."""
        why = f"not looked at: the limit of {self.seconds:g} s was over"
        return Judged(lamp, Finding(lamp.name, "unknown", why), 0)


OnLamp = Callable[[Judged], None]


def processes_of(case: Case, asked: int, n_lamps: int) -> int:
    """How many lamps are looked at side by side: one of a large target, or on a GPU.

    There one lamp already takes the whole machine, and no process may part from one that has opened a GPU.

    Args:
        asked: so many where there may be several at all; 0: one a processor, as far as memory goes.
    """
    has_gpu = case.torch_device.type != "cpu" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if asked == 1 or has_gpu or not case.is_small or sys.platform != "linux":  # elsewhere no fork is safe
        return 1
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # counted in KiB
    return min(asked, n_lamps) if asked else processes_for(n_lamps, max(LEAST_BYTES, taken))


def look_at(
    case: Case, lamps: Sequence[Lamp], *, n_processes: int = 1, limit: Limit, on_lamp: OnLamp | None = None
) -> list[Judged]:
    """What the lamps say of a case, in their order; `on_lamp` hears of each once it is known."""
    judged = dict[str, Judged]()
    for each in _side_by_side(case, lamps, n_processes, limit) if n_processes > 1 else ():
        judged[each.lamp.name] = each
        if on_lamp is not None:
            on_lamp(each)
    for lamp in lamps:
        if lamp.name not in judged:
            judged[lamp.name] = limit.left_out(lamp) if limit.is_over else looked(lamp, case)
            if on_lamp is not None:
                on_lamp(judged[lamp.name])
    return [judged[lamp.name] for lamp in lamps]


def looked(lamp: Lamp, case: Case) -> Judged:
    """What a lamp says of a case; of one that ends with an error, that it cannot tell, and why."""
    start = time.perf_counter()
    try:
        finding = lamp.look(case)
    except Exception as error:  # one lamp's bug, or what its machine lacks, is not to cost what the others found
        finding = _failed(lamp, told(error))
    return Judged(lamp, finding, time.perf_counter() - start)


def told(error: Exception) -> str:
    """An error in a line, with its place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {what} ({Path(frame.filename).name}, line {frame.lineno})"


def _failed(lamp: Lamp, why: str) -> Finding:
    return Finding(lamp.name, "unknown", f"it failed: {why}", failed=True)


def _side_by_side(case: Case, lamps: Sequence[Lamp], n_processes: int, limit: Limit) -> Iterator[Judged]:
    """Lamps as they end, without those that time steps, which nothing may run beside, and those that were not begun."""
    beside = {lamp.name: lamp for lamp in lamps if not lamp.is_timed}
    order = sorted(beside.values(), key=lambda lamp: not lamp.is_long)
    shared = _shared(case, order)
    needs = {lamp.name: frozenset({*BASIS, *lamp.reads}) for lamp in order}
    jobs = [*shared, *(Job(lamp.name, partial(_look, lamp, case), needs[lamp.name]) for lamp in order)]
    for outcome in outcomes(jobs, n_processes, lambda: not limit.is_over):
        if (lamp := beside.get(outcome.name)) is not None:
            finding, seconds = (_failed(lamp, outcome.failure), 0.0) if outcome.failure else outcome.value
            yield Judged(lamp, finding, seconds)
        elif not outcome.failure:  # else lamps that read it make it themselves, and tell what hinders them
            (case if outcome.name in BASIS else case.conditions).__dict__.update(outcome.value)


def _shared(case: Case, lamps: Sequence[Lamp]) -> list[Job]:
    """Jobs that make what the lamps share, as far as it is not there."""
    lacking = {name: [each for each in names if each not in vars(case)] for name, names in BASIS.items()}
    jobs = [Job(name, partial(_made, case, names)) for name, names in lacking.items() if names]
    read = {name for lamp in lamps for name in lamp.reads}
    if not read or case.refusals:
        return jobs
    with suppress(Exception):  # lamps that need the engine then open it themselves, and tell what hinders them
        case.conditions.first  # noqa: B018 (its weights are then those of every process)
    runs = sorted(read | {RESTS_ON[name] for name in read & {*RESTS_ON}}, key=lambda name: name in RESTS_ON)
    jobs += [
        Job(name, partial(_made, case.conditions, (name,)), frozenset({RESTS_ON.get(name, "")}))
        for name in runs if name not in vars(case.conditions)
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: job.name not in RESTS_ON.values())


def _made(of: Any, names: Sequence[str]) -> dict[str, Any]:
    """In a process of its own: attributes that are computed when they are first asked for."""
    torch.set_num_threads(1)
    return {name: getattr(of, name) for name in names}


def _look(lamp: Lamp, case: Case) -> tuple[Finding, float]:
    """In a process of its own: what a lamp says."""
    torch.set_num_threads(1)
    case.device = "cpu"  # no GPU can be opened behind a fork, so none is looked for
    judged = looked(lamp, case)
    return judged.finding, judged.seconds
