"""Clocks for the decode bench: phases without a cost inside a step, and the own time of every span.

Both are traces that an engine is given; neither changes what it computes (docs/requirements.md R-120).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eagle3core.trace import TimingTrace, Trace

# Bars of the waterfall in the order of a step; everything a span name ends in is put under one of them.
SPANS = (
    "draft.fc",
    "draft.qkv",
    "draft.attn",
    "draft.mlp",
    "draft.head",
    "tree",
    "target.embed",
    "target.attn",
    "target.mlp",
    "target.head",
    "accept",
    "commit",
    "rewind",
    "between spans",
)
BETWEEN = SPANS[-1]
REST_S = 0.5  # idle before steps that are timed


class PhaseClock(Trace):
    """Time of prefills, and when each step ended on the host's clock, with no cost inside a step.

    Passes over prompts that follow one another are waited for once, before the step behind them: an engine hands them
    in without waiting, and a clock that waited for each would leave the device idle between them.

    Attributes:
        rest_s: left idle after prefills, see `rest`; 0 without `rests`.
    """

    def __init__(self, device: torch.device, *, rests: bool = True) -> None:
        self.device, self.rests = device, rests
        self.rest_s = 0.0
        self._is_rested = False
        self._prefill_s = 0.0
        self._reads_since: float | None = None
        self.step_ends_s: list[float] = []

    @property
    def n_steps(self) -> int:
        """Steps that ended."""
        return len(self.step_ends_s)

    @property
    def prefill_s(self) -> float:
        """Spent in prefills, each from its first pass until the device is done with its last."""
        self._end_prefill()
        return self._prefill_s

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        is_step = name.startswith("step")
        if is_step:
            self._end_prefill()
            if self.rests and not self._is_rested:
                self.rest_s += rest(self.device)
                self._is_rested = True
        elif name == "prefill" and self._reads_since is None:
            self._reads_since, self._is_rested = time.perf_counter(), False
        yield
        if is_step:
            self.step_ends_s.append(time.perf_counter())

    def _end_prefill(self) -> None:
        if self._reads_since is not None:
            synchronise(self.device)
            self._prefill_s += time.perf_counter() - self._reads_since
            self._reads_since = None


class SpanClock(TimingTrace):
    """Exclusive time of every span of the decode steps, in microseconds, by bar of `SPANS`; prefills are left out.

    With `scope` "prefill" that of the passes over prompts, and steps are left out.
    """

    def __init__(self, device: torch.device, scope: str = "step") -> None:
        super().__init__(device)
        self.counted = scope
        self.bars_us: dict[str, float] = defaultdict(float)
        self.n_steps = 0
        self._in_step = False
        self._inner_us = [0.0]  # time of finished children, one entry an open span

    @property
    def step_us(self) -> float:
        """Mean wall time of a step."""
        return sum(self.bars_us.values()) / max(self.n_steps, 1)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        if not name.startswith(self.counted):
            yield
            return
        self._in_step = True
        self.n_steps += 1
        with self._timed(BETWEEN):
            yield
        self._in_step = False

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with Trace.span(self, name):  # the range alone: the timer of TimingTrace would wait for the device once more
            if not self._in_step:
                yield
                return
            with self._timed(bar_of(name)):
                yield

    @contextmanager
    def _timed(self, bar: str) -> Iterator[None]:
        start = self._now()
        self._inner_us.append(0.0)
        yield
        elapsed, inner = self._now() - start, self._inner_us.pop()
        self.bars_us[bar] += elapsed - inner
        self._inner_us[-1] += elapsed


def bar_of(span: str) -> str:
    """The bar of the waterfall that a span's own time belongs to; enclosing public ranges hold only what is between."""
    parts = span.split(".")
    if parts[0] == "tree":
        return "tree"
    if parts[0] == "target":
        return f"target.{parts[-1]}"
    return span if span in SPANS else BETWEEN


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that the clock reads finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rest(device: torch.device) -> float:
    """Wait for the device, then leave a GPU idle for `REST_S`; seconds of that.

    A long prefill draws all the power a GPU may, and clocks stay down for more than a second of steps after it (an H200
    lost 2% of a step so). Contenders differ in what they do before their steps, and all begin from a rested GPU.
    """
    synchronise(device)
    if device.type != "cuda":
        return 0.0
    time.sleep(REST_S)
    return REST_S
