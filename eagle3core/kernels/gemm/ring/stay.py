"""Blocks that stay, for up to 16 rows of x: a ring of W runs on into the block's next tiles while it finishes one.

It differs from `gemm_ring` with W by bulk copies in what follows, and in no bit. A grid has as many blocks as run at
once, and each takes every so many-th run of tiles: no block begins with an empty ring but the first, and none waits for
another to leave its processor. A stage is refilled as soon as its warp has read it, with the next tile's first where
this one's are all asked for; x of a tile's first two stages is asked for as the last two of the one before are
multiplied. The sums of the four streams have a place beside the ring, two in turn, so the block meets once a tile.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue, make_fetch, make_opened
from eagle3core.kernels.gemm.finish import make_finish
from eagle3core.kernels.gemm.fp8.operands import make_fetch_scales
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS, UNIT
from eagle3core.kernels.gemm.ring.bulk import make_half, make_next_stage, make_stage_copies
from eagle3core.kernels.gemm.scale import make_row_scale


def has_whole_turns(k: int, units: int) -> bool:
    """Whether each stream is a whole number of pairs of stages, as x in two halves of the registers asks for."""
    return k % (2 * STREAMS * UNIT * units) == 0


def make_gemm_stay(
    isa: Any, *, dtype: str, epilogue: Epilogue, x_tiles: int, w_tiles: int, units: int, stages: int, overlap: bool,
    fp8: bool = False,
) -> Any:  # fmt: skip
    """The kernel for blocks of 8 `x_tiles` rows of x and 16 `w_tiles` of packed W; grid (blocks, blocks of x rows).

    Args:
        units, stages: as of `make_gemm_ring` with `bulk`; `has_whole_turns`. overlap, fp8: as there.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    fetch, finish = make_fetch(isa, epilogue), make_finish(isa, epilogue, dtype)
    opened, _ = make_opened(isa, epilogue, dtype)
    share_of, scale_of = make_row_scale(isa, epilogue)
    scaled, fetch_scales = epilogue.quads > 0, make_fetch_scales(isa, epilogue)

    threads, zero, x_rows = 32 * STREAMS, np.float32(0), 8 * x_tiles
    tile_bytes_w = FRAGMENT if fp8 else 2 * FRAGMENT  # of a unit
    piece, x_bytes = units * tile_bytes_w, units * 2 * UNIT  # of a stage: a tile of W, a row of x
    stage_bytes = w_tiles * piece
    ring_bytes = stages * stage_bytes
    sums_at, sums_bytes = STREAMS * (ring_bytes + 8 * stages), 4 * STREAMS * 128 * x_tiles * w_tiles  # of one tile
    scale_at, stream_bytes = sums_at + 2 * sums_bytes, sums_bytes // STREAMS
    n_accumulators, n_operands = 4 * w_tiles * x_tiles, 8 * units * x_tiles
    n_items = 64 * x_tiles * w_tiles  # pairs of rows of W, by rows of x
    items = -(-n_items // threads)
    n_held, n_scales, scale_rows = 6 * items, 2 * items, x_rows // STREAMS
    unit_shift, tile_shift = units.bit_length() - 1, (64 * x_tiles).bit_length() - 1

    copy_stage, begin_barriers = make_stage_copies(isa, w_tiles=w_tiles, piece=piece, stages=stages)
    following = make_next_stage(isa, stage_bytes=stage_bytes, ring_bytes=ring_bytes)
    load_even, multiply_even = make_half(isa, dtype, x_tiles, w_tiles, units, 0, fp8)
    load_odd, multiply_odd = make_half(isa, dtype, x_tiles, w_tiles, units, 4 * units * x_tiles, fp8)

    def ask(
        target: Any, barrier: Any, at: Any, asked: Any, unasked: Any, n_steps: Any, pitch: Any, jump: Any, lane: Any
    ) -> Any:
        """The next stage of W that this warp has not asked for; behind a tile's last comes its next tile's first."""
        copy_stage(target, at, pitch, barrier, lane)
        at, asked = at + piece, i32(asked + 1)
        if asked == n_steps:
            at, asked = at + jump, i32(0)
        return at, asked, i32(unasked - 1)

    ask = isa.inlined(ask)

    def gemm_stay(
        x: Any, w: Any, sums: Any, bias: Any, gain: Any, residual: Any, positions: Any, slots: Any, table: Any,
        workspace: Any, counters: Any, y: Any, second: Any, third: Any, ordered: Any, rows: Any, n: Any, k: Any,
        tiles: Any, q_heads: Any, kv_heads: Any, inv_width: Any, eps: Any, scales: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        warp = isa.shuffle_i32(i32(tid >> 5), 0)  # so that the compiler knows it is one number for all lanes
        g, t = i32(lane >> 2), i32(lane & 3)
        apart, row0 = i32(cuda.gridDim.x * w_tiles), i32(cuda.blockIdx.y * x_rows)
        tile0 = i32(cuda.blockIdx.x * w_tiles)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring, full = i32(base + warp * ring_bytes), i32(base + STREAMS * ring_bytes + warp * (8 * stages))
        n_units = i32(k >> 5)
        # A warp has units stream n / 4 up to (stream + 1) n / 4: the order of sums.
        unit, n_steps = i32((warp * n_units) >> 2), i32(n_units >> (2 + unit_shift))
        pitch = i64(n_units) * tile_bytes_w
        at = w + (i64(tile0) * n_units + unit) * tile_bytes_w
        jump = i64(apart) * pitch - i64(n_steps) * piece
        asked, unasked, first = i32(0), i32(0), tile0
        while first < tiles:  # at most a few tens of times, where a division takes as long
            unasked, first = i32(unasked + n_steps), i32(first + apart)

        if overlap:
            isa.let_next_start()
        begin_barriers(full, lane)
        cuda.syncwarp()
        for stage in range(stages):
            if unasked > 0:
                at, asked, unasked = ask(
                    i32(ring + stage * stage_bytes), i32(full + stage * 8), at, asked, unasked, n_steps, pitch, jump,
                    lane,
                )  # fmt: skip
        if overlap:
            isa.wait_previous()  # only weights, which no kernel writes, were read before

        source_x = x + i64(row0 + g) * (i64(k) * 2) + unit * (2 * UNIT) + t * 16
        pitch_x = i64(k) * 16
        has_row, has_far = row0 + g < rows, row0 + 8 + g < rows
        operands_x = cuda.local.array(n_operands, i32)
        for i in range(n_operands):
            operands_x[i] = i32(0)  # and so they stay where there is no row
        load_even(operands_x, source_x, pitch_x, has_row, has_far)
        load_odd(operands_x, source_x + x_bytes, pitch_x, has_row, has_far)
        shares = cuda.local.array(scale_rows, f32)
        if scaled:
            for j in range(scale_rows):
                shares[j] = share_of(sums, i32(row0 + warp + j * STREAMS), rows, lane)

        held, held_slot = cuda.local.array(n_held, i32), cuda.local.array(items, i32)
        held_scales = cuda.local.array(n_scales, f32)
        accumulators = cuda.local.array(n_accumulators, f32)
        reading, barrier, parity, place = i32(0), i32(0), i32(0), i32(base + sums_at)
        own, is_first = i32(ring + lane * 16), i32(1)
        while tile0 < tiles:
            # Operands of the epilogue are asked for now, so that they have arrived when the sums are ready.
            for j in range(items):
                item = i32(tid + j * threads)
                row, tile = i32(row0 + ((item >> 3) & (x_rows - 1))), i32(tile0 + (item >> tile_shift))
                if item >= n_items:
                    row = i32(rows)  # a thread without an item fetches nothing
                fetched = fetch(tile, i32(item & 7), row, rows, n, bias, gain, residual, positions, slots, table)
                for c in range(6):
                    held[j * 6 + c] = fetched[0][c]
                held_slot[j] = fetched[1]
                if fp8 and item < n_items:
                    held_scales[2 * j], held_scales[2 * j + 1] = fetch_scales(scales, tile, i32(item & 7), n)
            for i in range(n_accumulators):
                accumulators[i] = zero
            left, at_x = n_steps, source_x + 2 * x_bytes
            while left > 0:
                isa.mbarrier_wait(i32(full + barrier), parity)
                multiply_even(accumulators, operands_x, i32(own + reading))
                # Other lanes may still be reading this stage: they meet before it is filled again.
                if unasked > 0:
                    cuda.syncwarp()
                    at, asked, unasked = ask(
                        i32(ring + reading), i32(full + barrier), at, asked, unasked, n_steps, pitch, jump, lane
                    )
                if left == 2:
                    at_x = source_x  # of the next tile: the same rows from the stream's beginning
                load_even(operands_x, at_x, pitch_x, has_row, has_far)
                reading, barrier, parity = following(reading, barrier, parity)
                isa.mbarrier_wait(i32(full + barrier), parity)
                multiply_odd(accumulators, operands_x, i32(own + reading))
                if unasked > 0:
                    cuda.syncwarp()
                    at, asked, unasked = ask(
                        i32(ring + reading), i32(full + barrier), at, asked, unasked, n_steps, pitch, jump, lane
                    )
                load_odd(operands_x, at_x + x_bytes, pitch_x, has_row, has_far)
                reading, barrier, parity = following(reading, barrier, parity)
                left, at_x = i32(left - 2), at_x + 2 * x_bytes

            # The streams' sums meet: [stream][tile][x row][16 rows of W], pieces of two rows as in `gemm_ring`. Whoever
            # leaves sums of the tile after next here has met those who read these at the next tile's meeting.
            for r in range(w_tiles):
                for m in range(x_tiles):
                    q = (r * x_tiles + m) * 4
                    to = i32(place + warp * stream_bytes + ((r * x_rows + m * 8 + t * 2) * 16 + g) * 4)
                    isa.shared_store_f32(i32(to + (t << 5)), accumulators[q])
                    isa.shared_store_f32(i32(to + ((t ^ 2) << 5)), accumulators[q + 1])
                    isa.shared_store_f32(i32(to + ((t ^ 1) << 5)), accumulators[q + 2])
                    isa.shared_store_f32(i32(to + ((t ^ 3) << 5)), accumulators[q + 3])
            if scaled and is_first != 0:
                for j in range(scale_rows):
                    scale = scale_of(shares[j], inv_width, eps)
                    if lane == 0:
                        isa.shared_store_f32(i32(base + scale_at + (warp + j * STREAMS) * 4), scale)
            is_first = i32(0)
            cuda.syncthreads()
            for j in range(items):
                item = i32(tid + j * threads)
                if item < n_items:
                    local_row, pair = i32((item >> 3) & (x_rows - 1)), i32(item & 7)
                    own_piece = i32(((item >> 4) & 3) ^ ((item >> 2) & 2))
                    lower = i32(place + ((item >> 4) * 32 + own_piece * 8 + pair) * 4)
                    upper = i32(lower + 32 - ((own_piece & 1) << 6))
                    # ((s0 + s1) + s2) + s3, as in every kernel of the GEMM.
                    v0, v1 = isa.shared_load_f32(lower), isa.shared_load_f32(upper)
                    for s in range(1, STREAMS):
                        v0 = v0 + isa.shared_load_f32(i32(lower + s * stream_bytes))
                        v1 = v1 + isa.shared_load_f32(i32(upper + s * stream_bytes))
                    if fp8:
                        v0, v1 = isa.product(v0, held_scales[2 * j]), isa.product(v1, held_scales[2 * j + 1])
                    scale = zero
                    if scaled:
                        scale = isa.shared_load_f32(i32(base + scale_at + local_row * 4))
                    operands = opened(
                        held[j * 6], held[j * 6 + 1], held[j * 6 + 2], held[j * 6 + 3], held[j * 6 + 4], held[j * 6 + 5]
                    )
                    finish(
                        v0, v1, scale, operands, held_slot[j], i32(tile0 + (item >> tile_shift)), pair,
                        i32(row0 + local_row), rows, n, q_heads, kv_heads, y, second, third, ordered,
                    )  # fmt: skip
            tile0, place = i32(tile0 + apart), i32(2 * (base + sums_at) + sums_bytes - place)

    return gemm_stay
