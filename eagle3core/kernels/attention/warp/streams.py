"""Attention kernel for up to 32 query rows a key head: every warp walks a stream of its own.

A block owns one (sequence, key head) and `run` splits, one after the other. Each warp copies its stream's units into a
private ring in shared memory (`fetch`), a set of one or two at a time, so the walk needs no barrier of the
block; copies run on over the end of a split into the next. A set is scored at once; if no running maximum moves and no
key is hidden, its values follow at once too. At the end of a split the block joins its streams (`split`).

Source: derived here; the order of sums is that of `layout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, UNIT, Shape
from eagle3core.kernels.attention.pieces import make_pinned, make_take_unit
from eagle3core.kernels.attention.tile import make_steps
from eagle3core.kernels.attention.warp.fetch import make_queries
from eagle3core.kernels.attention.warp.split import make_split, split_shared_bytes
from eagle3core.kernels.attention.warp.walk import make_own_walk


def streams_shared_bytes(shape: Shape, tiles: int, half: bool, units: int, stages: int, joined: bool) -> int:
    """Dynamic shared memory of a block, bytes: rings, queries, the end of a split."""
    rings = shape.streams * stages * units * shape.unit_bytes
    return rings + tiles * shape.pieces * 1024 + split_shared_bytes(shape, tiles, half, joined)


def make_attention_streams(
    isa: Any, *, shape: Shape, tiles: int, half: bool, units: int, stages: int, joined: bool, counting: bool,
    overlap: bool, words: int = 0, windowed: bool = False,
) -> Any:  # fmt: skip
    """The kernel; grid (blocks of `run` splits, key heads, sequences), a warp for each stream of a split.

    Args:
        tiles: 16-row tiles, 1 or 2; tokens * group rows must fit.
        half: at most 8 rows (one tile).
        units: units of a set, 1 or 2.
        stages: sets of a warp's ring, at least 2.
        joined: the block's `run` is a multiple of a bundle, whose splits it joins.
        counting: add up the tile counters of R-109.
        overlap: wait for the kernel before (programmatic dependent launch).
        words: of a row's mask where masked keys may lie before the T newest; the parameter `window` says how many, and
            where it is `windowed` a window beside it (`layout.EARLIER_BITS`).
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    # A step may leave the newest stages - 2 groups under way: the group of its own set has landed.
    wait_set, wait_all = isa.COPY_WAIT[stages - 2], isa.COPY_WAIT[0]
    query_at, load_queries = make_queries(isa, shape, half=half)
    lay_tile, join_tile = make_split(isa, shape, tiles=tiles, half=half, joined=joined)
    in_registers = tiles == 1
    score, hide, start_tops, grows, raise_tops, add_values, *_ = make_steps(
        isa,
        shape,
        tiles=tiles,
        half=half,
        held=shape.pieces if in_registers else 0,
        units=units,
        words=words,
        windowed=windowed,
    )
    first_of, follow, copy_set, begin, sees_any, count = make_own_walk(
        isa, shape, units=units, apart=shape.streams, words=words, windowed=windowed, hide=hide
    )

    group, dim, pieces, splits, streams = shape.group, shape.dim, shape.pieces, shape.splits, shape.streams
    zero, threads, interleave = np.float32(0), 32 * streams, splits * streams
    half_bytes, unit_bytes, stream_shift = shape.half_bytes, shape.unit_bytes, streams.bit_length() - 1
    set_bytes, ahead, step, fp8 = units * unit_bytes, stages - 1, units * interleave, shape.is_fp8
    ring_bytes, tile_bytes = stages * set_bytes, 64 * dim
    q_offset = streams * ring_bytes
    table_offset = q_offset + tiles * pieces * 1024
    # Registers of a lane: dim / 2 sums a tile (half for 8 rows), 8 scores a tile and unit, and the queries, 8 a piece,
    # where one tile leaves room for them.
    n_queries = 8 * pieces if in_registers else 8
    n_accumulators, n_tops = dim // 2 * tiles // (2 if half else 1), 2 * tiles
    unit_scores, n_scores = 8 * tiles, 8 * tiles * units
    assert half or set_bytes >= tile_bytes, "a place of the ring takes a tile's sums where a split ends"
    both_tiles = tiles == 2 and set_bytes == 2 * tile_bytes  # a free slot holds the sums of both
    uniform = isa.warp_max_i32  # of equal values: tells the assembler that one register serves the whole warp

    pinned, take_unit = make_pinned(isa), make_take_unit(isa, units=units, unit_scores=unit_scores)

    def attention_streams(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), uniform(tid >> 5)
        kv_head, b, n_kv = uniform(cuda.blockIdx.y), uniform(cuda.blockIdx.z), i32(cuda.gridDim.y)
        split = uniform(cuda.blockIdx.x * run)
        last_split = i32(min(split + run, splits))
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring, table = i32(base + warp * ring_bytes), tables + i64(b) * table_width * 4
        # This warp's streams: one of each split of the block, `streams` apart.
        end_stream, first_stream = i32(last_split * streams), i32(split * streams + warp)
        ctx, end, n_units, first_unit, seen_by_all, next_unit, entries, later_stream, later_unit, later = begin(
            table, table_width, first_stream, end_stream, prefix + b * 4, tokens, window, lane
        )
        place = i32(0)
        if overlap:
            isa.let_next_start()
        for stage in range(ahead):
            if next_unit >= 0:
                if overlap and i32((next_unit + (step - interleave)) * UNIT + UNIT) > ctx:
                    isa.wait_previous()  # keys of this step; older ones were there before
                copy_set(i32(ring + stage * set_bytes), next_unit, place, entries, k, v, end, kv_head, n_kv, lane)
                next_unit, place, entries, later_stream, later_unit, later = follow(
                    next_unit, place, entries, later_stream, later_unit, later, table, end_stream, first_unit, n_units,
                    lane,
                )  # fmt: skip
            # A group a set even where there is nothing to copy: the waits below count groups.
            isa.copy_commit()
        row = i32(lane >> 2)
        if not in_registers:
            row = i32(row + (warp & 1) * 16)
        near, far = query_at(row, b, kv_head, n_kv, tokens), query_at(i32(row + 8), b, kv_head, n_kv, tokens)
        near, far = pinned(near), pinned(far)  # where to look is known before the wait
        if overlap:
            isa.wait_previous()

        queries = cuda.local.array(n_queries, i32)
        q_at = i32(base + q_offset + lane * 16)
        if in_registers:
            for j in range(pieces):
                load_queries(q, queries, j, near, far, lane, j)
        else:
            fragment = i32(warp)  # of tile 0 if even
            while fragment < tiles * pieces:
                load_queries(q, queries, 0, near, far, lane, i32(fragment >> 1))
                at = i32(q_at + ((fragment & 1) * pieces + (fragment >> 1)) * 1024)
                isa.shared_store_u32x4(at, queries[0], queries[1], queries[2], queries[3])
                isa.shared_store_u32x4(i32(at + 512), queries[4], queries[5], queries[6], queries[7])
                fragment = i32(fragment + streams)
            # All warps have brought the fragments that each of them multiplies by.
            cuda.syncthreads()

        accumulators = cuda.local.array(n_accumulators, f32)
        tops, sums = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        scores, one = cuda.local.array(n_scores, f32), cuda.local.array(unit_scores, f32)
        executed, mask_empty = i32(0), i32(0)
        far_keys, far_columns = i32((lane >> 3) & 1), i32(lane >> 4)
        if half:  # values are the first operand there, which wants its four blocks in another order; keys have it too
            far_keys, far_columns = i32(lane >> 4), i32((lane >> 3) & 1)
        v_row = i32(half_bytes + far_keys * (half_bytes >> 1) + (lane & 7) * 64)
        v_lane = pinned(v_row + ((far_columns ^ ((lane & 7) >> 1)) << 4))
        k_lane = i32(v_lane - half_bytes)
        if fp8:
            k_lane = pinned(lane * 16)
        lowest, limit = i32(i32(seen_by_all + (UNIT - 1)) >> 4), i32(ctx >> 4)  # units that all rows see whole
        reading, writing = ring, i32(ring + ahead * set_bytes)
        rows = i32(tokens * group)
        while split < last_split:
            for i in range(n_accumulators):
                accumulators[i] = zero
            for i in range(n_tops):
                tops[i] = FLOOR
                sums[i] = zero
            unit = first_of(i32(split * streams + warp), first_unit)
            while unit < n_units:
                # A lane waits for its own copies, then the lanes meet: others read what it copied. And
                # all have read the set before, whose place the next copies take.
                wait_set()
                cuda.syncwarp()
                if next_unit >= 0:
                    copy_set(writing, next_unit, place, entries, k, v, end, kv_head, n_kv, lane)
                    next_unit, place, entries, later_stream, later_unit, later = follow(
                        next_unit, place, entries, later_stream, later_unit, later, table, end_stream, first_unit,
                        n_units, lane,
                    )  # fmt: skip
                # Also without a copy: see above.
                isa.copy_commit()
                score(scores, queries, q_at, i32(reading + k_lane))
                values, careful = i32(reading + v_lane), i32(1)
                # The usual path: every row sees every key of the set, and no maximum moves. One vote, no mask, and no
                # shuffle after the first unit.
                if unit >= lowest and i32(unit + (step - interleave)) < limit:
                    if i32(unit - first_unit) < interleave:
                        start_tops(0, scores, tops, scale)
                    careful = grows(scores, tops, scale)
                if careful == 0:
                    add_values(0, scores, accumulators, tops, sums, values, i32(values ^ 32), scale)
                    if units == 2:
                        at = i32(values + unit_bytes)
                        add_values(unit_scores, scores, accumulators, tops, sums, at, i32(at ^ 32), scale)
                    if counting:
                        executed = i32(executed + units)
                else:
                    u = i32(0)
                    while u < units and i32(unit + u * interleave) < n_units:
                        # The careful path, a unit at a time, in the same order and to the same bits.
                        take_unit(u, scores, one)
                        sees = sees_any(
                            one, i32(unit + u * interleave), ctx, end, seen_by_all, b, tokens, window, masks,
                            all_positions, lane,
                        )  # fmt: skip
                        if sees != 0:
                            raise_tops(one, accumulators, tops, sums, scale, lane)
                            add_values(0, one, accumulators, tops, sums, values, i32(values ^ 32), scale)
                        if counting:
                            executed = i32(executed + sees)
                            mask_empty = i32(mask_empty + 1 - sees)
                        values = i32(values + unit_bytes)
                        u = i32(u + 1)
                unit = i32(unit + step)
                writing = reading
                reading = i32(reading + set_bytes)
                if reading == i32(ring + ring_bytes):
                    reading = ring

            cuda.syncwarp()  # the slot to write was read a set ago
            first_row = i64(i32(pinned(b) * n_kv + kv_head) * splits) * rows
            first_group = i32(first_unit >> stream_shift)
            has_keys = i32((split - first_group) & (splits - 1)) <= i32(((n_units - 1) >> stream_shift) - first_group)
            # `has_keys` depends on lengths alone, so the whole block agrees on whether to meet at the barriers below.
            if joined or has_keys:
                ends = i32(base + table_offset)
                # Into the slot that no copy is on its way to; the next copies come after the last barrier.
                lay_tile(0, writing, ends, warp, lane, accumulators, tops, sums)
                if both_tiles:
                    lay_tile(1, i32(writing + tile_bytes), ends, warp, lane, accumulators, tops, sums)
                # All warps' sums lie there.
                cuda.syncthreads()
                join_tile(0, ends, tid, rows, first_row, split, partial, tops_sums, scale)
                if both_tiles:
                    join_tile(1, ends, tid, rows, first_row, split, partial, tops_sums, scale)
                cuda.syncthreads()  # they have been read: slots and table are free again
                if tiles == 2 and not both_tiles:
                    lay_tile(1, writing, ends, warp, lane, accumulators, tops, sums)
                    cuda.syncthreads()
                    join_tile(1, ends, tid, rows, first_row, split, partial, tops_sums, scale)
                    cuda.syncthreads()
            else:
                row = i32(tid)
                while row < rows:  # a split without keys says so and leaves its sums alone
                    isa.store_f32x2(tops_sums + (first_row + i64(split) * rows + row) * 8, FLOOR, zero)
                    row = i32(row + threads)
            split = i32(split + 1)
        wait_all()
        if counting:
            count(counters, executed, mask_empty, n_units, first_unit, table_width, warp, lane)

    return attention_streams
