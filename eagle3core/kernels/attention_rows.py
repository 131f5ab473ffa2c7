"""Attention kernel for more than 32 query rows a key head: warps own 16 rows each and share every unit of keys.

A block owns one (sequence, key head), up to 16 `warps` rows and `run` splits. Its warps copy units into one ring and
walk the streams of a split one after the other; when a stream ends, a warp joins its sums to those of the split, in
registers. The order is that of `attention_streams`, so the bits are too; slots are laid out in the same way.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention_layout import (
    BLOCK_SHIFT,
    FLOOR,
    TILE_EXECUTED,
    TILE_MASK_EMPTY,
    TILE_SPAN_EMPTY,
    TILE_TOTAL,
    UNIT,
    Shape,
    make_load_queries,
    make_span,
    make_walk,
)
from eagle3core.kernels.attention_tile import make_join, make_steps


def rows_shared_bytes(shape: Shape, units: int, stages: int) -> int:
    """Dynamic shared memory of a block, bytes: the ring."""
    return stages * units * shape.unit_bytes


def make_attention_rows(
    isa: Any, *, shape: Shape, warps: int, units: int, stages: int, counting: bool, overlap: bool
) -> Any:
    """The kernel; grid (row blocks * blocks of `run` splits, key heads, sequences).

    Args:
        warps: warps of a block, 16 rows each; 4 * pieces / warps copies of a unit fall to each.
        units: units between two barriers of the block, a power of two.
        stages: such groups of units in the ring, at least 2.
        counting, overlap: as in `attention_streams`.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    wait_stage, wait_all = isa.COPY_WAIT[stages - 2], isa.COPY_WAIT[0]
    first_of, advance = make_walk(isa, shape)
    span, load_queries, weigh = make_span(isa), make_load_queries(isa, shape), make_join(isa)
    score, hide, raise_tops, add_values = make_steps(isa, shape, tiles=1, half=False, q_in_registers=True)

    group, dim, pieces, splits, streams = shape.group, shape.dim, shape.pieces, shape.splits, shape.streams
    zero = np.float32(0)
    half_bytes, unit_bytes, row_bytes = shape.half_bytes, shape.unit_bytes, 2 * dim
    head_bytes, ring_bytes, ahead = row_bytes << BLOCK_SHIFT, stages * units * unit_bytes, (stages - 1) * units
    copies = 4 * pieces // warps
    piece_shift = pieces.bit_length() - 1
    n_queries, n_columns = 8 * pieces, dim // 8
    n_accumulators = 4 * n_columns

    def copy_unit(
        slot: Any, block: Any, unit: Any, k: Any, v: Any, end: Any, head_at: Any, pool: Any, lane: Any, warp: Any
    ) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        first = i32(unit * UNIT)
        source = i64(block) * pool + head_at + i64(i32((first & 63) + g)) * row_bytes + t * 16
        for c in range(copies):
            # Piece numbers: keys of both halves, then values of both halves.
            piece = i32(warp + c * warps)
            h, j = i32((piece >> piece_shift) & 1), i32(piece & (pieces - 1))
            size = i32(0)  # keys past the end become zeros: 0 * NaN would spoil the sums
            if first + g + h * 8 < end:
                size = i32(16)
            at, tensor = i32(slot + piece * 512 + lane * 16), k
            if piece >= 2 * pieces:
                at, tensor = i32(slot + piece * 512 + g * 64 + ((t ^ (g >> 1)) << 4)), v
            isa.copy16_fill(at, tensor + source + i32(h * (8 * row_bytes) + j * 64), size)

    def fold_row(
        far: Any, accumulators: Any, tops: Any, sums: Any, totals: Any, total_tops: Any, total_sums: Any, scale: Any
    ) -> None:
        total = sums[far]
        total = total + isa.shuffle_xor_f32(total, 1)
        total = total + isa.shuffle_xor_f32(total, 2)
        high, keep, take = weigh(total_tops[far], tops[far], scale)
        total_tops[far] = high
        total_sums[far] = isa.fused(total_sums[far], keep, isa.product(total, take))
        tops[far] = FLOOR
        sums[far] = zero
        for n in range(n_columns):
            for e in range(2):
                o = n * 4 + far * 2 + e
                totals[o] = isa.fused(totals[o], keep, isa.product(accumulators[o], take))
                accumulators[o] = zero

    def store_row(
        far: Any, partial: Any, tops_sums: Any, first_row: Any, row: Any, rows: Any, totals: Any, total_tops: Any,
        total_sums: Any, t: Any,
    ) -> None:  # fmt: skip
        if row < rows:
            target = partial + (first_row + row) * (4 * dim) + t * 8
            if total_sums[far] > zero:  # sums of no key are not read
                for n in range(n_columns):
                    isa.store_f32x2(target + n * 32, totals[n * 4 + far * 2], totals[n * 4 + far * 2 + 1])
            if t == 0:
                isa.store_f32x2(tops_sums + (first_row + row) * 8, total_tops[far], total_sums[far])
        total_tops[far] = FLOOR
        total_sums[far] = zero

    copy_unit, fold_row, store_row = isa.inlined(copy_unit), isa.inlined(fold_row), isa.inlined(store_row)

    def attention_rows(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        g, t = i32(lane >> 2), i32(lane & 3)
        kv_head, b, n_kv = i32(cuda.blockIdx.y), i32(cuda.blockIdx.z), i32(cuda.gridDim.y)
        rows = i32(tokens * group)
        row_blocks = i32((rows + (16 * warps - 1)) // (16 * warps))
        part = i32(cuda.blockIdx.x // row_blocks)
        row0 = i32((cuda.blockIdx.x - part * row_blocks) * (16 * warps) + warp * 16)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ctx = isa.load_u32(prefix + b * 4)
        end, n_units, first_unit, seen_by_all = span(ctx, tokens, window)
        table = tables + i64(b) * table_width * 4
        pool, head_at = i64(n_kv) * head_bytes, i64(kv_head) * head_bytes

        stream = i32(part * run * streams)
        last_stream = i32(min((part + 1) * run, splits) * streams)
        unit = first_of(stream, first_unit)
        loading, next_unit = advance(stream, i32(unit - splits * streams), 1, last_stream, first_unit, n_units)
        if overlap:
            isa.let_next_start()
        for slot in range(ahead):
            if loading < last_stream:
                if overlap and next_unit * UNIT + UNIT > ctx:
                    isa.wait_previous()  # keys of this step; older ones were there before
                block = isa.load_u32(table + (next_unit >> 2) * 4)
                copy_unit(i32(base + slot * unit_bytes), block, next_unit, k, v, end, head_at, pool, lane, warp)
                loading, next_unit = advance(loading, next_unit, 1, last_stream, first_unit, n_units)
            if (slot + 1) % units == 0:
                isa.copy_commit()
        if overlap:
            isa.wait_previous()

        # Units and blocks of the next group of copies, looked up one group ahead.
        blocks, ahead_units = cuda.local.array(units, i32), cuda.local.array(units, i32)
        for u in range(units):
            blocks[u], ahead_units[u] = i32(0), i32(-1)
            if loading < last_stream:
                blocks[u], ahead_units[u] = isa.load_u32(table + (next_unit >> 2) * 4), next_unit
                loading, next_unit = advance(loading, next_unit, 1, last_stream, first_unit, n_units)

        queries = cuda.local.array(n_queries, i32)
        for j in range(pieces):
            load_queries(q, queries, j, b, kv_head, n_kv, tokens, row0, lane, j)
        accumulators, totals = cuda.local.array(n_accumulators, f32), cuda.local.array(n_accumulators, f32)
        tops, sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
        total_tops, total_sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for i in range(n_accumulators):
            accumulators[i] = zero
            totals[i] = zero
        for i in range(2):
            tops[i] = FLOOR
            total_tops[i] = FLOOR
            sums[i] = zero
            total_sums[i] = zero
        scores = cuda.local.array(8, f32)
        executed, mask_empty = i32(0), i32(0)
        mask = masks + i64(b * tokens) * (((tokens + 31) >> 5) * 4)
        positions = all_positions + i64(b * tokens) * 4
        k_lane = i32(lane * 16)
        v_row = i32(half_bytes + ((lane >> 3) & 1) * (pieces * 512) + (lane & 7) * 64)
        v_even = i32(v_row + (((lane >> 4) ^ ((lane & 7) >> 1)) << 4))
        v_odd = i32(v_row + (((2 + (lane >> 4)) ^ ((lane & 7) >> 1)) << 4))
        reading, writing = i32(base), i32(base + ahead * unit_bytes)
        count = i32(0)
        while stream < last_stream:
            if unit < n_units:
                if (count & (units - 1)) == 0:
                    wait_stage()
                    cuda.syncthreads()
                    for u in range(units):
                        if ahead_units[u] >= 0:
                            at = i32(writing + u * unit_bytes)
                            copy_unit(at, blocks[u], ahead_units[u], k, v, end, head_at, pool, lane, warp)
                        ahead_units[u] = i32(-1)
                        if loading < last_stream:
                            blocks[u], ahead_units[u] = isa.load_u32(table + (next_unit >> 2) * 4), next_unit
                            loading, next_unit = advance(loading, next_unit, 1, last_stream, first_unit, n_units)
                    isa.copy_commit()
                    writing = i32(writing + units * unit_bytes)
                    if writing == base + ring_bytes:
                        writing = base
                count = i32(count + 1)
                if row0 < rows:
                    score(scores, queries, 0, i32(reading + k_lane))
                    first, sees = i32(unit * UNIT), i32(1)
                    if first + UNIT > ctx or first < seen_by_all:
                        sees = isa.any_lane(hide(scores, first, row0, tokens, ctx, end, window, mask, positions, lane))
                    if sees != 0:
                        raise_tops(scores, accumulators, tops, sums, scale)
                        values_even, values_odd = i32(reading + v_even), i32(reading + v_odd)
                        add_values(scores, accumulators, tops, sums, values_even, values_odd, scale)
                    if counting:
                        executed = i32(executed + sees)
                        mask_empty = i32(mask_empty + 1 - sees)
                unit = i32(unit + splits * streams)
                reading = i32(reading + unit_bytes)
                if reading == base + ring_bytes:
                    reading = base
            if unit >= n_units:  # the stream has ended, perhaps before it began
                fold_row(0, accumulators, tops, sums, totals, total_tops, total_sums, scale)
                fold_row(1, accumulators, tops, sums, totals, total_tops, total_sums, scale)
                stream = i32(stream + 1)
                if (stream & (streams - 1)) == 0:  # and with it the split
                    split = i32(stream // streams - 1)
                    first_row = ((i64(b) * n_kv + kv_head) * splits + split) * rows
                    row = i32(row0 + g)
                    store_row(0, partial, tops_sums, first_row, row, rows, totals, total_tops, total_sums, t)
                    store_row(
                        1, partial, tops_sums, first_row, i32(row0 + g + 8), rows, totals, total_tops, total_sums, t
                    )
                    for i in range(n_accumulators):
                        totals[i] = zero
                unit = first_of(stream, first_unit)
        wait_all()
        if counting and lane == 0 and row0 < rows:
            isa.atomic_add_i32(counters + 4 * TILE_EXECUTED, executed)
            isa.atomic_add_i32(counters + 4 * TILE_MASK_EMPTY, mask_empty)
            if part == 0:
                held = i32(max(n_units - first_unit, 0))
                isa.atomic_add_i32(counters + 4 * TILE_TOTAL, i32(table_width * 4))
                isa.atomic_add_i32(counters + 4 * TILE_SPAN_EMPTY, i32(table_width * 4 - held))

    return attention_rows
