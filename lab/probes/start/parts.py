"""A first request taken apart: device, weights beside the compiling of kernels, engine, prompt, first step.

Parts follow each other, so they add up to the whole. Kernels compile while weights are made, so `compile` is only what
is still to wait for then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from eagle3core import Engine, GenerationConfig
from eagle3core.config import EngineConfig
from eagle3core.kernels import cubins, launch
from eagle3core.loading import launched_kernels
from eagle3core.trace import Trace
from eagle3core.weights import PackedDraft, PackedTarget
from lab.errors import RunFailed
from lab.pairs.planted import PlantedPair, empty_models, find_geometry

PARTS = ("process", "imports", "device", "weights", "compile", "engine", "load", "capture", "prefill", "first step")
BEFORE_A_TOKEN = PARTS[:-1]
HEADROOM = 64  # tokens of a session beyond the prompt


class StartClock(Trace):
    """Seconds of each part of a start.

    Attributes:
        seconds: by part. spans_s: of the core's own spans around making a runner ready.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.spans_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The enclosed work, what the device still has to do of it included."""
        began = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = time.monotonic() - began

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with super().span(name):
            began = time.monotonic()
            yield
            if name.startswith("start."):
                part = name.removeprefix("start.")
                self.spans_s[part] = self.spans_s.get(part, 0.0) + time.monotonic() - began


def first_request(
    before: Mapping[str, float],
    *,
    geometry: str,
    k: int,
    context: int,
    batch: int,
    device: str,
    dtype: str,
    seed: int = 0,
) -> dict[str, Any]:
    """Parts with their seconds, and what was compiled.

    Args:
        before: parts that were over before this module was there. k: drafts a step. context: tokens of the prompt.

    Raises:
        RunFailed: the tokens were not those that were planted.
    """
    clock = StartClock(torch.device(device))
    clock.seconds |= before
    with clock.part("device"):
        torch.zeros(1, device=clock.device)
    pair_shapes = find_geometry(geometry)
    pair = PlantedPair(pair_shapes, share=1.0, seed=seed, dtype=getattr(torch, dtype), device=device)
    config = pair.config(k, session_len=context + HEADROOM, max_batch_size=batch, dtype=dtype)
    with _compiling(geometry, config, clock.device) as under_way:
        with clock.part("weights"):
            models = models_for(pair.models(), config)
        with clock.part("compile"):
            done = under_way.wait()
    with clock.part("engine"):
        engine = Engine(*models, config, trace=clock)
    for part in ("load", "capture", "compile"):  # those of making the runner ready are not the engine's
        seconds = clock.spans_s.get(part, 0.0)
        clock.seconds["engine"] -= seconds
        clock.seconds[part] = clock.seconds.get(part, 0.0) + seconds
    [prompt] = pair.prompts(1, context, seed=seed)
    tokens = engine.stream(prompt, GenerationConfig(max_new_tokens=2, ignore_eos=True))
    with clock.part("prefill"):
        first = next(tokens)
    with clock.part("first step"):
        second = next(tokens)
    if [first, second] != pair.tokens.follow(prompt[-1], 2):
        raise RunFailed(f"the tokens {[first, second]}", "those that were planted", "run eagle3lab prove identity")
    return {
        "parts": {name: clock.seconds[name] for name in PARTS if name in clock.seconds},
        "n_kernels": done.n_wanted, "n_compiled": done.n_compiled, "n_compilers": done.n_processes,
        "compilers_s": done.processor_s, "path": engine.backend.path,
    }  # fmt: skip


def _compiling(geometry: str, config: EngineConfig, device: torch.device) -> cubins.Compiling:
    """The kernels of an engine, under way; none where none run."""
    if device.type != "cuda":
        return cubins.Compiling([], "none")
    arch = launch.device_arch(device)
    models = models_for(empty_models(find_geometry(geometry)), config)
    return cubins.Compiling(launched_kernels(*models, config, arch), arch)


def models_for(
    models: tuple[PackedTarget, PackedDraft], config: EngineConfig
) -> tuple[PackedTarget, PackedDraft | None]:
    """Of a pair what an engine uses: without drafts the target alone, which then captures nothing."""
    target, draft = models
    return (target, draft) if config.speculative_config is not None else (replace(target, taps=()), None)
