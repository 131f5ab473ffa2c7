"""Paged key/value cache: fixed blocks, one table row a slot.

A slot's logical length lives in `DecodeState`; this file owns which physical block holds which part of a sequence.
Source: Kwon et al., arXiv 2309.06180; docs/requirements.md R-64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.errors import InvariantViolated
from eagle3core.geometry import BlockGeometry


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Blocks that hold `n_tokens`."""
    return -(-n_tokens // block_size)


class PagedCache:
    """Keys and values of every layer, `[layers, n_blocks, K, block, D]`, and the block tables `[slots, M]` int32.

    Blocks are taken from a free list as sequences grow and returned when they shrink or leave.
    """

    def __init__(
        self,
        geometry: BlockGeometry,
        *,
        n_layers: int,
        n_slots: int,
        max_tokens: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.blocks_per_slot = blocks_for(max_tokens, block_size)
        n_blocks = n_slots * self.blocks_per_slot
        shape = (n_layers, n_blocks, geometry.n_kv_heads, block_size, geometry.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.block_tables = torch.full((n_slots, self.blocks_per_slot), -1, dtype=torch.int32, device=device)
        self.free_blocks = list(range(n_blocks - 1, -1, -1))
        self.held: list[list[int]] = [[] for _ in range(n_slots)]

    def reserve(self, slot: int, n_tokens: int) -> None:
        """Give `slot` zeroed blocks for `n_tokens` tokens, keeping those it has.

        Raises:
            InvariantViolated: more tokens than a slot may hold, or the pool is empty; admission should prevent both.
        """
        wanted = blocks_for(n_tokens, self.block_size)
        held = self.held[slot]
        if wanted > self.blocks_per_slot or wanted - len(held) > len(self.free_blocks):
            raise InvariantViolated(
                f"slot {slot} asks for {wanted} KV blocks ({n_tokens} tokens) with {len(self.free_blocks)} free",
                f"at most {self.blocks_per_slot} blocks a slot, from the free list",
                "report this: admission let a request in that does not fit",
            )
        while len(held) < wanted:
            block = self.free_blocks.pop()
            # Rows not written yet get weight 0 in attention, which an infinity of the last owner would turn into NaN.
            self.k[:, block] = 0
            self.v[:, block] = 0
            self.block_tables[slot, len(held)] = block
            held.append(block)

    def truncate(self, slot: int, n_tokens: int) -> int:
        """Return the blocks past `n_tokens` tokens to the pool; how many blocks that freed."""
        kept = blocks_for(n_tokens, self.block_size)
        held = self.held[slot]
        freed = held[kept:]
        del held[kept:]
        if freed:
            self.block_tables[slot, kept : kept + len(freed)] = -1
            self.free_blocks.extend(reversed(freed))
        return len(freed)

    def view(self, slots: Tensor) -> CacheView:
        """The cache as the rows `slots: [B]` int64 of a batch see it."""
        return CacheView(self, self.block_tables[slots])

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.k.numel() * self.k.element_size()


class CacheView:
    """A batch's window on a `PagedCache`: its own block-table rows over the shared blocks."""

    def __init__(self, cache: PagedCache, block_tables: Tensor) -> None:
        self.cache = cache
        self.block_tables = block_tables

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[n_blocks, K, block, D]` of one layer."""
        return self.cache.k[layer], self.cache.v[layer]

    def write(self, layer: int, starts: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> None:
        """Store `k, v: [B, T, K, D]` at tokens starts + 0..T-1 (`starts: [B]`), rows of `valid: [B, T]` only."""
        tokens = starts[:, None] + torch.arange(valid.shape[1], device=starts.device)
        block, offset = self._locate(tokens, valid)
        self.cache.k[layer, block, :, offset] = k[valid]
        self.cache.v[layer, block, :, offset] = v[valid]

    def read(self, layer: int, row: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Contiguous keys and values `[n_tokens, K, D]` of one sequence of the batch."""
        tokens = torch.arange(n_tokens, device=self.block_tables.device)[None]
        block, offset = self._locate(tokens, torch.ones_like(tokens, dtype=torch.bool), row)
        return self.cache.k[layer, block, :, offset], self.cache.v[layer, block, :, offset]

    def move(self, starts: Tensor, sources: Tensor, valid: Tensor) -> None:
        """Copy rows starts + sources[:, i] to starts + i in every layer (`sources, valid: [B, P]`).

        Keeps the accepted path of a tree as one contiguous run. A chain moves nothing, since its path is 0, 1, 2, ...
        """
        moved = valid & (sources != torch.arange(sources.shape[1], device=sources.device))
        if not bool(moved.any()):
            return
        source_block, source_offset = self._locate(starts[:, None] + sources, moved)
        target = starts[:, None] + torch.arange(sources.shape[1], device=sources.device)
        block, offset = self._locate(target, moved)
        for pages in (self.cache.k, self.cache.v):
            # Advanced indexing copies the sources before anything is written, so overlapping paths are safe.
            pages[:, block, :, offset] = pages[:, source_block, :, source_offset]

    def _locate(self, tokens: Tensor, valid: Tensor, row: int | None = None) -> tuple[Tensor, Tensor]:
        """Physical block and offset of each valid token index, flattened."""
        size = self.cache.block_size
        tables = self.block_tables if row is None else self.block_tables[row : row + 1]
        clamped = (tokens // size).clamp(0, tables.shape[1] - 1)
        blocks = tables.gather(1, clamped).long()[valid]
        if bool((blocks < 0).any()):
            raise InvariantViolated(
                "a KV row falls in a block the slot does not hold",
                "rows inside the reserved blocks",
                "report this: the step reserved too few blocks",
            )
        return blocks, (tokens % size)[valid]
