"""The memory plan: what weights and caches will take, settled before anything is allocated.

Blocks per sequence are ceil((session_len + tokens in flight) / block), for target and draft each
(docs/requirements.md R-64, 1.X-18). Where not all slots' longest sessions fit at once, they share what fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3core.backend import Backend
from eagle3core.config import EngineConfig
from eagle3core.errors import ConfigError
from eagle3core.geometry import BlockGeometry, DrafterGeometry, TargetGeometry
from eagle3core.kernels.gemm.scratch import workspace_bytes
from eagle3core.kernels.launch import device_arch
from eagle3core.loading import Reading, device_sizes, steps_draft
from eagle3core.step.sizes import StateShape, blocks_for, chunk_shapes, stored_dtype
from eagle3core.step.state import state_bytes
from eagle3core.weights.packed import Drafter, PackedTarget

GRAPH_BYTES = 80 << 20  # 76 MiB seen on an H200 for a first engine, up to 4 MiB for each further one (docs/log.md)
PASS_BYTES = 16 << 20  # for each narrower pass: 2 MiB a kernel, as of those seen, of about seven that no other pass has


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        weight_bytes: target and draft weights, whether on the device already or still to come.
        target_kv_bytes, draft_kv_bytes: both paged caches.
        blocks_per_sequence: most cache blocks of a slot, in each cache.
        allowed_kv_bytes: the share of free memory that the caches may take.
        scratch_bytes: everything else that is allocated once: activations, logits, attention's partial sums, states.
        graph_bytes: captured graphs and the machine code of their kernels, about.
        n_blocks: of each cache, shared by the slots.
    """

    weight_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int
    blocks_per_sequence: int
    allowed_kv_bytes: int
    scratch_bytes: int = 0
    graph_bytes: int = 0
    n_blocks: int = 0

    @property
    def kv_bytes(self) -> int:
        """Both caches."""
        return self.target_kv_bytes + self.draft_kv_bytes

    def __str__(self) -> str:
        mib = 2**20
        once = (("scratch", self.scratch_bytes), ("graphs", self.graph_bytes))
        further = "".join(f", {name} {n_bytes / mib:.1f} MiB" for name, n_bytes in once if n_bytes)
        return (
            f"weights {self.weight_bytes / mib:.1f} MiB, target KV {self.target_kv_bytes / mib:.1f} MiB, "
            f"draft KV {self.draft_kv_bytes / mib:.1f} MiB ({self.n_blocks} blocks in each, up to "
            f"{self.blocks_per_sequence} a sequence), "
            f"KV limit {self.allowed_kv_bytes / mib:.1f} MiB{further}"
        )


def plan_reading(reading: Reading, config: EngineConfig) -> MemoryPlan:
    """The plan for models that are not on the device yet.

    Raises:
        ConfigError: as `plan_memory`.
    """
    scratch = _scratch_bytes(reading.target, reading.draft, config, reading.dtype, reading.backend)
    return plan_memory(
        reading.target,
        reading.draft,
        config,
        reading.backend,
        dtype=reading.dtype,
        weight_bytes=reading.weight_bytes,
        scratch_bytes=scratch,
        unloaded_bytes=reading.weight_bytes,
        free_bytes=reading.free_bytes,
    )


def plan_loaded(target: PackedTarget, draft: Drafter | None, config: EngineConfig, backend: Backend) -> MemoryPlan:
    """The plan for models that are on the device already.

    Raises:
        ConfigError: as `plan_memory`.
    """
    tensors = [*target.own_tensors(), *(draft.own_tensors() if draft else ())]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    geometry = draft.geometry if draft else None
    scratch = _scratch_bytes(target.geometry, geometry, config, target.dtype, backend)
    return plan_memory(
        target.geometry, geometry, config, backend, dtype=target.dtype, weight_bytes=weights, scratch_bytes=scratch
    )


def _scratch_bytes(
    target: TargetGeometry, draft: DrafterGeometry | None, config: EngineConfig, dtype: torch.dtype, backend: Backend
) -> int:
    """What the state takes beside the caches, and for kernels the workspace of their GEMMs."""
    kernels = backend.path == "kernels"
    sizes = device_sizes(config, drafts=steps_draft(config, draft))
    arch = device_arch(backend.device) if kernels else None
    shape = StateShape(target, draft, dtype, backend.device)
    return state_bytes(arch, shape, sizes)[1] + (workspace_bytes(sizes.most_rows, shape.most_columns) if kernels else 0)


def plan_memory(
    target: TargetGeometry,
    draft: DrafterGeometry | None,
    config: EngineConfig,
    backend: Backend,
    *,
    dtype: torch.dtype,
    weight_bytes: int,
    scratch_bytes: int = 0,
    unloaded_bytes: int = 0,
    free_bytes: int | None = None,
) -> MemoryPlan:
    """The plan for `config`.

    Args:
        weight_bytes: of both models. unloaded_bytes: of these, what is still to be loaded.
        scratch_bytes: as in the plan. free_bytes: before any weight was read; what is free now by default.

    Raises:
        ConfigError: the weights and scratch exceed free memory, or the caches their share of what is left.
    """
    graphs = _graph_bytes(config) if backend.path == "kernels" else 0
    free = backend.free_bytes if free_bytes is None else free_bytes
    left = free - unloaded_bytes - scratch_bytes - graphs
    if left <= 0:
        raise ConfigError(
            f"weights of {weight_bytes} bytes, scratch of {scratch_bytes} bytes and graphs of {graphs} bytes on a "
            f"device with {free} bytes free",
            f"{-left} bytes less",
            "use a smaller model, a smaller max_batch_size or prefill_chunk, or a device with more memory",
        )
    allowed = int(left * config.cache_max_entry_count)
    spec = config.speculative_config if steps_draft(config, draft) else None
    a_sequence = blocks_for(config.session_len + (spec.tokens_in_flight if spec else 1), config.block_size)
    stored = stored_dtype(config.cache_dtype, dtype)
    target_block = _block_bytes(target.block, target.n_layers, config.block_size, stored)
    n_drafting = draft.n_layers if isinstance(draft, TargetGeometry) else 1
    stored = stored_dtype(spec.draft_cache_dtype if spec else "as_computed", dtype)
    draft_block = _block_bytes(draft.block, n_drafting, config.block_size, stored) if draft else 0
    n_blocks = _pool_size(config, a_sequence, target_block + draft_block, allowed)
    return MemoryPlan(
        weight_bytes, n_blocks * target_block, n_blocks * draft_block, a_sequence, allowed, scratch_bytes, graphs,
        n_blocks,
    )  # fmt: skip


def _graph_bytes(config: EngineConfig) -> int:
    """Graphs and code of an engine's kernels, about."""
    return GRAPH_BYTES + PASS_BYTES * (len(chunk_shapes(device_sizes(config, drafts=False), kernels=True)) - 1)


def _block_bytes(geometry: BlockGeometry, n_layers: int, block: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    return 2 * n_layers * block * geometry.n_kv_heads * geometry.head_dim * dtype.itemsize


def _pool_size(config: EngineConfig, a_sequence: int, block_bytes: int, allowed: int) -> int:
    """Blocks of the caches: what is asked for, or every slot's longest session, or what fits of that.

    Raises:
        ConfigError: what is asked for does not fit, or not one session does.
    """
    fits = allowed // block_bytes
    limit = f"at most {allowed} bytes (cache_max_entry_count {config.cache_max_entry_count} of free memory)"
    if config.cache_blocks is not None:
        if config.cache_blocks > fits:
            raise ConfigError(
                f"the KV caches would take {config.cache_blocks * block_bytes} bytes with cache_blocks "
                f"{config.cache_blocks}",
                limit,
                f"set cache_blocks to {fits} or less, or leave it out" if fits else "use a device with more memory",
            )
        return config.cache_blocks
    if a_sequence > fits:
        raise ConfigError(
            f"the KV caches would take {a_sequence * block_bytes} bytes for one session with session_len "
            f"{config.session_len}",
            limit,
            "lower session_len: not even one sequence fits",
        )
    return min(config.max_batch_size * a_sequence, fits)
