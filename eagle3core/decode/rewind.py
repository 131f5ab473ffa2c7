"""Logical rewind of the KV cache after a step that accepted less than it drafted.

Blocks are freed by logical index: those from ceil(new_len / block) up to ceil(old_len / block), so a block that is
still partly used stays (docs/requirements.md R-65..R-68, 1.X-9).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.decode.kvcache import PagedCache, blocks_for
from eagle3core.errors import InvariantViolated

log = logging.getLogger("eagle3core")


def compute_rewind_lengths(draft_lens: Tensor, accepted_lens: Tensor) -> Tensor:
    """Tokens to take back per sequence, `[B]` int64: max(0, drafted - accepted)."""
    return (draft_lens - accepted_lens).clamp_min(0)


@dataclass(frozen=True)
class KVCacheRewindParams:
    """One rewind over a batch (docs/requirements.md R-66).

    Attributes:
        cache: the cache whose tables shrink.
        batch_slots: `[B]` int64 slot of each row.
        old_lens: `[B]` int64 tokens written so far, drafts included.
        rewind_lengths: `[B]` int64 tokens to take back.
    """

    cache: PagedCache
    batch_slots: Tensor
    old_lens: Tensor
    rewind_lengths: Tensor

    def __post_init__(self) -> None:
        if bool((self.rewind_lengths < 0).any()) or bool((self.rewind_lengths > self.old_lens).any()):
            raise InvariantViolated(
                f"rewind lengths {self.rewind_lengths.tolist()} for cached lengths {self.old_lens.tolist()}",
                "0 <= rewind <= cached length",
                "report this: acceptance and draft lengths disagree",
            )


def rewind_kv_cache(params: KVCacheRewindParams) -> Tensor:
    """Free the blocks past each new length; how many were freed per row, `[B]` int64."""
    new_lens = (params.old_lens - params.rewind_lengths).tolist()
    freed = [
        params.cache.truncate(slot, length) for slot, length in zip(params.batch_slots.tolist(), new_lens, strict=True)
    ]
    if os.environ.get("EAGLE3_KV_DEBUG"):
        log.info(
            "[EAGLE][KVRewind] slots %s new lengths %s freed blocks %s", params.batch_slots.tolist(), new_lens, freed
        )
    return torch.tensor(freed, dtype=torch.int64)


def cleared_block_range(old_len: int, new_len: int, block_size: int) -> range:
    """Logical block indices a rewind from `old_len` to `new_len` tokens clears."""
    return range(blocks_for(new_len, block_size), blocks_for(old_len, block_size))
