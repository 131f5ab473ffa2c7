"""Steps that a profiler watches, stage by stage so that ranges bracket the GPU's work, after a few unwatched ones.

torch's profiler knows no NVTX, so under it every range is one of its own. Under Nsight the ranges are the engine's, and
the capture is switched on and off by the CUDA profiler's API.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.request import without_errors
from eagle3core.trace import StagedTrace
from lab.errors import RunFailed
from lab.probes.bench.clocks import synchronise
from lab.probes.bench.rounds import committed_by_step
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.bench.source import HEADROOM, open_pair
from lab.probes.profiles.capture import Capture, read_chrome_trace
from lab.probes.profiles.costs import declared_bytes
from lab.probes.proofs.gpu_trace import WINDOW
from lab.probes.proofs.steps import WARM_STEPS, tokens_for

EXPORT = "torch_trace.json.gz"


class WatchedStages(StagedTrace):
    """Runs steps stage by stage and has a profiler on during `n_steps` of them, after `WARM_STEPS`.

    Args:
        profiler: torch's, or None for one that watches from outside.
    """

    def __init__(self, device: torch.device, n_steps: int, profiler: Any | None) -> None:
        self.device, self.n_steps, self.profiler = device, n_steps, profiler
        self.n_seen, self.is_on = 0, False

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        if not name.startswith("step"):
            yield
            return
        if self.n_seen == WARM_STEPS:
            synchronise(self.device)
            self._switch(on=True)
        with self._noted(WINDOW):
            yield
        self.n_seen += 1
        if self.n_seen == WARM_STEPS + self.n_steps:
            synchronise(self.device)
            self._switch(on=False)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self._noted(name):
            yield

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        if self.is_on and self.profiler is not None:
            with torch.profiler.record_function(name):
                yield
            return
        with super().span(name):
            yield

    def _switch(self, *, on: bool) -> None:
        self.is_on = on
        if self.profiler is not None:
            self.profiler.start() if on else self.profiler.stop()
        elif self.device.type == "cuda":
            switch = torch.cuda.profiler.start if on else torch.cuda.profiler.stop
            switch()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Watched:
    """What is known of the steps beside their capture; written next to it, so that a stored one has it too.

    Attributes:
        parameters: of the rows. declared: bytes a step by stage. bytes_by: whose count. cached: tokens a sequence.
    """

    parameters: dict[str, Any]
    n_steps: int
    cached: float
    declared: dict[str, int]
    bytes_by: str


def watched_steps(scenario: Scenario, point: Point, k: int, n_steps: int, profiler: Any | None) -> Watched:
    """Runs a pair's engine, `n_steps` of its steps under the profiler.

    Raises:
        RunFailed: the requests ended before all steps ran.
    """
    source = open_pair(scenario)
    session = point.context + tokens_for(n_steps, k) + HEADROOM
    with torch.no_grad():
        engine = source.engine(k, batch=point.batch, session_len=session)
        cached = _run(engine, source.prompts(point.batch, point.context, scenario.seed), n_steps, profiler)
        declared, bytes_by = declared_bytes(engine, k, cached)
    parameters = {
        "geometry": scenario.geometry, "pair": scenario.pair, "context": point.context, "batch": point.batch,
        "spec_k": k, "dtype": scenario.dtype, "device": scenario.device,
        "path": "kernels" if engine.runner.has_kernels else "torch",
    }  # fmt: skip
    return Watched(parameters, n_steps, cached, declared, bytes_by)


def _run(engine: Engine, prompts: list[list[int]], n_steps: int, profiler: Any | None) -> float:
    """Tokens a sequence had cached half-way through the watched steps."""
    trace = WatchedStages(engine.target.device, n_steps, profiler)
    engine.trace = trace
    n_tokens = tokens_for(n_steps, engine.runner.depth)
    responses = without_errors(engine.generate(prompts, GenerationConfig(n_tokens, ignore_eos=True)))
    if trace.n_seen < WARM_STEPS + n_steps:
        raise RunFailed(f"{trace.n_seen} steps ran", f"{WARM_STEPS + n_steps} steps", "ask for fewer with --steps")
    committed = sum(sum(committed_by_step(response)[: WARM_STEPS + n_steps // 2]) for response in responses)
    return (sum(map(len, prompts)) + committed) / len(prompts)


def torch_capture(scenario: Scenario, point: Point, k: int, n_steps: int, folder: Path) -> tuple[Capture, Watched]:
    """A capture by torch's profiler, its export kept in `folder`."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if scenario.device == "cuda" else []
    profiler = torch.profiler.profile(activities=kinds)
    watched = watched_steps(scenario, point, k, n_steps, profiler)
    profiler.export_chrome_trace(str(folder / EXPORT))
    return read_chrome_trace(folder / EXPORT), watched
