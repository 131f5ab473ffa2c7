"""The time of every program that is run whole, by the device's own clock, with no wait on the way; and the time that
the host's garbage collections take.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle3core.step import Enqueue, Program, Replayer, Staged


@dataclass(frozen=True)
class Moment:
    """A place in the device's work: an event on a GPU, the host's clock on a CPU, which waits for its work."""

    place: torch.cuda.Event | float

    def since_us(self, earlier: Moment) -> float:
        """Microseconds from `earlier`, once the device has come past both."""
        if isinstance(self.place, float) or isinstance(earlier.place, float):
            assert isinstance(self.place, float), "both on one clock"
            assert isinstance(earlier.place, float), "both on one clock"
            return (self.place - earlier.place) * 1e6
        return float(earlier.place.elapsed_time(self.place)) * 1e3


@dataclass(frozen=True)
class Timed:
    """One run of a program."""

    program: Program
    before: Moment
    after: Moment

    def took_us(self) -> float:
        """Its time."""
        return self.after.since_us(self.before)


class TimedReplayer:
    """Runs programs as another replayer does, and keeps when each whole one ran.

    Attributes:
        times: every run, in order.
    """

    def __init__(self, inner: Replayer, on_gpu: bool) -> None:
        self.inner, self.on_gpu = inner, on_gpu
        self.times: list[Timed] = []

    def whole(self, program: Program) -> Enqueue:
        """The program at once, timed."""
        run = self.inner.whole(program)

        def timed() -> None:
            before = self._now()
            run()
            self.times.append(Timed(program, before, self._now()))

        return timed

    def staged(self, program: Program) -> Staged:
        """The program stage by stage, not timed."""
        return self.inner.staged(program)

    def _now(self) -> Moment:
        if not self.on_gpu:
            return Moment(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Moment(event)


class CollectorClock:
    """Times Python's garbage collections while the block runs: one of a heap with torch in it takes 0.3 s.

    Attributes:
        ms: that they took together. n_full: those of them that went through the whole heap.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.ms, self.n_full = 0.0, 0
        self._clock, self._began = clock, 0.0

    def __enter__(self) -> CollectorClock:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._began = self._clock()
            return
        self.ms += 1e3 * (self._clock() - self._began)
        self.n_full += info["generation"] == 2
