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


def make_block_sums(isa: Any, *, x_tiles: int, w_tiles: int) -> tuple[Any, Any]:
    """Inlined `load_scales(held, at, pitch)` and `add_block(accumulators, totals, held)`, of one warp.

    `held` has 2 f32 a tile of W, the scales of its lower and upper eight rows; a block's lie at `at`, those of the next
    tile `pitch` bytes on. They are asked for a block ahead, so nobody waits for them. `accumulators` and `totals` have
    4 f32 a pair of tiles, [tile of W][tile of x]; the former begin the next block as zeros.
    """
    fused, zero = isa.fused, np.float32(0)

    def load_scales(held: Any, at: Any, pitch: Any) -> None:
        for r in range(w_tiles):
            held[2 * r], held[2 * r + 1] = isa.load_f32x2(at + r * pitch)

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

    return isa.inlined(load_scales), isa.inlined(add_block)
