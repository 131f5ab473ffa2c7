"""How a block of the GEMM ends: its sums lie down, and the epilogue walks over them.

The multiplying lanes leave a block's sums in shared memory by row and column, [tile][x row][16 rows of W], the lower
rows of pairs first. Where four blocks share K they leave them in a workspace instead, as each lane holds them, [tile]
[8 x rows][lane][4]; then all four streams are added in order, by the block that finishes last or, `together`, by the
four blocks, a quarter of the tiles each, once all have arrived. Waiting for others is safe only where all four are
surely on the GPU at once; see `gemm`.

Source: derived here; the hand-over after Stream-K, Osama et al., arXiv 2301.03598.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue, make_fetch, make_opened
from eagle3core.kernels.gemm.finish import make_finish
from eagle3core.kernels.gemm.fp8.operands import make_fetch_scales
from eagle3core.kernels.gemm.products import STREAMS

PITCH = 20  # words from one x row's sums to the next in shared memory: 16, and 4 so that lanes meet in no bank
_FRAGMENTS = 2  # pieces of 16 rows of W by 8 of x that a warp holds at once, so that their operands' loads overlap
_SHIFT = 22  # piece / x_tiles as (piece * ceil(2^22 / x_tiles)) >> 22: exact for all blocks that fit shared memory


def sums_bytes(x_tiles: int, w_tiles: int) -> int:
    """Shared memory of a block's sums."""
    return 4 * PITCH * 8 * x_tiles * w_tiles


def make_leave(isa: Any, x_tiles: int, split: int) -> Any:
    """Inlined `leave(base, own_sums, tile, m, g, t, d0, d1, d2, d3)`: one fragment of the sums, 16 rows of W by 8 of x.

    They go to shared memory at `base`, or with `split` to the workspace at `own_sums`.
    """
    i32 = isa.i32
    tile_words = PITCH * 8 * x_tiles

    def leave(
        base: Any, own_sums: Any, tile: Any, m: Any, g: Any, t: Any, d0: Any, d1: Any, d2: Any, d3: Any
    ) -> None:  # fmt: skip
        if split == 1:
            # Words t 2 PITCH + g = 40 t + g: 32 different banks over the lanes of a warp.
            at = i32((tile * tile_words + (m * 8 + t * 2) * PITCH + g) * 4)
            isa.shared_store_f32(i32(base + at), d0)
            isa.shared_store_f32(i32(base + at + 4 * PITCH), d1)
            isa.shared_store_f32(i32(base + at + 32), d2)
            isa.shared_store_f32(i32(base + at + 4 * PITCH + 32), d3)
        else:
            isa.store_f32x4(own_sums + i32(((tile * x_tiles + m) * 32 + g * 4 + t) * 16), d0, d1, d2, d3)

    return isa.inlined(leave)


def make_hand_over(isa: Any, split: int, threads: int = 0, *, together: bool = False) -> Any:
    """Inlined `hand_over(base, flag_at, counter, tid)`: whether this block has to walk over the sums.

    The first `threads` of the block call it, by default all.
    """
    cuda, i32 = isa.cuda, isa.i32

    def meet() -> None:
        if threads > 0:
            isa.named_barrier(1, threads)
        else:
            cuda.syncthreads()

    meet = isa.inlined(meet)

    def hand_over(base: Any, flag_at: Any, counter: Any, tid: Any) -> Any:
        walks = i32(1)
        if split > 1:
            # Every thread's sums are ordered before its arrival at the barrier, the barrier before the count of thread
            # 0.
            isa.fence_gpu()
            meet()
            if tid == 0:
                if together:
                    # Counted twice: the fourth to come says that all sums are there; the eighth, that nobody waits any
                    # more, leaves the counter at 0 for the next launch.
                    isa.count_round(counter, i32(2 * split - 1))
                    isa.wait_count(counter, i32(split))
                else:
                    arrived = isa.atomic_add_i32(counter, i32(1))
                    if arrived == split - 1:
                        isa.store_u32(counter, i32(0))  # ready for the next launch
                    isa.shared_store_u32(i32(base + flag_at), arrived)
            meet()
            if not together and isa.shared_load_u32(i32(base + flag_at)) != split - 1:
                walks = i32(0)
            # What the other blocks left is read after this, and past L1, which does not see their writes.
            isa.fence_gpu()
            # Behind the fence, which would wait for it.
            if together and tid == 0:
                isa.count_round(counter, i32(2 * split - 1))
        meet()
        return walks

    return isa.inlined(hand_over)


def make_walk(
    isa: Any,
    *,
    dtype: str,
    epilogue: Epilogue,
    x_tiles: int,
    w_tiles: int,
    threads: int,
    split: int,
    scale_at: int,
    together: bool = False,
    scales_rows: bool = False,
) -> Any:
    """Inlined walk of a block's threads over its items (x row, pair of a tile): adds streams, runs the epilogue.

    A warp takes 16 rows of W by 8 of x at a time, a lane one pair of two x rows. `part` is the quarter of the tiles
    that this block finishes where the four finish `together`, else 0. `scales_rows`: W is in e4m3, with
    `scales`, one a row.
    """
    cuda, i32, f32 = isa.cuda, isa.i32, isa.f32
    fetch, finish = make_fetch(isa, epilogue), make_finish(isa, epilogue, dtype)
    opened, _ = make_opened(isa, epilogue, dtype)
    scaled, zero = epilogue.quads > 0, np.float32(0)
    fetch_scales = make_fetch_scales(isa, epilogue)
    warps, pieces = threads // 32, x_tiles * w_tiles // (split if together else 1)
    rounds, items = -(-pieces // (_FRAGMENTS * warps)), 2 * _FRAGMENTS
    n_held, n_scales = 6 * items, 2 * items
    inverse = -(-(1 << _SHIFT) // x_tiles)
    stream_bytes = 4 * 128 * x_tiles * w_tiles

    def walk(
        base: Any, block_sums: Any, part: Any, tid: Any, row0: Any, tile0: Any, tiles: Any, rows: Any, n: Any,
        bias: Any, gain: Any, residual: Any, positions: Any, slots: Any, table: Any, q_heads: Any, kv_heads: Any,
        y: Any, second: Any, third: Any, ordered: Any, scales: Any,
    ) -> None:  # fmt: skip
        held, held_slot = cuda.local.array(n_held, i32), cuda.local.array(items, i32)
        v0s, v1s = cuda.local.array(items, f32), cuda.local.array(items, f32)
        if scales_rows:
            held_scales = cuda.local.array(n_scales, f32)
        local_rows, item_tiles, item_rows = (
            cuda.local.array(items, i32), cuda.local.array(items, i32), cuda.local.array(items, i32),
        )  # fmt: skip
        pair, t = i32(tid & 7), i32((tid >> 3) & 3)
        for r in range(rounds):
            for j in range(_FRAGMENTS):
                own = i32((tid >> 5) + (r * _FRAGMENTS + j) * warps)
                has_piece = own < pieces
                if not has_piece:
                    own = i32(0)
                piece = i32(own + part * pieces)
                # A division by a number known when the kernel is compiled, in 32 bits.
                tile = i32(i32(piece * inverse) >> _SHIFT)
                first_row = i32((piece - tile * x_tiles) * 8 + t * 2)
                for e in range(2):
                    i = j * 2 + e
                    local_rows[i], item_tiles[i] = i32(first_row + e), i32(tile0 + tile)
                    item_rows[i] = i32(row0 + first_row + e)
                    if item_tiles[i] >= tiles or not has_piece:
                        item_rows[i] = i32(rows)
                    # All operands and sums of a round are asked for before the first is used: their waits run together.
                    fetched = fetch(
                        item_tiles[i], pair, item_rows[i], rows, n, bias, gain, residual, positions, slots, table
                    )  # fmt: skip
                    for c in range(6):
                        held[i * 6 + c] = fetched[0][c]
                    held_slot[i] = fetched[1]
                    if scales_rows:
                        held_scales[2 * i], held_scales[2 * i + 1] = zero, zero
                        if item_rows[i] < rows:
                            held_scales[2 * i], held_scales[2 * i + 1] = fetch_scales(scales, item_tiles[i], pair, n)
                if split == 1:
                    at = i32(base + ((piece * 8 + t * 2) * PITCH + pair) * 4)
                    for e in range(2):
                        v0s[j * 2 + e] = isa.shared_load_f32(i32(at + e * (4 * PITCH)))
                        v1s[j * 2 + e] = isa.shared_load_f32(i32(at + e * (4 * PITCH) + 32))
                else:
                    at = i32((piece * 32 + pair * 4 + t) * 16)
                    v = isa.load_f32x4_l2(block_sums + at)
                    # ((s0 + s1) + s2) + s3, whoever of the blocks came last.
                    a0, a1, b0, b1 = v[0], v[1], v[2], v[3]
                    for s in range(1, STREAMS):
                        v = isa.load_f32x4_l2(block_sums + (s * stream_bytes + at))
                        a0, a1, b0, b1 = a0 + v[0], a1 + v[1], b0 + v[2], b1 + v[3]
                    v0s[j * 2], v0s[j * 2 + 1], v1s[j * 2], v1s[j * 2 + 1] = a0, a1, b0, b1
            for i in range(items):
                if scales_rows:
                    v0s[i], v1s[i] = (
                        isa.product(v0s[i], held_scales[2 * i]),
                        isa.product(v1s[i], held_scales[2 * i + 1]),
                    )
                scale = zero
                if scaled:
                    scale = isa.shared_load_f32(i32(base + scale_at + local_rows[i] * 4))
                operands = opened(
                    held[i * 6], held[i * 6 + 1], held[i * 6 + 2], held[i * 6 + 3], held[i * 6 + 4], held[i * 6 + 5]
                )
                finish(
                    v0s[i], v1s[i], scale, operands, held_slot[i], item_tiles[i], pair, item_rows[i], rows, n, q_heads,
                    kv_heads, y, second, third, ordered,
                )  # fmt: skip

    return isa.inlined(walk)
