"""Attention kernel for more than 32 query rows a key head: warps own 32 rows each and share every unit of keys.

A block owns one (sequence, key head), up to 32 `row_warps` rows and `run` splits. `groups` groups of `row_warps` warps
walk as many streams of a split side by side, each group with a ring of its own (`ring`) that its warps fill
together. A set of units of a stream is scored at once; if no running maximum moves and no key is hidden, its values
follow at once too, so that few decisions fall to a unit. When a stream ends, a warp joins its sums to those of the
split, which lie in shared memory (`totals`); the groups take turns, so the order is that of
`attention_streams`, and the bits are too.

A barrier of a group says set after set that all its warps' copies of that set are there, and that all have read the set
two before. A warp arrives between keys and values of the set before and waits a set later, so nobody waits for another
warp that is less than that behind.

Source: derived here; software pipelines with split barriers after CUTLASS's asynchronous pipelines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import (
    FLOOR,
    TILE_EXECUTED,
    TILE_MASK_EMPTY,
    TILE_SPAN_EMPTY,
    TILE_TOTAL,
    UNIT,
    Shape,
    make_span,
    make_walk,
)
from eagle3core.kernels.attention.paths import make_paths, tail_bytes
from eagle3core.kernels.attention.pieces import make_pinned, make_take_unit
from eagle3core.kernels.attention.ring import make_load_tile, make_ring
from eagle3core.kernels.attention.tile import make_steps
from eagle3core.kernels.attention.totals import make_totals, totals_bytes

TILE_ROWS = 16
TILES = 2  # of a warp, so that every key and value read from shared memory serves both


def rows_shared_bytes(
    shape: Shape, row_warps: int, groups: int, units: int, stages: int, held: int, tail: int = 0, tiles: int = TILES
) -> int:
    """Dynamic shared memory of a block, bytes: rings, sums of the split, some queries, `tail` units of a tree's nodes,
    barriers of rings and turns."""
    rings = groups * stages * units * shape.unit_bytes
    queries = row_warps * groups * 1024 * tiles * (shape.pieces - held)
    nodes = tail_bytes(shape, tail)
    return rings + row_warps * totals_bytes(shape, tiles) + queries + nodes + 8 * groups * (1 + row_warps)


def make_attention_rows(
    isa: Any, *, shape: Shape, row_warps: int, groups: int, units: int, stages: int, held: int, joined: bool,
    counting: bool, overlap: bool, words: int = 0, windowed: bool = False, tail: int = 0, tiles: int = TILES,
    abreast: int = 0,
) -> Any:  # fmt: skip
    """The kernel; grid (row blocks * blocks of `run` splits, key heads, sequences).

    Args:
        row_warps: warps that share a ring, 16 `tiles` rows each: 2, 4 or 8.
        groups: streams walked side by side, a power of two up to `shape.streams`.
        units: units of a set, 1, 2 or 4; at most `row_warps`, at least a quarter of it.
        stages: sets in a ring, at least 3.
        held: 64-byte pieces of the queries in registers; the others are in shared memory.
        joined: the block's `run` is a multiple of a bundle, whose splits it joins.
        counting, overlap, words, windowed: as in `attention_streams`.
        tail: units for which there is room beyond the prefix, where the T keys are a tree's nodes and rows add their
            ancestors as plain decoding does (`paths`); the parameter `window` says how long a path can be, and where it
            is `windowed` a window beside that.
        tiles: of 16 rows of a warp. One where a tree has few nodes: they are added one after the other, so warps share
            them, and each key serves one tile alone. abreast: nodes scored at once; 0 for two with one tile, else one.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    # Before a warp arrives for the next set, the newest stages - 3 groups may be under way: that set's own has landed.
    # Copies run stages - 2 sets ahead, one less than without sharing: the set before may still be read by another warp.
    wait_set, wait_all = isa.COPY_WAIT[stages - 3], isa.COPY_WAIT[0]
    wait_others = isa.mbarrier_wait if overlap else isa.mbarrier_poll  # both of compute capability 9
    first_of, _ = make_walk(isa, shape)
    paths = tail > 0
    passes_by = paths and windowed and shape.dim == 64  # at 128 there is no register left to ask by
    span = make_span(isa, earlier=words > 0, paths=paths, windowed=windowed)
    load_tile = make_load_tile(isa, shape, held=held)
    owns_tail, load_tail, add_paths = make_paths(
        isa,
        shape,
        threads=32 * row_warps * groups,
        held=held,
        tail=tail,
        tiles=tiles,
        abreast=abreast,
        windowed=windowed,
    )
    follow, look_up, copy_set = make_ring(isa, shape, row_warps=row_warps, groups=groups, units=units)
    score, hide, start_tops, grows, raise_tops, add_values, *_ = make_steps(
        isa, shape, tiles=tiles, half=False, held=held, units=units, words=words, windowed=windowed
    )
    begin, join, leave = make_totals(isa, shape, joined=joined, tiles=tiles)

    group, dim, pieces, splits, streams = shape.group, shape.dim, shape.pieces, shape.splits, shape.streams
    zero, interleave = np.float32(0), splits * streams
    half_bytes, unit_bytes, fp8 = shape.half_bytes, shape.unit_bytes, shape.is_fp8
    set_bytes, ahead, step = units * unit_bytes, stages - 2, units * interleave
    ring_bytes, own_totals = stages * set_bytes, totals_bytes(shape, tiles)
    totals_offset = groups * ring_bytes
    queries_offset, own_queries = totals_offset + row_warps * own_totals, 1024 * tiles * (pieces - held)
    tail_offset = queries_offset + row_warps * groups * own_queries
    barriers_offset = tail_offset + tail_bytes(shape, tail)
    row_shift, split_mask = row_warps.bit_length() - 1, streams - 1
    stream_shift = streams.bit_length() - 1
    # Registers of a lane: D sums of its two tiles, 16 scores a unit, 16 int32 a piece of the queries held; with D =
    # 128, two units and three pieces 208 of the 255 there are.
    n_queries, n_accumulators, n_tops = 8 * tiles * held, dim // 2 * tiles, 2 * tiles
    unit_scores, n_scores = 8 * tiles, 8 * tiles * units
    rows_shift = 3 + tiles  # of a warp's rows: 16 or 32
    uniform = isa.warp_max_i32  # of equal values: tells the assembler that one register serves the whole warp

    pinned, take_unit = make_pinned(isa), make_take_unit(isa, units=units, unit_scores=unit_scores)

    def attention_rows(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        row_warp, own_group = uniform(warp & (row_warps - 1)), uniform(warp >> row_shift)
        kv_head, b, n_kv = uniform(cuda.blockIdx.y), uniform(cuda.blockIdx.z), i32(cuda.gridDim.y)
        rows = i32(tokens * group)
        row_blocks = i32((rows + (TILE_ROWS * tiles * row_warps - 1)) >> (rows_shift + row_shift))
        part = uniform(cuda.blockIdx.x // row_blocks)
        row0 = i32(((cuda.blockIdx.x - part * row_blocks) * row_warps + row_warp) * (TILE_ROWS * tiles))
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring = i32(base + own_group * ring_bytes)
        totals = i32(base + totals_offset + row_warp * own_totals)
        barrier = i32(base + barriers_offset + own_group * 8)
        turns = i32(base + (barriers_offset + 8 * groups) + row_warp * (8 * groups))
        q_at = i32(base + queries_offset + warp * own_queries + lane * 16)
        if tid < groups:
            isa.mbarrier_init(i32(base + barriers_offset + tid * 8), i32(row_warps * isa.ARRIVING_LANES))
        if groups > 1 and tid < groups * row_warps:
            isa.mbarrier_init(i32(base + (barriers_offset + 8 * groups) + tid * 8), i32(isa.ARRIVING_LANES))
        cuda.syncthreads()
        ctx = uniform(isa.load_u32(prefix + b * 4))
        end, n_units, first_unit, seen_by_all = span(ctx, tokens, window)
        table = tables + i64(b) * table_width * 4

        first_stream = i32(part * run * streams)
        last_stream = i32(min((part + 1) * run, splits) * streams)
        stream = i32(first_stream + own_group)
        next_unit = follow(i32(first_of(stream, first_unit) - step), last_stream, first_unit, n_units)
        if overlap:
            isa.let_next_start()
        for slot in range(ahead):
            if next_unit >= 0:
                if overlap and (next_unit + (step - interleave)) * UNIT + UNIT > ctx:
                    isa.wait_previous()  # keys of this step; older ones were there before
                block = look_up(table, next_unit, n_units, lane, row_warp)
                copy_set(i32(ring + slot * set_bytes), block, next_unit, k, v, end, kv_head, n_kv, lane, row_warp)
                next_unit = follow(next_unit, last_stream, first_unit, n_units)
            # A group a set even where there is nothing to copy: the waits count groups.
            isa.copy_commit()
        if overlap:
            isa.wait_previous()
        has_tail = i32(0)
        if paths:
            has_tail = owns_tail(ctx, n_units, first_stream, last_stream)
            if has_tail != 0:
                mask = masks + i64(i32(b * tokens) * ((tokens + 31) >> 5)) * 4
                load_tail(i32(base + tail_offset), k, v, table, mask, tokens, ctx, kv_head, n_kv, tid)

        block = i32(0)
        if next_unit >= 0:
            block = look_up(table, next_unit, n_units, lane, row_warp)

        queries = cuda.local.array(n_queries, i32)
        spare = cuda.local.array(8, i32)
        load_tile(0, q, queries, spare, q_at, b, kv_head, n_kv, tokens, row0, lane)
        if tiles == 2:
            load_tile(1, q, queries, spare, q_at, b, kv_head, n_kv, tokens, row0, lane)
        if paths and has_tail != 0:
            wait_all()
            cuda.syncthreads()  # every warp reads what all have brought
        accumulators = cuda.local.array(n_accumulators, f32)
        scores, one = cuda.local.array(n_scores, f32), cuda.local.array(unit_scores, f32)
        tops, sums = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        total_tops, total_sums = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        if own_group == 0:
            begin(i32(totals + lane * 16))
        executed, mask_empty = i32(0), i32(0)
        v_row = i32(half_bytes + ((lane >> 3) & 1) * (half_bytes >> 1) + (lane & 7) * 64)
        v_lane = i32(v_row + (((lane >> 4) ^ ((lane & 7) >> 1)) << 4))
        k_lane = i32(v_lane - half_bytes)
        if fp8:
            k_lane = i32(lane * 16)
        wait_set()
        cuda.syncwarp()
        if lane < isa.ARRIVING_LANES:
            isa.mbarrier_arrive(barrier)
        reading, parity, turn_parity = ring, i32(0), i32(0)
        while stream < last_stream:
            for i in range(n_accumulators):
                accumulators[i] = zero
            for i in range(n_tops):
                tops[i] = FLOOR
                sums[i] = zero
            unit = first_of(stream, first_unit)
            while unit < n_units:
                # All warps' copies of this set are there, and all have left the set two before: its place takes the
                # copies below.
                wait_others(barrier, parity)
                parity = i32(parity ^ 1)
                if next_unit >= 0:
                    writing = i32(reading + ahead * set_bytes)
                    if writing >= i32(ring + ring_bytes):
                        writing = i32(writing - ring_bytes)
                    copy_set(writing, block, next_unit, k, v, end, kv_head, n_kv, lane, row_warp)
                isa.copy_commit()
                # A warp without rows works on zeros: it copies, and is counted at barriers.
                score(scores, queries, q_at, i32(reading + k_lane))
                if next_unit >= 0:
                    next_unit = follow(next_unit, last_stream, first_unit, n_units)
                    if next_unit >= 0:
                        block = look_up(table, next_unit, n_units, lane, row_warp)
                # Arrive for the next set here, between keys and values: by when others wait for it, this was long ago.
                wait_set()
                cuda.syncwarp()
                if lane < isa.ARRIVING_LANES:
                    isa.mbarrier_arrive(barrier)
                careful = i32(0)
                if i32((unit + (step - interleave)) * UNIT + UNIT) > ctx or i32(unit * UNIT) < seen_by_all:
                    careful = i32(1)
                else:
                    if i32(unit - first_unit) < interleave:
                        start_tops(0, scores, tops, scale)
                    careful = grows(scores, tops, scale)
                values = i32(reading + v_lane)
                if careful == 0:
                    add_values(0, scores, accumulators, tops, sums, values, i32(values ^ 32), scale)
                    if units > 1:
                        at = i32(values + unit_bytes)
                        add_values(unit_scores, scores, accumulators, tops, sums, at, i32(at ^ 32), scale)
                    if units > 2:
                        at = i32(values + 2 * unit_bytes)
                        add_values(2 * unit_scores, scores, accumulators, tops, sums, at, i32(at ^ 32), scale)
                        at = i32(values + 3 * unit_bytes)
                        add_values(3 * unit_scores, scores, accumulators, tops, sums, at, i32(at ^ 32), scale)
                    if counting:
                        executed = i32(executed + units)
                else:
                    u = i32(0)
                    while u < units and i32(unit + u * interleave) < n_units:
                        take_unit(u, scores, one)
                        first, sees = i32((unit + u * interleave) * UNIT), i32(1)
                        if paths and i32(first + UNIT) > ctx:
                            seen, sees = add_paths(
                                i32(base + tail_offset), queries, q_at, accumulators, tops, sums, tokens, ctx, first,
                                row0, window, scale, pinned(lane),
                            ), i32(0)  # fmt: skip
                            executed, mask_empty = i32(executed + seen), i32(mask_empty - seen)
                        elif i32(first + UNIT) > ctx or first < seen_by_all:
                            here, token0 = pinned(lane), i32(pinned(b) * tokens)
                            mask = masks + i64(token0 * ((tokens + 31) >> 5)) * 4
                            if words > 0:
                                mask = masks + i64(i32(token0 * words)) * 4
                            positions = all_positions + i64(token0) * 4
                            sees = isa.any_lane(hide(one, first, row0, tokens, ctx, end, window, mask, positions, here))
                        if sees != 0:
                            raise_tops(one, accumulators, tops, sums, scale, lane)
                            add_values(0, one, accumulators, tops, sums, values, i32(values ^ 32), scale)
                        if counting:
                            executed = i32(executed + sees)
                            mask_empty = i32(mask_empty + 1 - sees)
                        values = i32(values + unit_bytes)
                        u = i32(u + 1)
                unit = i32(unit + step)
                reading = i32(reading + set_bytes)
                if reading == i32(ring + ring_bytes):
                    reading = ring

            # The stream has ended, perhaps before it began: its turn to join the sums of the split.
            stream = i32(unit & (interleave - 1))  # as before; to hold it meanwhile would cost a register
            place = i32(stream & split_mask)
            if groups > 1 and stream > first_stream:
                # The streams of a split join in ascending order, whichever group is ahead.
                wait_others(i32(turns + own_group * 8), turn_parity)
                turn_parity = i32(turn_parity ^ 1)
            here = pinned(lane)
            totals_at = i32(totals + here * 16)
            # Under a window most streams have no units. Joined, they would leave the sums' bits as they are; a split's
            # first lays them down, and its last has them from all before.
            if not passes_by or place == 0 or place == split_mask or first_of(stream, first_unit) < n_units:
                join(totals_at, place == 0, accumulators, tops, sums, total_tops, total_sums, scale)
            if place == split_mask:
                head = i32(pinned(b) * n_kv + kv_head)
                first_row, split = i32(i32(head * splits) * rows), i32(stream >> stream_shift)
                leave(
                    totals_at, split, row0, rows, first_row, here, accumulators, total_tops, total_sums, partial,
                    tops_sums, scale,
                )  # fmt: skip
            if groups > 1:
                cuda.syncwarp()
                if lane < isa.ARRIVING_LANES:
                    isa.mbarrier_arrive(i32(turns + ((own_group + 1) & (groups - 1)) * 8))
            stream = i32(stream + groups)
        wait_all()
        if counting and lane == 0 and row0 < rows:
            isa.atomic_add_i32(counters + 4 * TILE_EXECUTED, executed)
            isa.atomic_add_i32(counters + 4 * TILE_MASK_EMPTY, mask_empty)
            if part == 0 and own_group == 0:
                held_units = i32(max(n_units - first_unit, 0))
                isa.atomic_add_i32(counters + 4 * TILE_TOTAL, i32(table_width * 4))
                isa.atomic_add_i32(counters + 4 * TILE_SPAN_EMPTY, i32(table_width * 4 - held_units))

    return attention_rows
