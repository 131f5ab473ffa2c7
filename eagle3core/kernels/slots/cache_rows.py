"""Kernel pieces of the cards that open work: a slot's row of the block table, and where a token lies in the cache.

Token n of a slot lies in cache row table[n / block] block + n mod block; -1 where the table has no block for it.
Source: docs/requirements.md R-46; paging after Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eagle3core.errors import KernelLimit

THREADS = 64
COPIED = 4  # block-table entries a thread copies, all under way at once


def parts_of(n: int, per_thread: int = 1) -> int:
    """Blocks of `THREADS` that handle n items."""
    return -(-n // (THREADS * per_thread))


def check_block(block: int) -> None:
    """Places are found by shifts.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    if block < 1 or block & (block - 1):
        raise KernelLimit(f"block size is {block}", "a power of two", "set block_size=64")


def place_in(tables: Tensor, tokens: Tensor, block: int) -> Tensor:
    """Cache row of `tokens: [B, n]` under `tables: [B, M]`, -1 where no block holds it."""
    entry = tokens // block
    held = tables.gather(1, entry.clamp(0, tables.shape[1] - 1).long())
    is_held = (entry < tables.shape[1]) & (held >= 0)
    return (held * block + tokens % block).where(is_held, -1)


def make_look_up(isa: Any, block: int) -> Any:
    """`look_up(table, token, entries)`: the block that holds the token, -1 for none."""
    i32, i64, shift = isa.i32, isa.i64, block.bit_length() - 1

    def look_up(table: Any, token: Any, entries: Any) -> Any:
        held = i32(-1)
        if i32(token >> shift) < entries:
            held = isa.load_u32(table + i64(token >> shift) * 4)
        return held

    return isa.inlined(look_up)


def make_row_in(isa: Any, block: int) -> Any:
    """`row_in(held, token)`: the token's cache row in the block `held`, -1 if that is -1."""
    i32, shift = isa.i32, block.bit_length() - 1

    def row_in(held: Any, token: Any) -> Any:
        row = i32(-1)
        if held >= 0:
            row = i32((held << shift) + (token & (block - 1)))
        return row

    return isa.inlined(row_in)


def make_copy_table(isa: Any) -> Any:
    """`copy_table(source, target, entries, part, slot)`: a block's part of a table's row, of -1 for a slot below 0."""
    i32, i64 = isa.i32, isa.i64

    def copy_table(source: Any, target: Any, entries: Any, part: Any, slot: Any) -> None:
        held = isa.cuda.local.array(COPIED, i32)
        first, known = i32(part * (THREADS * COPIED) + isa.cuda.threadIdx.x), entries
        if slot < 0:
            known = i32(0)
        for p in range(COPIED):
            held[p] = i32(-1)
            if first + p * THREADS < known:
                held[p] = isa.load_u32(source + i64(first + p * THREADS) * 4)
        for p in range(COPIED):
            if first + p * THREADS < entries:
                isa.store_u32(target + i64(first + p * THREADS) * 4, held[p])

    return isa.inlined(copy_table)
