"""Spans and taps: the one dotted name of a stage, as NVTX range, as timer and as recorded tensor.

A `Trace` is a value handed down a step. Under the plain one every program runs as a whole, without ranges or taps.
The detailed ones have it run stage by stage, in NVTX ranges: `StagedTrace` for profilers, `RecordingTrace` also keeps
the tensors that stages form (for parity) and `TimingTrace` the time of every span (for the decode report).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import nvtx
import torch
from torch import Tensor

DOMAIN = nvtx.get_domain("eagle3core")


class Trace:
    """NVTX ranges around stages if they are run one by one; keeps nothing.

    Ranges exist only while a tool is attached: without one the library's own push and pop are no-ops of well under a
    microsecond, and nothing else happens here.

    Attributes:
        is_detailed: stages have to be run one by one, since something is done between them. If not, no stage opens a
            span or offers a tap.
    """

    is_detailed: bool = False

    @property
    def has_taps(self) -> bool:
        """Whether anybody looks at what is tapped, for whom a tensor would have to be made."""
        return type(self).tap is not Trace.tap

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Range `name` around the enclosed work (docs/requirements.md R-118..R-120)."""
        DOMAIN.push_range(DOMAIN.get_event_attributes(message=name))
        try:
            yield
        finally:
            DOMAIN.pop_range()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix, such as "step0" or "chain1", for the names that taps inside it are recorded under."""
        yield

    def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
        """Offer a stage's tensor.

        Args:
            name: dotted stage name, e.g. "draft.attn".
            value: `[B, T, ...]` the stage's output, padding rows included.
            valid: `[B, T]` bool, the rows that hold real tokens; None means all.
        """


class StagedTrace(Trace):
    """Runs every stage by itself, so that its ranges bracket the GPU's work: for Nsight and other profilers.

    On the kernels' path a step is one CUDA graph and opens no range; under this trace it is one graph a stage. Tokens
    are the same, the step takes longer. Source: docs/requirements.md R-118..R-120.
    """

    is_detailed = True


class RecordingTrace(Trace):
    """Keeps every tapped tensor as `[rows, ...]` under "<scope>/<stage>", padding removed, in order of appearance."""

    is_detailed = True

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._scopes: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
        rows = value.reshape(-1, *value.shape[2:]) if valid is None else value[valid]
        key = "/".join([*self._scopes, name])
        rows = rows.detach().to("cpu", copy=True)
        if key in self.tensors:  # a later chunk of the same pass
            rows = torch.cat([self.tensors[key], rows])
        self.tensors[key] = rows


class TimingTrace(Trace):
    """Adds up the time of every span, by name, in microseconds.

    On a GPU each span is bracketed by a device synchronisation, so the times are those of the stages alone and the
    whole is slower than an untimed step; shares are meaningful, sums are not a step time.
    """

    is_detailed = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total_us: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with super().span(name):
            start = self._now()
            try:
                yield
            finally:
                self.total_us[name] += self._now() - start
                self.calls[name] += 1

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns() / 1e3
