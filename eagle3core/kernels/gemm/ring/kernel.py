"""Small-M GEMM kernel, sums of x W^T for up to 16 rows of x: every lane feeds itself.

Weight rows are the m16 operand of mma.m16n8k16, x rows the n8 operand. The k order inside 32 is permuted so that the 16
bytes which a lane copies are the operands of that same lane: no ldmatrix, no transposition, and each warp's ring of
stages needs no barrier, only its own wait for copies. Four warps divide K. Where bulk copies exist and stages are
whole, one copy brings a warp's stage of W instead (`bulk`): a third of the instructions less. With `sharers` a stream
has several warps, which share x and meet once a stage.

The order in which a result is summed, the same for every kernel of the GEMM: K is cut into `STREAMS` contiguous ranges
of units of 32, stream s from unit s n / STREAMS; within a stream units ascend, two mma each (elements 8t..8t+3 of lane
t, then 8t+4..8t+7); the streams' sums are added as ((s0 + s1) + s2) + s3. Stages, units of a stage, rows of a block and
weight layout change nothing in it.

Source: derived here; fragment layouts from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue, make_fetch, make_opened, make_pairing
from eagle3core.kernels.gemm.finish import make_finish
from eagle3core.kernels.gemm.fp8.blocks import make_block_walk
from eagle3core.kernels.gemm.fp8.operands import make_fetch_scales
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS, UNIT, make_multiply
from eagle3core.kernels.gemm.ring.bulk import make_bulk_ring
from eagle3core.kernels.gemm.ring.lanes import make_lane_copies
from eagle3core.kernels.gemm.scale import make_row_scale


def make_gemm_ring(
    isa: Any, *, dtype: str, epilogue: Epilogue, x_tiles: int, w_tiles: int, units: int, stages: int, packed: bool,
    ragged: bool, overlap: bool, bulk: bool = False, fp8: bool = False, blocks: bool = False, paced: int = 0,
    sharers: int = 1,
) -> Any:  # fmt: skip
    """The kernel for blocks of 8 `x_tiles` rows of x and 16 `w_tiles` rows of W; grid (tiles of W, blocks of x rows).

    Args:
        units: units of 32 k of one stage, 1, 2, 4, and 8 with `bulk` of one tile of x; every stream's length must be a
            multiple.
        stages: depth of each warp's ring, 2..16.
        packed: W comes in the order of `gemm.pack_weight`.
        ragged: K is 16 more than a multiple of 32.
        overlap: wait for the kernel before (programmatic dependent launch).
        bulk: W, packed, comes by bulk copies; `x_tiles` is 1 or 2 (`bulk.holds_x`) and K not ragged.
        fp8: W, packed, is in e4m3, with `scales`: one a row, or
        blocks: of blocks of 128 k (`fp8.blocks`), with at most 4 units a stage.
        paced: of `bulk`, cycles from one request for W to the next as a block begins, by a warp more; 0: all at once.
        sharers: without `bulk`, warps of a stream, which read one copy of x and have each as many of the tiles of W.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    # A step may leave the newest stages - 2 groups of copies under way: the group of its own stage is then the newest
    # that must have landed.
    wait_stage, wait_all = isa.COPY_WAIT[stages - 2], isa.COPY_WAIT[0]
    first_row, distance = make_pairing(isa, epilogue)
    fetch, finish = make_fetch(isa, epilogue), make_finish(isa, epilogue, dtype)
    opened, _ = make_opened(isa, epilogue, dtype)
    share_of, scale_of = make_row_scale(isa, epilogue)
    scaled, fetch_scales = epilogue.quads > 0, make_fetch_scales(isa, epilogue)

    n_warps, own_tiles = STREAMS * sharers, w_tiles // sharers
    threads, zero = 32 * n_warps, np.float32(0)
    tile_bytes_w = FRAGMENT if fp8 else 2 * FRAGMENT  # of a unit, packed
    x_offset = tile_bytes_w * w_tiles * units  # x comes after W in a stage
    stage_bytes = x_offset + (0 if bulk else x_tiles) * units * FRAGMENT
    ring_bytes = stages * stage_bytes
    unit_bytes = tile_bytes_w if packed else 2 * UNIT  # from one unit of W to the next
    ahead = stages - 1
    n_accumulators, x_rows = 4 * own_tiles * x_tiles, 8 * x_tiles  # a lane holds 4 of a product's 16 x 8 sums
    block_sums = 128 * x_tiles * w_tiles
    n_items = 64 * x_tiles * w_tiles  # pairs of rows of W, by rows of x
    items = (n_items + threads - 1) // threads
    n_held, n_scales = 6 * items, 2 * items  # what `fetch` and `fetch_scales` give
    by_row, n_block_scales = fp8 and not blocks, 2 * own_tiles
    scale_rows = -(-x_rows // n_warps)
    scale_at = STREAMS * block_sums * 4
    n_operands = 8 * units * x_tiles  # x of two stages, where it goes straight to registers (`bulk`)
    unit_shift, tile_shift = units.bit_length() - 1, (64 * x_tiles).bit_length() - 1

    def meet() -> None:
        if paced:  # without the warp that asked for W
            isa.named_barrier(1, threads)
        else:
            cuda.syncthreads()

    def tile_of(r: int, part: Any) -> Any:
        return r if sharers == 1 else i32(part * own_tiles + r)

    meet, tile_of = isa.inlined(meet), isa.inlined(tile_of)
    n_pieces, piece_tile, copy_w, copy_x = make_lane_copies(
        isa, x_tiles=x_tiles, w_tiles=own_tiles, units=units, packed=packed, ragged=ragged, fp8=fp8,
        x_offset=x_offset, sharers=sharers,
    )  # fmt: skip
    start_w, start_paced, start_x, multiply_all = make_bulk_ring(
        isa, dtype=dtype, x_tiles=x_tiles, w_tiles=w_tiles, units=units, stages=stages, fp8=fp8,
        blocks=blocks, paced=paced,
    )  # fmt: skip
    begin_blocks, add_stage, take_blocks = make_block_walk(
        isa, blocks=blocks, units=units, x_tiles=x_tiles, w_tiles=own_tiles
    )
    n_totals = n_accumulators if blocks else 1
    multiply = make_multiply(
        isa, dtype=dtype, x_tiles=x_tiles, w_tiles=own_tiles, units=units,
        pitches=(units * FRAGMENT, units * tile_bytes_w), steps=(FRAGMENT, tile_bytes_w), fp8=fp8,
    )  # fmt: skip

    def gemm_ring(
        x: Any, w: Any, sums: Any, bias: Any, gain: Any, residual: Any, positions: Any, slots: Any, table: Any,
        workspace: Any, counters: Any, y: Any, second: Any, third: Any, ordered: Any, rows: Any, n: Any, k: Any,
        tiles: Any, q_heads: Any, kv_heads: Any, inv_width: Any, eps: Any, scales: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        g, t = i32(lane >> 2), i32(lane & 3)
        tile0, row0 = i32(cuda.blockIdx.x * w_tiles), i32(cuda.blockIdx.y * x_rows)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        if bulk:
            warp = isa.shuffle_i32(warp, 0)  # so that the compiler knows it is one number for all lanes
        stream, part, first_tile = warp, i32(0), tile0  # of this warp
        if sharers > 1:
            stream, part = i32(warp & (STREAMS - 1)), i32(warp >> 2)
            first_tile = i32(tile0 + part * own_tiles)
        ring, full = i32(base + stream * ring_bytes), i32(base + STREAMS * ring_bytes + warp * (8 * stages))
        # A fragment is 32 lanes x 16 bytes in lane order: no two lanes of a quarter warp meet in a bank, and each lane
        # reads only bytes that it copied itself.
        own = i32(ring + lane * 16)
        own_w = i32(own + part * (own_tiles * units * tile_bytes_w)) if sharers > 1 else own
        n_units = i32((k + (UNIT - 1)) >> 5)
        # A warp has units stream n / 4 up to (stream + 1) n / 4. This cut is the order of sums; all kernels share it.
        unit = i32((stream * n_units) >> 2)
        n_steps = i32(((((stream + 1) * n_units) >> 2) - unit) >> unit_shift)
        row_bytes = i64(k) * 2

        # Where this lane's pieces of W start, by tile, and how far the partner row's lie from them.
        sources = cuda.local.array(own_tiles, i64)
        for r in range(own_tiles):
            if packed:
                sources[r] = w + (i64(first_tile + r) * n_units + unit) * tile_bytes_w + lane * 16
            else:
                sources[r] = w + i64(first_row(first_tile + r) + g) * row_bytes + unit * (2 * UNIT) + t * 16
        partner = i64(FRAGMENT) if packed else i64(distance(n)) * row_bytes
        offset = i64(0)

        # The next kernel's blocks may come as soon as there is room: they too begin with copies of W.
        if overlap:
            isa.let_next_start()
        loading = unit
        if bulk:
            pitch = i64(n_units) * tile_bytes_w
            source_w = w + (i64(tile0) * n_units + unit) * tile_bytes_w
            if paced:
                go = start_paced(base, warp, full, w, tile0, n_units, tile_bytes_w, lane)
            else:
                start_w(ring, full, source_w, pitch, n_steps, lane)
        else:
            # No group is closed yet: all these copies of W belong to the group of the first stage of x below.
            for stage in range(ahead):
                if stage < n_steps:
                    copy_w(i32(own_w + stage * stage_bytes), sources, partner, offset, loading, n_units, t)
                    offset += units * unit_bytes
                    loading = i32(loading + units)
        totals, block_scales = cuda.local.array(n_totals, f32), cuda.local.array(n_block_scales, f32)
        block_walk = cuda.local.array(4, i64)
        begin_blocks(totals, block_scales, block_walk, scales, first_tile, n_units, unit)
        if overlap:
            isa.wait_previous()  # only weights, which no kernel writes, were read before
        if paced:
            if warp == STREAMS:
                return
            if tid == 0:
                isa.mbarrier_arrive(go)  # x is there: what is left of W may come at once

        # Rows of x past the last are filled with zeros, and their addresses are not read.
        sizes = cuda.local.array(n_pieces, i32)
        for j in range(n_pieces):
            sizes[j] = i32(16)
            if row0 + piece_tile(j, part) * 8 + g >= rows:
                sizes[j] = i32(0)
        source_x = x + i64(row0 + g) * row_bytes + unit * (2 * UNIT) + t * 16
        tile_bytes = row_bytes * 8
        loading, has_row, has_far = unit, row0 + g < rows, row0 + 8 + g < rows
        operands_x = cuda.local.array(n_operands, i32)
        if bulk:
            start_x(operands_x, source_x, tile_bytes, has_row, has_far, n_steps)
        else:
            for stage in range(ahead):
                if stage < n_steps:
                    copy_x(i32(own + stage * stage_bytes), source_x, tile_bytes, sizes, loading, n_units, t, part)
                    source_x += units * (2 * UNIT)
                    loading = i32(loading + units)
                # A group a stage even where there is nothing to copy: the waits below count groups.
                isa.copy_commit()

        # Operands of the epilogue are asked for now, so that they have arrived when the sums are ready.
        held = cuda.local.array(n_held, i32)
        held_slot = cuda.local.array(items, i32)
        if by_row:
            held_scales = cuda.local.array(n_scales, f32)
        for j in range(items):
            item = i32(tid + j * threads)
            row, tile = i32(row0 + ((item >> 3) & (x_rows - 1))), i32(tile0 + (item >> tile_shift))
            if item >= n_items:
                row = i32(rows)  # a thread without an item fetches nothing
            fetched = fetch(tile, i32(item & 7), row, rows, n, bias, gain, residual, positions, slots, table)
            for c in range(6):
                held[j * 6 + c] = fetched[0][c]
            held_slot[j] = fetched[1]
            if by_row and item < n_items:
                held_scales[2 * j], held_scales[2 * j + 1] = fetch_scales(scales, tile, i32(item & 7), n)
        shares = cuda.local.array(scale_rows, f32)
        if scaled:
            for j in range(scale_rows):
                row = i32(row0 + warp + j * n_warps)
                if x_rows % n_warps != 0 and warp + j * n_warps >= x_rows:
                    row = i32(rows)  # nothing is loaded of it; a branch would wait for the row before
                shares[j] = share_of(sums, row, rows, lane)

        # [tile of W][tile of x][4], of one stream; beside them a lane holds the x of a unit and one tile of its W.
        accumulators = cuda.local.array(n_accumulators, f32)
        for i in range(n_accumulators):
            accumulators[i] = zero
        if bulk:
            multiply_all(
                accumulators, operands_x, ring, full, source_w, pitch, source_x, tile_bytes, has_row, has_far, n_steps,
                lane, totals, block_scales, block_walk,
            )  # fmt: skip
        else:
            reading, writing = i32(0), i32(ahead * stage_bytes)
            for step in range(n_steps):
                # Only this lane's own copies are waited for, and no barrier follows: nobody else reads them. The stage
                # that is written next is the one read in the step before, by this lane alone. But those who share x
                # wait for each other's, and for each other to have read that stage.
                wait_stage()
                if sharers > 1:
                    isa.named_barrier(i32(stream + 1), 32 * sharers)
                if step + ahead < n_steps:
                    copy_w(i32(own_w + writing), sources, partner, offset, loading, n_units, t)
                    copy_x(i32(own + writing), source_x, tile_bytes, sizes, loading, n_units, t, part)
                    offset += units * unit_bytes
                    source_x += units * (2 * UNIT)
                    loading = i32(loading + units)
                isa.copy_commit()
                # Units upwards, two products each: within a stream this is the order of sums.
                multiply(accumulators, own + x_offset, own_w, reading)
                add_stage(accumulators, totals, block_scales, block_walk, step == n_steps - 1)
                reading = i32(reading + stage_bytes)
                if reading == ring_bytes:
                    reading = i32(0)
                writing = i32(writing + stage_bytes)
                if writing == ring_bytes:
                    writing = i32(0)
            wait_all()  # nothing may still land where the sums go next
        take_blocks(accumulators, totals)

        # The warps' sums meet in shared memory: [stream][tile][x row][16 rows of W], the lower rows of pairs first. The
        # four pieces of two rows change places from two rows to the next: no two lanes of a warp meet in a bank. All
        # warps have read their rings, which the sums overwrite.
        meet()
        for r in range(own_tiles):
            for m in range(x_tiles):
                q = (r * x_tiles + m) * 4
                # A lane's four sums: W rows g and g + 8, x rows 2t and 2t + 1.
                own_sums = stream * block_sums + tile_of(r, part) * (128 * x_tiles)
                at = i32(base + (own_sums + (m * 8 + t * 2) * 16 + g) * 4)
                isa.shared_store_f32(i32(at + (t << 5)), accumulators[q])
                isa.shared_store_f32(i32(at + ((t ^ 2) << 5)), accumulators[q + 1])
                isa.shared_store_f32(i32(at + ((t ^ 1) << 5)), accumulators[q + 2])
                isa.shared_store_f32(i32(at + ((t ^ 3) << 5)), accumulators[q + 3])
        if scaled:
            for j in range(scale_rows):
                if x_rows % n_warps == 0 or warp + j * n_warps < x_rows:
                    scale = scale_of(shares[j], inv_width, eps)
                    if lane == 0:
                        isa.shared_store_f32(i32(base + scale_at + (warp + j * n_warps) * 4), scale)
        meet()
        for j in range(items):
            item = i32(tid + j * threads)
            if item < n_items:
                local_row, pair = i32((item >> 3) & (x_rows - 1)), i32(item & 7)
                own_piece = i32(((item >> 4) & 3) ^ ((item >> 2) & 2))  # of two rows of x, where the lower sum lies
                lower = i32(base + ((item >> 4) * 32 + own_piece * 8 + pair) * 4)
                upper = i32(lower + 32 - ((own_piece & 1) << 6))
                # ((s0 + s1) + s2) + s3, as in every kernel of the GEMM.
                v0, v1 = isa.shared_load_f32(lower), isa.shared_load_f32(upper)
                for s in range(1, STREAMS):
                    v0 = v0 + isa.shared_load_f32(i32(lower + s * (block_sums * 4)))
                    v1 = v1 + isa.shared_load_f32(i32(upper + s * (block_sums * 4)))
                if by_row:
                    v0, v1 = isa.product(v0, held_scales[2 * j]), isa.product(v1, held_scales[2 * j + 1])
                scale = zero
                if scaled:
                    scale = isa.shared_load_f32(i32(base + scale_at + local_row * 4))
                operands = opened(
                    held[j * 6], held[j * 6 + 1], held[j * 6 + 2], held[j * 6 + 3], held[j * 6 + 4], held[j * 6 + 5]
                )
                tile = i32(tile0 + (item >> tile_shift))
                finish(
                    v0, v1, scale, operands, held_slot[j], tile, pair, i32(row0 + local_row), rows, n, q_heads,
                    kv_heads, y, second, third, ordered,
                )  # fmt: skip

    return gemm_ring
