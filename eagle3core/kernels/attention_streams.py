"""Attention kernel for up to 32 query rows a key head: every warp walks a stream of its own.

A block owns one (sequence, key head) and `run` splits, one after the other. Each warp copies its stream's units into a
private ring in shared memory (16 keys and their values a slot), so the walk needs no barrier of the block; copies run
on over the end of a split into the next. At that end the warps lay their sums into their free ring slot and the block
joins them in stream order.

Slot of a unit, head size D: keys as [half of 8][64-byte piece][lane] 16 bytes, the order in which lanes read them;
values as [half of 8][piece][key][16-byte column ^ (key / 2)], which ldmatrix reads without bank conflicts.

Source: derived here; the order of sums is that of `attention_layout`.
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


def streams_shared_bytes(shape: Shape, tiles: int, stages: int) -> int:
    """Dynamic shared memory of a block, bytes: rings, queries, the table of the streams' maxima and sums."""
    return shape.streams * stages * shape.unit_bytes + tiles * shape.pieces * 1024 + 16 * tiles * shape.streams * 16


def make_attention_streams(
    isa: Any, *, shape: Shape, tiles: int, half: bool, stages: int, counting: bool, overlap: bool
) -> Any:
    """The kernel; grid (blocks of `run` splits, key heads, sequences), a warp for each stream of a split.

    Args:
        tiles: 16-row tiles, 1 or 2; tokens * group rows must fit.
        half: at most 8 rows (one tile).
        stages: units of a warp's ring, at least 2.
        counting: add up the tile counters of R-109.
        overlap: wait for the kernel before (programmatic dependent launch).
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    wait_stage, wait_all = isa.COPY_WAIT[stages - 2], isa.COPY_WAIT[0]
    first_of, advance = make_walk(isa, shape)
    span, load_queries, weigh = make_span(isa), make_load_queries(isa, shape), make_join(isa)
    in_registers = tiles == 1
    steps = make_steps(isa, shape, tiles=tiles, half=half, held=shape.pieces if tiles == 1 else 0)
    score, hide, raise_tops, add_values = steps.score, steps.hide, steps.raise_tops, steps.add_values

    group, dim, pieces, splits, streams = shape.group, shape.dim, shape.pieces, shape.splits, shape.streams
    zero, threads = np.float32(0), 32 * streams
    half_bytes, unit_bytes, row_bytes = shape.half_bytes, shape.unit_bytes, 2 * dim
    head_bytes, ring_bytes, ahead = row_bytes << BLOCK_SHIFT, stages * unit_bytes, stages - 1
    q_offset = streams * ring_bytes
    table_offset = q_offset + tiles * pieces * 1024
    n_queries = 8 * pieces if in_registers else 8
    n_columns = dim // 8
    n_accumulators, n_tops, n_scores = 4 * n_columns * tiles, 2 * tiles, 8 * tiles
    stream_shift, chunk_shift = streams.bit_length() - 1, (dim // 4).bit_length() - 1
    items = (8 if half else 16) * dim // 4  # four elements of a row each
    rounds = -(-items // threads)

    def copy_unit(
        slot: Any, block: Any, unit: Any, k: Any, v: Any, end: Any, head_at: Any, pool: Any, lane: Any
    ) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        first = i32(unit * UNIT)
        source = i64(block) * pool + head_at + i64(i32((first & 63) + g)) * row_bytes + t * 16
        keys = i32(slot + lane * 16)
        values = i32(slot + half_bytes + g * 64 + ((t ^ (g >> 1)) << 4))
        near, far = i32(0), i32(0)  # keys past the end become zeros: 0 * NaN would spoil the sums
        if first + g < end:
            near = i32(16)
        if first + g + 8 < end:
            far = i32(16)
        for j in range(pieces):
            isa.copy16_fill(i32(keys + j * 512), k + source + j * 64, near)
            isa.copy16_fill(i32(keys + (pieces + j) * 512), k + source + (8 * row_bytes + j * 64), far)
        for j in range(pieces):
            isa.copy16_fill(i32(values + j * 512), v + source + j * 64, near)
            isa.copy16_fill(i32(values + (pieces + j) * 512), v + source + (8 * row_bytes + j * 64), far)

    def lay_row(
        m: Any, far: Any, slot: Any, table: Any, warp: Any, lane: Any, accumulators: Any, tops: Any, sums: Any
    ) -> None:
        # A warp's sums go to its free slot as [row][D] f32, 16-byte columns swizzled; where that is, to the table.
        g, t = i32(lane >> 2), i32(lane & 3)
        row = i32(far * 8 + g)
        total = sums[m * 2 + far]
        total = total + isa.shuffle_xor_f32(total, 1)
        total = total + isa.shuffle_xor_f32(total, 2)
        if t == 0:
            entry = i32(table + ((m * 16 + row) * streams + warp) * 16)
            isa.shared_store_f32x4(entry, tops[m * 2 + far], total, isa.f32_of_bits(slot), zero)
        at = i32(slot + row * (4 * dim) + (t & 1) * 8)
        for n in range(n_columns):
            o = (m * n_columns + n) * 4 + far * 2
            column = i32((2 * n + (t >> 1)) ^ (2 * (g & 3)))
            isa.shared_store_f32x2(i32(at + column * 16), accumulators[o], accumulators[o + 1])

    def join_tile(
        m: Any, table: Any, tid: Any, rows: Any, first_row: Any, partial: Any, tops_sums: Any, scale: Any
    ) -> None:
        for r in range(rounds):
            item = i32(tid + r * threads)
            row, chunk = i32(item >> chunk_shift), i32(item & (dim // 4 - 1))
            if item < items and m * 16 + row < rows:
                at = i32(row * (4 * dim) + ((chunk ^ (2 * (row & 3))) << 4))
                entry = i32(table + (m * 16 + row) * (streams * 16))
                top, total, o0, o1, o2, o3 = FLOOR, zero, zero, zero, zero, zero
                for w in range(streams):
                    e = isa.shared_load_f32x4(i32(entry + w * 16))
                    a = isa.shared_load_f32x4(i32(isa.bits_of_f32(e[2]) + at))
                    top, keep, take = weigh(top, e[0], scale)
                    total = isa.fused(total, keep, isa.product(e[1], take))
                    o0 = isa.fused(o0, keep, isa.product(a[0], take))
                    o1 = isa.fused(o1, keep, isa.product(a[1], take))
                    o2 = isa.fused(o2, keep, isa.product(a[2], take))
                    o3 = isa.fused(o3, keep, isa.product(a[3], take))
                target = first_row + (m * 16 + row)
                isa.store_f32x4(partial + target * (4 * dim) + chunk * 16, o0, o1, o2, o3)
                if chunk == 0:
                    isa.store_f32x2(tops_sums + target * 8, top, total)

    copy_unit, lay_row, join_tile = isa.inlined(copy_unit), isa.inlined(lay_row), isa.inlined(join_tile)

    def attention_streams(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        kv_head, b, n_kv = i32(cuda.blockIdx.y), i32(cuda.blockIdx.z), i32(cuda.gridDim.y)
        split = i32(cuda.blockIdx.x * run)
        last_split = i32(min(split + run, splits))
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring = i32(base + warp * ring_bytes)
        ctx = isa.load_u32(prefix + b * 4)
        end, n_units, first_unit, seen_by_all = span(ctx, tokens, window)
        own_table = tables + i64(b) * table_width * 4
        pool, head_at = i64(n_kv) * head_bytes, i64(kv_head) * head_bytes

        # The loader: the next unit to ask for, ahead of the one being worked on.
        loading_end = i32(last_split * streams + warp)
        loading = i32(split * streams + warp)
        next_unit = i32(first_of(loading, first_unit) - splits * streams)
        loading, next_unit = advance(loading, next_unit, streams, loading_end, first_unit, n_units)
        if overlap:
            isa.let_next_start()
        for stage in range(ahead):
            if loading < loading_end:
                if overlap and next_unit * UNIT + UNIT > ctx:
                    isa.wait_previous()  # keys of this step; older ones were there before
                block = isa.load_u32(own_table + (next_unit >> 2) * 4)
                copy_unit(i32(ring + stage * unit_bytes), block, next_unit, k, v, end, head_at, pool, lane)
                loading, next_unit = advance(loading, next_unit, streams, loading_end, first_unit, n_units)
            isa.copy_commit()
        if overlap:
            isa.wait_previous()
        block = i32(0)
        if loading < loading_end:
            block = isa.load_u32(own_table + (next_unit >> 2) * 4)

        queries = cuda.local.array(n_queries, i32)
        q_at = i32(base + q_offset + lane * 16)
        if in_registers:
            for j in range(pieces):
                load_queries(q, queries, j, b, kv_head, n_kv, tokens, 0, lane, j)
        else:
            fragment = i32(warp)
            while fragment < tiles * pieces:
                row0, j = i32((fragment // pieces) * 16), i32(fragment & (pieces - 1))
                load_queries(q, queries, 0, b, kv_head, n_kv, tokens, row0, lane, j)
                at = i32(q_at + fragment * 1024)
                isa.shared_store_u32x4(at, queries[0], queries[1], queries[2], queries[3])
                isa.shared_store_u32x4(i32(at + 512), queries[4], queries[5], queries[6], queries[7])
                fragment = i32(fragment + streams)
            cuda.syncthreads()

        accumulators = cuda.local.array(n_accumulators, f32)
        tops, sums = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        scores = cuda.local.array(n_scores, f32)
        executed, mask_empty = i32(0), i32(0)
        mask = masks + i64(b * tokens) * (((tokens + 31) >> 5) * 4)
        positions = all_positions + i64(b * tokens) * 4
        k_lane = i32(lane * 16)
        v_row = i32(half_bytes + ((lane >> 3) & 1) * (pieces * 512) + (lane & 7) * 64)
        v_even = i32(v_row + (((lane >> 4) ^ ((lane & 7) >> 1)) << 4))
        v_odd = i32(v_row + (((2 + (lane >> 4)) ^ ((lane & 7) >> 1)) << 4))
        reading, writing = i32(ring), i32(ring + ahead * unit_bytes)
        rows = i32(tokens * group)
        while split < last_split:
            for i in range(n_accumulators):
                accumulators[i] = zero
            for i in range(n_tops):
                tops[i] = FLOOR
                sums[i] = zero
            unit = first_of(i32(split * streams + warp), first_unit)
            while unit < n_units:
                wait_stage()
                cuda.syncwarp()
                if loading < loading_end:
                    copy_unit(writing, block, next_unit, k, v, end, head_at, pool, lane)
                    loading, next_unit = advance(loading, next_unit, streams, loading_end, first_unit, n_units)
                    if loading < loading_end:
                        block = isa.load_u32(own_table + (next_unit >> 2) * 4)
                isa.copy_commit()
                score(scores, queries, q_at, i32(reading + k_lane))
                first, sees = i32(unit * UNIT), i32(1)
                if first + UNIT > ctx or first < seen_by_all:
                    sees = isa.any_lane(hide(scores, first, 0, tokens, ctx, end, window, mask, positions, lane))
                if sees != 0:
                    raise_tops(scores, accumulators, tops, sums, scale)
                    values_even, values_odd = i32(reading + v_even), i32(reading + v_odd)
                    add_values(0, scores, accumulators, tops, sums, values_even, values_odd, scale)
                if counting:
                    executed = i32(executed + sees)
                    mask_empty = i32(mask_empty + 1 - sees)
                unit = i32(unit + splits * streams)
                reading = i32(reading + unit_bytes)
                if reading == ring + ring_bytes:
                    reading = ring
                writing = i32(writing + unit_bytes)
                if writing == ring + ring_bytes:
                    writing = ring

            cuda.syncwarp()  # the slot to write was read a unit ago
            first_row = ((i64(b) * n_kv + kv_head) * splits + split) * rows
            first_group = i32(first_unit >> stream_shift)
            if i32((split - first_group) & (splits - 1)) <= i32(((n_units - 1) >> stream_shift) - first_group):
                table = i32(base + table_offset)
                lay_row(0, 0, writing, table, warp, lane, accumulators, tops, sums)
                if not half:
                    lay_row(0, 1, writing, table, warp, lane, accumulators, tops, sums)
                cuda.syncthreads()
                join_tile(0, table, tid, rows, first_row, partial, tops_sums, scale)
                cuda.syncthreads()
                if tiles == 2:
                    lay_row(1, 0, writing, table, warp, lane, accumulators, tops, sums)
                    lay_row(1, 1, writing, table, warp, lane, accumulators, tops, sums)
                    cuda.syncthreads()
                    join_tile(1, table, tid, rows, first_row, partial, tops_sums, scale)
                    cuda.syncthreads()
            else:
                row = i32(tid)
                while row < rows:  # a split without keys says so and leaves its sums alone
                    isa.store_f32x2(tops_sums + (first_row + row) * 8, FLOOR, zero)
                    row = i32(row + threads)
            split = i32(split + 1)
        wait_all()
        if counting and lane == 0:
            isa.atomic_add_i32(counters + 4 * TILE_EXECUTED, executed)
            isa.atomic_add_i32(counters + 4 * TILE_MASK_EMPTY, mask_empty)
            if warp == 0 and cuda.blockIdx.x == 0:
                held = i32(max(n_units - first_unit, 0))
                isa.atomic_add_i32(counters + 4 * TILE_TOTAL, i32(table_width * 4))
                isa.atomic_add_i32(counters + 4 * TILE_SPAN_EMPTY, i32(table_width * 4 - held))

    return attention_streams
