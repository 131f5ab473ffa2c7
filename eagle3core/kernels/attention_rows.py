"""Attention kernel for more than 32 query rows a key head: warps own 32 rows each and share every unit of keys.

A block owns one (sequence, key head), up to 32 `row_warps` rows and `run` splits. `groups` groups of `row_warps` warps
walk as many streams of a split side by side, each group with a ring of its own that its warps fill together. When a
stream ends, a warp joins its sums to those of the split, which lie in shared memory as the lanes hold them; the groups
take turns, so the order is that of `attention_streams`, and the bits are too. Slots are laid out in the same way.

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

ROWS = 32  # of a warp: two tiles, so that every key and value read from shared memory serves both


def rows_shared_bytes(shape: Shape, row_warps: int, groups: int, units: int, stages: int) -> int:
    """Dynamic shared memory of a block, bytes: the rings, then each row warp's sums of the split."""
    return groups * stages * units * shape.unit_bytes + row_warps * _totals_bytes(shape)


def _totals_bytes(shape: Shape) -> int:
    return ROWS * shape.dim * 4 + 2 * 512  # the sums of values; maxima and sums of probabilities


def make_attention_rows(
    isa: Any, *, shape: Shape, row_warps: int, groups: int, units: int, stages: int, counting: bool, overlap: bool
) -> Any:
    """The kernel; grid (row blocks * blocks of `run` splits, key heads, sequences).

    Args:
        row_warps: warps that share a ring, 32 rows each: 2, 4 or 8.
        groups: streams walked side by side, a power of two up to `shape.streams`.
        units: units between two barriers of a group, a power of two.
        stages: such sets of units in a ring, at least 2.
        counting, overlap: as in `attention_streams`.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    wait_set, wait_all = isa.COPY_WAIT[(stages - 2) * units], isa.COPY_WAIT[0]
    first_of, _ = make_walk(isa, shape)
    span, load_queries, weigh = make_span(isa), make_load_queries(isa, shape), make_join(isa)
    score, hide, raise_tops, add_values = make_steps(isa, shape, tiles=2, half=False, q_in_registers=True)

    group, dim, pieces, splits, streams = shape.group, shape.dim, shape.pieces, shape.splits, shape.streams
    zero, interleave = np.float32(0), splits * streams
    half_bytes, unit_bytes, row_bytes = shape.half_bytes, shape.unit_bytes, 2 * dim
    head_bytes, set_bytes, ahead = row_bytes << BLOCK_SHIFT, units * unit_bytes, (stages - 1) * units
    ring_bytes = stages * set_bytes
    totals_offset, totals_bytes = groups * ring_bytes, _totals_bytes(shape)
    row_shift, piece_shift, split_mask = row_warps.bit_length() - 1, pieces.bit_length() - 1, streams - 1
    stream_shift = streams.bit_length() - 1
    n_queries, n_columns = 16 * pieces, dim // 8
    n_accumulators, tops_at = 8 * n_columns, 2 * n_columns * 512
    # A unit is 2 * pieces pairs of 512 bytes, keys and values. With more warps than pairs, half of them copy values.
    is_split = row_warps > 2 * pieces
    copies = 1 if is_split else 2 * pieces // row_warps
    group_threads, turn_threads, first_turn = 32 * row_warps, 64, 1 + groups
    uniform = isa.warp_max_i32  # of equal values: tells the assembler that one register serves the whole warp

    def copy_unit(
        slot: Any, block: Any, unit: Any, k: Any, v: Any, end: Any, kv_head: Any, n_kv: Any, lane: Any, row_warp: Any
    ) -> None:
        g, t, pair = i32(lane >> 2), i32(lane & 3), i32(row_warp * copies)
        if is_split:
            pair = i32(row_warp & (2 * pieces - 1))
        key = i32((pair >> piece_shift) * 8 + g)
        first, size = i32(unit * UNIT), i32(0)  # keys past the end become zeros: 0 * NaN would spoil the sums
        if i32(first + key) < end:
            size = i32(16)
        lane_at = i32(((first & 63) + key) * row_bytes + (pair & (pieces - 1)) * 64 + t * 16)
        source = i64(i32(block * n_kv + kv_head)) * head_bytes + lane_at
        keys = i32(slot + pair * 512 + lane * 16)
        values = i32(slot + half_bytes + pair * 512 + g * 64 + ((t ^ (g >> 1)) << 4))
        if is_split:
            target, tensor = keys, k
            if row_warp >= 2 * pieces:
                target, tensor = values, v
            isa.copy16_fill(target, tensor + source, size)
        else:
            for c in range(copies):
                isa.copy16_fill(i32(keys + c * 512), k + source + c * 64, size)
            for c in range(copies):
                isa.copy16_fill(i32(values + c * 512), v + source + c * 64, size)

    def load_tile(
        m: Any, q: Any, queries: Any, b: Any, kv_head: Any, n_kv: Any, tokens: Any, row0: Any, lane: Any
    ) -> None:
        # Written out: a loop that is not unrolled would move the queries to local memory.
        load_queries(q, queries, m * pieces, b, kv_head, n_kv, tokens, row0, lane, 0)
        load_queries(q, queries, m * pieces + 1, b, kv_head, n_kv, tokens, row0, lane, 1)
        if pieces == 4:
            load_queries(q, queries, m * pieces + 2, b, kv_head, n_kv, tokens, row0, lane, 2)
            load_queries(q, queries, m * pieces + 3, b, kv_head, n_kv, tokens, row0, lane, 3)

    def put_tops(at: Any, t0: Any, t1: Any, t2: Any, t3: Any) -> None:
        isa.shared_store_f32x4(i32(at + tops_at), t0, t1, t2, t3)

    def put_sums(at: Any, s0: Any, s1: Any, s2: Any, s3: Any) -> None:
        isa.shared_store_f32x4(i32(at + (tops_at + 512)), s0, s1, s2, s3)

    def join_row(
        r: Any, total_tops: Any, total_sums: Any, keep: Any, take: Any, tops: Any, sums: Any, scale: Any
    ) -> None:
        total = sums[r]
        total = total + isa.shuffle_xor_f32(total, 1)
        total = total + isa.shuffle_xor_f32(total, 2)
        high, kept, taken = weigh(total_tops[r], tops[r], scale)
        total_tops[r], keep[r], take[r] = high, kept, taken
        total_sums[r] = isa.fused(total_sums[r], kept, isa.product(total, taken))

    def join_column(o: Any, at: Any, accumulators: Any, keep: Any, take: Any) -> None:
        r, i = 2 * (o // n_columns), 4 * o
        t = isa.shared_load_f32x4(i32(at + o * 512))
        a0 = isa.fused(t[0], keep[r], isa.product(accumulators[i], take[r]))
        a1 = isa.fused(t[1], keep[r], isa.product(accumulators[i + 1], take[r]))
        a2 = isa.fused(t[2], keep[r + 1], isa.product(accumulators[i + 2], take[r + 1]))
        a3 = isa.fused(t[3], keep[r + 1], isa.product(accumulators[i + 3], take[r + 1]))
        isa.shared_store_f32x4(i32(at + o * 512), a0, a1, a2, a3)

    def store_pair(row: Any, o: Any, rows: Any, total: Any, target: Any, even: Any, odd: Any) -> None:
        if row < rows and total > zero:  # sums of no key are not read
            isa.store_f32x2(target + (o & (n_columns - 1)) * 32, even, odd)

    def look_up(table: Any, unit: Any, lane: Any) -> Any:
        # The popcount adds zero; were the address visibly uniform, the entry would be waited for at once.
        return isa.load_u32(table + i32((unit >> 2) + (isa.popcount(lane) >> 6)) * 4)

    def follow(unit: Any, end: Any, first_unit: Any, n_units: Any) -> Any:
        """The unit after `unit` in this group's walk up to stream `end`; -1 if there is none."""
        unit = i32(unit + interleave)
        if unit >= n_units:
            stream = i32((unit & (interleave - 1)) + groups)
            unit = i32(-1)
            while stream < end and unit < 0:
                unit = first_of(stream, first_unit)
                if unit >= n_units:
                    unit = i32(-1)
                stream = i32(stream + groups)
        return unit

    look_up, follow = isa.inlined(look_up), isa.inlined(follow)
    copy_unit, join_row = isa.inlined(copy_unit), isa.inlined(join_row)

    def pinned(value: Any) -> Any:
        # `value` through a shuffle: what depends on it is not computed ahead of the loop and held in registers there.
        return isa.shuffle_xor_i32(value, i32(0))

    pinned = isa.inlined(pinned)
    load_tile, put_tops, put_sums = isa.inlined(load_tile), isa.inlined(put_tops), isa.inlined(put_sums)
    join_column, store_pair = isa.inlined(join_column), isa.inlined(store_pair)

    def attention_rows(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        row_warp, own_group = uniform(warp & (row_warps - 1)), uniform(warp >> row_shift)
        kv_head, b, n_kv = uniform(cuda.blockIdx.y), uniform(cuda.blockIdx.z), i32(cuda.gridDim.y)
        rows = i32(tokens * group)
        row_blocks = i32((rows + (ROWS * row_warps - 1)) >> (5 + row_shift))
        part = i32(cuda.blockIdx.x // row_blocks)
        row0 = i32(((cuda.blockIdx.x - part * row_blocks) * row_warps + row_warp) * ROWS)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring = i32(base + own_group * ring_bytes)
        totals_at = i32(base + totals_offset + row_warp * totals_bytes + lane * 16)
        turn = i32(first_turn + row_warp * groups + own_group)
        next_turn = i32(first_turn + row_warp * groups + ((own_group + 1) & (groups - 1)))
        ctx = uniform(isa.load_u32(prefix + b * 4))
        end, n_units, first_unit, seen_by_all = span(ctx, tokens, window)
        table = tables + i64(b) * table_width * 4

        first_stream = i32(part * run * streams)
        last_stream = i32(min((part + 1) * run, splits) * streams)
        stream = i32(first_stream + own_group)
        next_unit = follow(i32(first_of(stream, first_unit) - interleave), last_stream, first_unit, n_units)
        if overlap:
            isa.let_next_start()
        for slot in range(ahead):
            if next_unit >= 0:
                if overlap and next_unit * UNIT + UNIT > ctx:
                    isa.wait_previous()  # keys of this step; older ones were there before
                block = look_up(table, next_unit, lane)
                copy_unit(i32(ring + slot * unit_bytes), block, next_unit, k, v, end, kv_head, n_kv, lane, row_warp)
                next_unit = follow(next_unit, last_stream, first_unit, n_units)
            isa.copy_commit()
        if overlap:
            isa.wait_previous()

        block = i32(0)
        if next_unit >= 0:
            block = look_up(table, next_unit, lane)

        queries = cuda.local.array(n_queries, i32)
        load_tile(0, q, queries, b, kv_head, n_kv, tokens, row0, lane)
        load_tile(1, q, queries, b, kv_head, n_kv, tokens, i32(row0 + 16), lane)
        accumulators, scores = cuda.local.array(n_accumulators, f32), cuda.local.array(16, f32)
        tops, sums = cuda.local.array(4, f32), cuda.local.array(4, f32)
        total_tops, total_sums = cuda.local.array(4, f32), cuda.local.array(4, f32)
        keep, take = cuda.local.array(4, f32), cuda.local.array(4, f32)
        if own_group == 0:
            put_tops(totals_at, FLOOR, FLOOR, FLOOR, FLOOR)
            put_sums(totals_at, zero, zero, zero, zero)
        executed, mask_empty = i32(0), i32(0)
        k_lane = i32(lane * 16)
        v_row = i32(half_bytes + ((lane >> 3) & 1) * (pieces * 512) + (lane & 7) * 64)
        v_lane = i32(v_row + (((lane >> 4) ^ ((lane & 7) >> 1)) << 4))
        reading = i32(ring)
        while stream < last_stream:
            for i in range(n_accumulators):
                accumulators[i] = zero
            for i in range(4):
                tops[i] = FLOOR
                sums[i] = zero
            unit = first_of(stream, first_unit)
            while unit < n_units:
                if (i32(reading - ring) & (set_bytes - 1)) == 0:
                    wait_set()
                    isa.named_barrier(i32(1 + own_group), group_threads)
                if next_unit >= 0:
                    writing = i32(reading - set_bytes)
                    if writing < ring:
                        writing = i32(writing + ring_bytes)
                    copy_unit(writing, block, next_unit, k, v, end, kv_head, n_kv, lane, row_warp)
                    next_unit = follow(next_unit, last_stream, first_unit, n_units)
                    if next_unit >= 0:
                        block = look_up(table, next_unit, lane)
                isa.copy_commit()
                # A warp without rows works on zeros.
                score(scores, queries, 0, i32(reading + k_lane))
                first, sees = i32(unit * UNIT), i32(1)
                if i32(first + UNIT) > ctx or first < seen_by_all:
                    here, token0 = pinned(lane), i32(pinned(b) * tokens)
                    mask = masks + i64(token0 * ((tokens + 31) >> 5)) * 4
                    positions = all_positions + i64(token0) * 4
                    sees = isa.any_lane(hide(scores, first, row0, tokens, ctx, end, window, mask, positions, here))
                if sees != 0:
                    raise_tops(scores, accumulators, tops, sums, scale)
                    values_even = i32(reading + v_lane)
                    add_values(scores, accumulators, tops, sums, values_even, i32(values_even ^ 32), scale)
                if counting:
                    executed = i32(executed + sees)
                    mask_empty = i32(mask_empty + 1 - sees)
                unit = i32(unit + splits * streams)
                reading = i32(reading + unit_bytes)
                if reading == i32(ring + ring_bytes):
                    reading = ring

            # The stream has ended, perhaps before it began: its turn to join the sums of the split.
            stream = i32(unit & (interleave - 1))  # as before; to hold it meanwhile would cost a register
            place = i32(stream & split_mask)
            if groups > 1 and stream > first_stream:
                isa.named_barrier(turn, turn_threads)
            held = isa.shared_load_f32x4(i32(totals_at + tops_at))
            summed = isa.shared_load_f32x4(i32(totals_at + (tops_at + 512)))
            for r in range(4):
                total_tops[r], total_sums[r] = held[r], summed[r]
            for r in range(4):
                join_row(r, total_tops, total_sums, keep, take, tops, sums, scale)
            if place > 0:
                for o in range(2 * n_columns):
                    join_column(o, totals_at, accumulators, keep, take)
            else:
                for o in range(2 * n_columns):
                    a = 4 * o
                    isa.shared_store_f32x4(
                        i32(totals_at + o * 512),
                        accumulators[a], accumulators[a + 1], accumulators[a + 2], accumulators[a + 3],
                    )  # fmt: skip
            if place < split_mask:
                put_tops(totals_at, total_tops[0], total_tops[1], total_tops[2], total_tops[3])
                put_sums(totals_at, total_sums[0], total_sums[1], total_sums[2], total_sums[3])
            else:
                put_tops(totals_at, FLOOR, FLOOR, FLOOR, FLOOR)
                put_sums(totals_at, zero, zero, zero, zero)
                place_lane, head = pinned(lane), i32(pinned(b) * n_kv + kv_head)
                row = i32(row0 + (place_lane >> 2))
                first_row = i32((i32(head * splits) + i32(stream >> stream_shift)) * rows + row)
                for m in range(2):
                    near, far = i32(row + m * 16), i32(row + m * 16 + 8)
                    target = partial + i64(i32(first_row + m * 16)) * (4 * dim) + (place_lane & 3) * 8
                    if (place_lane & 3) == 0:
                        pair = tops_sums + i64(i32(first_row + m * 16)) * 8
                        if near < rows:
                            isa.store_f32x2(pair, total_tops[2 * m], total_sums[2 * m])
                        if far < rows:
                            isa.store_f32x2(pair + 8 * 8, total_tops[2 * m + 1], total_sums[2 * m + 1])
                    n = i32(0)
                    while n < n_columns:
                        t = isa.shared_load_f32x4(i32(totals_at + (m * n_columns + n) * 512))
                        store_pair(near, n, rows, total_sums[2 * m], target, t[0], t[1])
                        store_pair(far, n, rows, total_sums[2 * m + 1], target + 8 * 4 * dim, t[2], t[3])
                        n = i32(n + 1)
            if groups > 1 and i32(stream + 1) < last_stream:
                isa.named_arrive(next_turn, turn_threads)
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
