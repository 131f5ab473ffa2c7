"""Peer: the plain-torch step through torch's compiler, in one CUDA graph of our own; the bar for every batch.

The compiler joins norms, residuals, rotation, cache writes and activation. For one sequence it also times cuBLAS beside
Triton kernels for each product (`max-autotune-no-cudagraphs`); with more rows Triton gains little (at most 3% of four
rows' products), and cuBLAS is taken. Attention is the fastest of torch's library kernels, as in the plain peer: they
divide the keys among blocks. On a CPU the compiler writes C++.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

from lab.errors import RunFailed
from lab.probes.bench.peers.plain_torch import PlainTorch
from lab.probes.bench.peers.regions import Regions

TUNED, UNTUNED = "max-autotune-no-cudagraphs", "default"
# Of one peer: up to twenty products are timed, in some thirty forms each. One that needs longer is missing, with why.
COMPILE_LIMIT_S = 420.0
_MOST_FORMS = 64  # of one region: a form for each number of rows, layer width and batch alive at once


class CompiledTorch(PlainTorch):
    """The peer at one point; arguments as of `PlainTorch`.

    Raises:
        RunFailed: compiling took longer than `COMPILE_LIMIT_S`; told between two regions, never within one.
    """

    name = "compiled-torch"

    def __init__(self, *weights: Any, limit_s: float = COMPILE_LIMIT_S, **shape: Any) -> None:
        self.limit_s, self.compile_s = limit_s, 0.0
        self._began_s: float | None = None  # while the compiler is at work
        super().__init__(*weights, **shape)

    def facts(self) -> dict[str, Any]:
        """What the compiler was asked for, and how long it took, beside the plain peer's."""
        return {**super().facts(), "compiled": True, "compile_mode": self._mode, "compile_s": self.compile_s}

    @property
    def _mode(self) -> str:
        return TUNED if self.first.is_cuda and len(self.first) == 1 else UNTUNED

    def _regions(self) -> Regions:
        return Regions(**{field.name: self._compiled(field.default) for field in dataclasses.fields(Regions)})

    def _compiled(self, function: Any) -> Callable[..., Any]:
        # Whole, with fixed shapes, or not at all: a region that falls back to eager calls would be another peer.
        call: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, mode=self._mode)

        def run(*arguments: Any) -> Any:
            taken_s = 0.0 if self._began_s is None else time.perf_counter() - self._began_s
            if taken_s > self.limit_s:
                raise RunFailed(
                    f"torch.compile had taken {taken_s:.0f} s before the step was whole",
                    f"at most {self.limit_s:.0f} s a peer", "run again: torch keeps what it has compiled on disk",
                )  # fmt: skip
            return call(*arguments)

        return run

    def _ready(self, step: Callable[[], None]) -> Callable[[], None]:
        dynamo: Any = importlib.import_module("torch._dynamo")
        self._began_s = time.perf_counter()
        with dynamo.config.patch(recompile_limit=_MOST_FORMS):
            step()
        self.compile_s, self._began_s = time.perf_counter() - self._began_s, None
        return super()._ready(step)
