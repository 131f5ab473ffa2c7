"""Scales of blocks of W (128 k by any multiple of 8 rows) in the sums of a stream.

Such a scale cannot wait for the epilogue: it changes with k. So what a stream sums of one block, its units upwards from
zero, is multiplied by that block's scale and added to what the stream has: total = fma(sum, scale, total), blocks
upwards. A stream that begins or ends within a block adds what it has of it. This is the order of sums of a map with
such scales, in every kernel; four units lie between two of its steps, so it costs next to nothing.

Source: derived here; the blocks of DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK_UNITS = 4  # units of 32 k of a block


def blocks_of(k: int) -> int:
    """Blocks of a row of W of `k` values; the last may be a shorter one."""
    return -(-k // (BLOCK_UNITS * 32))


def make_block_walk(isa: Any, *, blocks: bool, units: int, x_tiles: int, w_tiles: int) -> tuple[Any, Any, Any]:
    """Inlined `begin`, `add_stage` and `take`, of one warp and a stream after another; nothing without `blocks`.

    `begin(totals, held, walk, scales, tile, n_units, unit)`: before unit `unit`; asks for the first block's scales.
    `add_stage(accumulators, totals, held, walk, is_last)`: a stage of `units` has been multiplied; where a block or the
    stream ends with it, its sums go to the totals and are zeros again. Scales are asked for a block ahead, so nobody
    waits for them; behind the last block those of the last one.
    `take(accumulators, totals)`: the sums of the stream, and zeros in the totals.

    `accumulators` and `totals` have 4 f32 a pair of tiles, [tile of W][tile of x]; `held` 2 f32 a tile of W, the scales
    of its lower and upper eight rows; `walk` 4 int64: where the block's scales lie, those of the last, the bytes from a
    tile's to the next one's, and the next unit. All are calls and not branches of a kernel, whose code over other
    formats stays as it was.
    """
    i32, i64, fused, zero = isa.i32, isa.i64, isa.fused, np.float32(0)
    n_sums, shift, mask = 4 * x_tiles * w_tiles, BLOCK_UNITS.bit_length() - 1, BLOCK_UNITS - 1

    def load_scales(held: Any, walk: Any) -> None:
        for r in range(w_tiles):
            held[2 * r], held[2 * r + 1] = isa.load_f32x2(walk[0] + r * walk[2])

    def add_block(accumulators: Any, totals: Any, held: Any) -> None:
        for r in range(w_tiles):
            for m in range(x_tiles):
                # Of a lane's four sums the first two are of row g of W, the others of row g + 8.
                q = (r * x_tiles + m) * 4
                totals[q] = fused(accumulators[q], held[2 * r], totals[q])
                totals[q + 1] = fused(accumulators[q + 1], held[2 * r], totals[q + 1])
                totals[q + 2] = fused(accumulators[q + 2], held[2 * r + 1], totals[q + 2])
                totals[q + 3] = fused(accumulators[q + 3], held[2 * r + 1], totals[q + 3])
                for c in range(4):
                    accumulators[q + c] = zero

    load_scales, add_block = isa.inlined(load_scales), isa.inlined(add_block)

    def begin(totals: Any, held: Any, walk: Any, scales: Any, tile: Any, n_units: Any, unit: Any) -> None:
        if blocks:
            n_blocks = i64(i32((n_units + mask) >> shift))
            first = scales + i64(tile) * n_blocks * 8
            walk[1], walk[2], walk[3] = first + (n_blocks - 1) * 8, n_blocks * 8, i64(unit)
            walk[0] = min(first + i64(unit >> shift) * 8, walk[1])
            load_scales(held, walk)
            for i in range(n_sums):
                totals[i] = zero

    def add_stage(accumulators: Any, totals: Any, held: Any, walk: Any, is_last: Any) -> None:
        if blocks:
            walk[3] = walk[3] + units
            if units == BLOCK_UNITS or walk[3] & mask == 0 or is_last:
                add_block(accumulators, totals, held)
                walk[0] = min(walk[0] + 8, walk[1])
                load_scales(held, walk)

    def take(accumulators: Any, totals: Any) -> None:
        if blocks:
            for i in range(n_sums):
                accumulators[i] = totals[i]
                totals[i] = zero

    return isa.inlined(begin), isa.inlined(add_stage), isa.inlined(take)
