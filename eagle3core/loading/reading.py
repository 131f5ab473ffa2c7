"""From a configuration to models: what to read, and what will be launched over it.

Reading comes first and the device second, so that memory can be planned in between: a model that does not fit is
refused before the device holds any of it. What its kernels are follows from shapes alone, so they can be compiled
while weights are on their way, or on a machine without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from eagle3core.arguments import check_path, check_type
from eagle3core.backend import Backend, choose_backend
from eagle3core.checkpoint.draft import DraftCheckpoint, load_draft
from eagle3core.checkpoint.plan import draft_shapes
from eagle3core.checkpoint.target import TargetCheckpoint, load_target, target_shapes
from eagle3core.config import EngineConfig
from eagle3core.errors import CheckpointError, KernelLimit
from eagle3core.geometry import DrafterGeometry, TargetGeometry
from eagle3core.kernels.card import PLAIN_TORCH, Variant
from eagle3core.kernels.cubins import Compiling
from eagle3core.kernels.launch import device_arch
from eagle3core.loading.runners import Models, SpeculationState, choose_path, launched_kernels
from eagle3core.speculative import DRAFT_TARGET, WeightFormat
from eagle3core.step.kernel_limits import why_plain_torch
from eagle3core.weights import bytes_on_device, pack_checkpoints, stored_bytes

log = logging.getLogger("eagle3core")

Checkpoint = TypeVar("Checkpoint", bound=TargetCheckpoint | DraftCheckpoint)


@dataclass(frozen=True)
class Reading:
    """Models that are known but not on the device yet.

    Attributes:
        target, draft: their geometries. dtype: of the weights. backend: where they will go, and by what they will run.
        build: puts them there. speculation: why there is no draft, if one was asked for.
        free_bytes: memory that was free before anything was read, where reading takes some of the device's own (a CPU).
        draft_weights: the format of the draft's maps. target_bytes: of the target's weights on the device.
        kernels: for a compile target, what an engine over the models will launch; to be asked before `build`.
    """

    target: TargetGeometry
    draft: DrafterGeometry | None
    dtype: torch.dtype
    backend: Backend
    build: Callable[[], Models]
    speculation: SpeculationState | None = None
    free_bytes: int | None = None
    draft_weights: WeightFormat = "as_stored"
    target_bytes: int = 0
    kernels: Callable[[str], list[Variant]] = lambda arch: []

    def compiling(self) -> Compiling:
        """The kernels that are missing, under way; none where no kernels will run."""
        if self.backend.path != "kernels":
            return Compiling([], "none")
        arch = device_arch(self.backend.device)
        return Compiling(self.kernels(arch), arch)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        size, draft, total = self.dtype.itemsize, self.draft, self.target_bytes
        if draft is not None:
            shapes = target_shapes(draft) if isinstance(draft, TargetGeometry) else draft_shapes(draft)
            total += sum(stored_bytes(*named, size, self.draft_weights) for named in shapes)
        return total


def read_models(target_dir: str | Path, config: EngineConfig) -> Reading:
    """The models that a configuration names, read and checked on the host.

    Raises:
        ConfigError: no path, or no configuration.
        CheckpointError: the target, or with on_draft_failure="raise" the draft, cannot be loaded.
        BackendUnavailable: the configured device is not there.
    """
    check_path("the target", target_dir)
    check_type("config", config, EngineConfig)
    backend = choose_backend(config)
    free = backend.free_bytes if backend.device.type == "cpu" else None
    target = _read_target(target_dir, config)
    draft, speculation = _read_draft(target, config)
    geometry = draft.geometry if draft else None
    backend = choose_path(backend, target.geometry, geometry, config, target.dtype)

    spec = config.speculative_config
    draft_weights = spec.draft_weights if spec is not None else "as_stored"

    def build() -> Models:
        return _packed(target, draft, config, backend.device, packs=backend.path == "kernels")

    kernels, shapes = partial(_kernels_of, target, draft, config), (target.geometry, geometry, target.dtype)
    target_bytes = bytes_on_device(target, _target_format(config))
    return Reading(*shapes, backend, build, speculation, free, draft_weights, target_bytes, kernels)


def needed_kernels(target_dir: str | Path, config: EngineConfig, arch: str) -> list[Variant]:
    """The kernels that an engine over checkpoints on disk launches on a GPU of `arch`; needs neither GPU nor compiler.

    Raises:
        ConfigError, CheckpointError: as `read_models`.
        KernelLimit: no kernels would run, with the reason.
    """
    check_path("the target", target_dir)
    check_type("config", config, EngineConfig)
    target = _read_target(target_dir, config)
    draft, _ = _read_draft(target, config)
    reason = why_plain_torch(target.geometry, draft.geometry if draft else None, config, target.dtype)
    if reason is not None:
        raise KernelLimit(f"no kernels run here: {reason}", "models and settings that the kernels take", PLAIN_TORCH)
    return _kernels_of(target, draft, config, arch)


def _kernels_of(
    target: TargetCheckpoint, draft: DraftCheckpoint | TargetCheckpoint | None, config: EngineConfig, arch: str
) -> list[Variant]:
    empty = draft if draft is None else _shapes(draft)
    return launched_kernels(*_packed(_shapes(target), empty, config, torch.device("meta"), packs=True), config, arch)


def _shapes(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose weights have shapes and no values."""
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in checkpoint.weights.items()}
    return replace(checkpoint, weights=empty)


def _packed(
    target: TargetCheckpoint, draft: DraftCheckpoint | TargetCheckpoint | None, config: EngineConfig,
    device: torch.device, *, packs: bool,
) -> Models:  # fmt: skip
    """Both models on a device; every raw tensor is dropped from its checkpoint once it has been read."""
    spec, weights = config.speculative_config, _target_format(config)
    of_draft = spec.draft_weights if spec is not None else "as_stored"
    pack = partial(pack_checkpoints, device=device, block=config.block_size, packs=packs)
    if isinstance(draft, TargetCheckpoint):
        return pack(target, None, weights=weights)[0], pack(draft, None, weights=of_draft)[0]
    return pack(target, draft, weights=weights, draft_weights=of_draft)


def _target_format(config: EngineConfig) -> WeightFormat:
    """What maps of the target are packed in that are not in FP8 yet."""
    return "fp8" if config.target_weights == "fp8" else "as_stored"


def _read_target(target_dir: str | Path, config: EngineConfig) -> TargetCheckpoint:
    """The target as the settings ask for it."""
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    keeps = config.target_weights != "dequantised"
    return load_target(target_dir, dtype=dtype, casts=False, cache_dtype=config.cache_dtype, keeps_fp8=keeps)


def _read_draft(
    target: TargetCheckpoint, config: EngineConfig
) -> tuple[DraftCheckpoint | TargetCheckpoint | None, SpeculationState | None]:
    """The draft that the configuration names; when it cannot be loaded and the baseline may take over, the reason."""
    spec = config.speculative_config
    if spec is None or spec.is_lookup:
        return None, None
    try:
        if spec.method == DRAFT_TARGET:
            cache = spec.draft_cache_dtype
            return load_target(str(spec.model), dtype=target.dtype, casts=False, cache_dtype=cache), None
        checkpoint = load_draft(
            str(spec.model),
            target.geometry,
            capture_layers=spec.capture_layers,
            capture_convention=spec.capture_convention,
            norm_output=spec.norm_output,
            dtype=target.dtype,
            method=spec.method,
        )
    except CheckpointError as error:
        if config.on_draft_failure == "raise":
            raise
        log.warning("[EAGLE] decoding without the draft, which could not be loaded: %s", error)
        return None, SpeculationState(False, f"the draft could not be loaded: {error.what}")
    return checkpoint, None
