"""The time of every program that is run whole, by the device's own clock, with no wait on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass

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
