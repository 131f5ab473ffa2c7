"""The memory plan: what weights and caches will take, settled before anything is allocated.

Blocks per sequence are ceil((session_len + max_decoding_tokens) / block), for target and draft each
(docs/requirements.md R-64, 1.X-18).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3core.backend import Backend
from eagle3core.config import EngineConfig
from eagle3core.decode.kvcache import blocks_for
from eagle3core.errors import ConfigError
from eagle3core.geometry import BlockGeometry, DraftGeometry, TargetGeometry


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        weight_bytes: target and draft weights, already on the device when the plan is made.
        target_kv_bytes, draft_kv_bytes: both paged caches.
        blocks_per_sequence: cache blocks a slot may hold, in each cache.
        allowed_kv_bytes: the share of free memory that the caches may take.
    """

    weight_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int
    blocks_per_sequence: int
    allowed_kv_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Both caches."""
        return self.target_kv_bytes + self.draft_kv_bytes

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"weights {self.weight_bytes / mib:.1f} MiB, target KV {self.target_kv_bytes / mib:.1f} MiB, "
            f"draft KV {self.draft_kv_bytes / mib:.1f} MiB ({self.blocks_per_sequence} blocks a sequence in each), "
            f"KV limit {self.allowed_kv_bytes / mib:.1f} MiB"
        )


def plan_memory(
    target: TargetGeometry,
    draft: DraftGeometry | None,
    config: EngineConfig,
    backend: Backend,
    *,
    dtype: torch.dtype,
    weight_bytes: int,
) -> MemoryPlan:
    """The plan for `config`.

    Raises:
        ConfigError: the caches exceed their share of free memory; names the largest batch that fits.
    """
    spec = config.speculative_config if draft is not None else None
    blocks = blocks_for(config.session_len + (spec.decoding_tokens if spec else 1), config.block_size)

    def slot_bytes(geometry: BlockGeometry, n_layers: int) -> int:
        rows = blocks * config.block_size * geometry.n_kv_heads * geometry.head_dim
        return 2 * n_layers * rows * dtype.itemsize

    target_slot = slot_bytes(target.block, target.n_layers)
    draft_slot = slot_bytes(draft.block, 1) if draft else 0
    slots = config.max_batch_size
    allowed = int(backend.free_bytes * config.cache_max_entry_count)
    plan = MemoryPlan(weight_bytes, slots * target_slot, slots * draft_slot, blocks, allowed)
    if plan.kv_bytes > allowed:
        fits = allowed // (target_slot + draft_slot)
        raise ConfigError(
            f"the KV caches would take {plan.kv_bytes} bytes with max_batch_size {slots}, session_len "
            f"{config.session_len}",
            f"at most {allowed} bytes (cache_max_entry_count {config.cache_max_entry_count} of free memory)",
            f"set max_batch_size={fits}" if fits else "lower session_len: not even one sequence fits",
        )
    return plan
