"""Attention kernel for up to 16 query rows a key head where many blocks run: every warp walks the streams of a split.

A block owns one (sequence, key head) and a bundle of splits, a warp each. Where sessions are short a stream has few
units, and `attention_streams`, whose warps meet at the end of every split, mostly waits for that. Here a warp joins the
streams of its split in registers, one after the other, and the warps meet once, to join the splits of the bundle. A set
is one unit: a second one of the same stream is further away than short sessions reach.

Source: derived here; the order of sums is that of `layout`, the words of the joins are those of `split.join_tile`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, UNIT, Shape
from eagle3core.kernels.attention.pieces import make_pinned
from eagle3core.kernels.attention.tile import make_steps
from eagle3core.kernels.attention.totals import make_join_row
from eagle3core.kernels.attention.warp.fetch import make_queries
from eagle3core.kernels.attention.warp.split import make_split, split_shared_bytes
from eagle3core.kernels.attention.warp.walk import make_own_walk


def has_splits_kernel(shape: Shape, tokens: int) -> bool:
    """Whether there is a kernel for `tokens` queries: their sums, and those of a split, fit a warp's registers."""
    return tokens * shape.group <= 16 and not shape.is_fp8 and shape.splits >= shape.bundle


def splits_shared_bytes(shape: Shape, half: bool, stages: int) -> int:
    """Dynamic shared memory of a block, bytes: rings, the end of the bundle."""
    of_bundle = replace(shape, streams=shape.bundle)
    return shape.bundle * stages * shape.unit_bytes + split_shared_bytes(of_bundle, 1, half, False)


def make_attention_splits(
    isa: Any, *, shape: Shape, half: bool, stages: int, counting: bool, overlap: bool, words: int = 0,
    windowed: bool = False,
) -> Any:  # fmt: skip
    """The kernel; grid (bundles of splits, key heads, sequences), a warp for each split of a bundle.

    Args:
        half: at most 8 rows. stages: units of a warp's ring, at least 2.
        counting, overlap, words, windowed: as in `attention_streams`.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    group, dim, pieces, splits, streams, bundle = (
        shape.group, shape.dim, shape.pieces, shape.splits, shape.streams, shape.bundle,
    )  # fmt: skip
    wait_unit, wait_all = isa.COPY_WAIT[stages - 2], isa.COPY_WAIT[0]
    query_at, load_queries = make_queries(isa, shape, half=half)
    lay_tile, join_tile = make_split(isa, replace(shape, streams=bundle), tiles=1, half=half, joined=False, whole=True)
    score, hide, start_tops, grows, raise_tops, add_values, *_ = make_steps(
        isa, shape, tiles=1, half=half, held=pieces, units=1, words=words, windowed=windowed
    )
    first_of, follow, copy_unit, begin, sees_any, count = make_own_walk(
        isa, shape, units=1, apart=1, words=words, windowed=windowed, hide=hide
    )
    join_row, pinned, uniform = make_join_row(isa), make_pinned(isa), isa.warp_max_i32
    zero, interleave = np.float32(0), splits * streams
    half_bytes, unit_bytes = shape.half_bytes, shape.unit_bytes
    ring_bytes, ahead = stages * unit_bytes, stages - 1
    table_offset = bundle * ring_bytes
    n_queries, n_sums, n_tops, n_scores = 8 * pieces, dim // 2 // (2 if half else 1), 2, 8

    def join_stream(
        accumulators: Any, tops: Any, sums: Any, joined: Any, joined_tops: Any, joined_sums: Any, scale: Any, lane: Any
    ) -> None:
        keep, take = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        join_row(0, joined_tops, joined_sums, keep, take, tops, sums, scale)
        if half:
            # A lane has rows 2t and 2t + 1 of the sums, whose factors lie in lanes 8t and 8t + 4.
            kept, taken = isa.bits_of_f32(keep[0]), isa.bits_of_f32(take[0])
            even, odd = i32((lane & 3) * 8), i32((lane & 3) * 8 + 4)
            keep[0], keep[1] = isa.f32_of_bits(isa.shuffle_i32(kept, even)), isa.f32_of_bits(isa.shuffle_i32(kept, odd))
            take[0], take[1] = (
                isa.f32_of_bits(isa.shuffle_i32(taken, even)), isa.f32_of_bits(isa.shuffle_i32(taken, odd)),
            )  # fmt: skip
            for i in range(n_sums):
                joined[i] = isa.fused(joined[i], keep[i & 1], isa.product(accumulators[i], take[i & 1]))
        else:
            join_row(1, joined_tops, joined_sums, keep, take, tops, sums, scale)
            for i in range(n_sums):
                far = (i >> 1) & 1
                joined[i] = isa.fused(joined[i], keep[far], isa.product(accumulators[i], take[far]))

    join_stream = isa.inlined(join_stream)

    def attention_splits(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), uniform(tid >> 5)
        kv_head, b, n_kv = uniform(cuda.blockIdx.y), uniform(cuda.blockIdx.z), i32(cuda.gridDim.y)
        first_split = uniform(cuda.blockIdx.x * bundle)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring, table = i32(base + warp * ring_bytes), tables + i64(b) * table_width * 4
        first_stream = i32(i32(first_split + warp) * streams)
        end_stream = i32(first_stream + streams)
        ctx, end, n_units, first_unit, seen_by_all, next_unit, entries, later_stream, later_unit, later = begin(
            table, table_width, first_stream, end_stream, prefix + b * 4, tokens, window, lane
        )
        place = i32(0)
        if overlap:
            isa.let_next_start()
        for stage in range(ahead):
            if next_unit >= 0:
                if overlap and i32(next_unit * UNIT + UNIT) > ctx:
                    isa.wait_previous()  # keys of this step; older ones were there before
                copy_unit(i32(ring + stage * unit_bytes), next_unit, place, entries, k, v, end, kv_head, n_kv, lane)
                next_unit, place, entries, later_stream, later_unit, later = follow(
                    next_unit, place, entries, later_stream, later_unit, later, table, end_stream, first_unit, n_units,
                    lane,
                )  # fmt: skip
            # A group a unit even where there is nothing to copy: the waits below count groups.
            isa.copy_commit()
        row = i32(lane >> 2)
        near, far = query_at(row, b, kv_head, n_kv, tokens), query_at(i32(row + 8), b, kv_head, n_kv, tokens)
        near, far = pinned(near), pinned(far)  # where to look is known before the wait
        if overlap:
            isa.wait_previous()

        queries = cuda.local.array(n_queries, i32)
        for j in range(pieces):
            load_queries(q, queries, j, near, far, lane, j)
        accumulators, joined = cuda.local.array(n_sums, f32), cuda.local.array(n_sums, f32)
        tops, sums = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        joined_tops, joined_sums = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        scores = cuda.local.array(n_scores, f32)
        for i in range(n_sums):
            joined[i] = zero
        for i in range(n_tops):
            joined_tops[i] = FLOOR
            joined_sums[i] = zero
        executed, mask_empty = i32(0), i32(0)
        far_keys, far_columns = i32((lane >> 3) & 1), i32(lane >> 4)
        if half:  # values are the first operand there, which wants its four blocks in another order; keys have it too
            far_keys, far_columns = i32(lane >> 4), i32((lane >> 3) & 1)
        v_row = i32(half_bytes + far_keys * (half_bytes >> 1) + (lane & 7) * 64)
        v_lane = pinned(v_row + ((far_columns ^ ((lane & 7) >> 1)) << 4))
        k_lane = i32(v_lane - half_bytes)
        lowest, limit = i32(i32(seen_by_all + (UNIT - 1)) >> 4), i32(ctx >> 4)  # units that all rows see whole
        reading, writing = ring, i32(ring + ahead * unit_bytes)
        rows = i32(tokens * group)
        stream = first_stream
        while stream < end_stream:
            for i in range(n_sums):
                accumulators[i] = zero
            for i in range(n_tops):
                tops[i] = FLOOR
                sums[i] = zero
            unit = first_of(stream, first_unit)
            while unit < n_units:
                # A lane waits for its own copies, then the lanes meet: others read what it copied. And all have read
                # the unit before, whose place the next copies take.
                wait_unit()
                cuda.syncwarp()
                if next_unit >= 0:
                    copy_unit(writing, next_unit, place, entries, k, v, end, kv_head, n_kv, lane)
                    next_unit, place, entries, later_stream, later_unit, later = follow(
                        next_unit, place, entries, later_stream, later_unit, later, table, end_stream, first_unit,
                        n_units, lane,
                    )  # fmt: skip
                isa.copy_commit()
                score(scores, queries, base, i32(reading + k_lane))
                values, careful, sees = i32(reading + v_lane), i32(1), i32(1)
                # The usual path: every row sees every key, and no maximum moves after the stream's first unit.
                if unit >= lowest and unit < limit:
                    if i32(unit - first_unit) < interleave:
                        start_tops(0, scores, tops, scale)
                    careful = grows(scores, tops, scale)
                if careful != 0:
                    sees = sees_any(scores, unit, ctx, end, seen_by_all, b, tokens, window, masks, all_positions, lane)
                    if sees != 0:
                        raise_tops(scores, accumulators, tops, sums, scale, lane)
                if sees != 0:
                    add_values(0, scores, accumulators, tops, sums, values, i32(values ^ 32), scale)
                if counting:
                    executed = i32(executed + sees)
                    mask_empty = i32(mask_empty + 1 - sees)
                unit = i32(unit + interleave)
                writing = reading
                reading = i32(reading + unit_bytes)
                if reading == i32(ring + ring_bytes):
                    reading = ring
            join_stream(accumulators, tops, sums, joined, joined_tops, joined_sums, scale, lane)
            stream = i32(stream + 1)

        cuda.syncwarp()  # all lanes have read the last unit: the ring is free
        first_row = i64(i32(pinned(b) * n_kv + kv_head) * splits) * rows
        ends = i32(base + table_offset)
        lay_tile(0, ring, ends, warp, lane, joined, joined_tops, joined_sums)
        # All warps' sums lie there.
        cuda.syncthreads()
        join_tile(0, ends, tid, rows, first_row, first_split, partial, tops_sums, scale)
        wait_all()
        if counting:
            count(counters, executed, mask_empty, n_units, first_unit, table_width, warp, lane)

    return attention_splits
