"""Attention kernel for sm_90a and 64 query rows a key head or more: warpgroups multiply, another warp fetches.

A block owns one (sequence, key head), up to 16 `row_warps` rows and `run` splits, as in `attention_rows`; so it is with
`groups`, sets of units, totals and turns, and the bits are the same. But four warps multiply together (`wgmma`): each
key and value is read from shared memory once for 64 rows, and by the tensor cores themselves. A set lies in a stage of
a ring (`stages`), with two barriers: `full`, which the copied bytes complete, and `empty`, where the multiplying warps
arrive.

While the values of a set are added, the scores of the next set are made. Sums are waited for alone: where a stream
ends, they join its split while those scores are still under way. Meanwhile the other warpgroup weighs its set, for
which the tensor cores are not needed. A warpgroup goes unit by unit (`careful`) if any of its warps has to, as all of
its products are made together: its warps tell each other so at a barrier of their own.

Every wait is met: fetching and multiplying warps go through the same sets (`follow`), a stage is waited for once by
each and arrived at once by each, and turns are passed on whether a stream has units or not.

Source: derived here; warps with roles after FlashAttention-3, arXiv 2407.08608.
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
from eagle3core.kernels.attention.paths import make_paths
from eagle3core.kernels.attention.pieces import make_pinned
from eagle3core.kernels.attention.ring import make_load_tile, make_ring
from eagle3core.kernels.attention.rows import TILE_ROWS
from eagle3core.kernels.attention.tile import make_steps
from eagle3core.kernels.attention.warpgroup.careful import make_one_by_one
from eagle3core.kernels.attention.warpgroup.shared import group_offsets
from eagle3core.kernels.attention.warpgroup.stages import half_set_bytes, make_fetch_sets, make_last_of, make_products
from eagle3core.kernels.attention.warpgroup.sums import holds_sums, make_split_sums, sums_bytes

FETCHING_WARPS = 4  # of a block: a warpgroup, which can give registers to the others; one of it fetches for each ring
MULTIPLYING_WARPS = 8  # at most; with those that fetch a processor has 168 registers for each lane
# Of a lane. Fetching takes addresses alone; multiplying 144 for sums, queries, scores and weights. Together they are
# those of the launch, else the wait for more would never end.
_FETCHING_REGISTERS, _MULTIPLYING_REGISTERS = 24, 240
# Named barriers: that of a tree's nodes, those of `group_any` for two warpgroups, and of values past the end, by ring.
_NODES_BARRIER, _ANY_BARRIER, _CLEARED_BARRIER = 1, 2, 4


def make_attention_group(
    isa: Any, *, shape: Shape, row_warps: int, groups: int, units: int, stages: int, joined: bool, counting: bool,
    overlap: bool, words: int = 0, windowed: bool = False, tail: int = 0,
) -> Any:  # fmt: skip
    """The kernel; grid (row blocks * blocks of `run` splits, key heads, sequences).

    Args:
        row_warps: warps that multiply what a ring holds, 16 rows each: 4 or 8.
        groups: streams walked side by side, each with a ring: 1 or 2; all warps that multiply are 8 at most.
        units: of a set: 4, or 2 with two groups.
        stages: sets in a ring, at least 2.
        joined, counting, overlap, words, windowed, tail: as in `attention_rows`.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    first_of, _ = make_walk(isa, shape)
    assert groups <= FETCHING_WARPS, "a warp fetches for each ring"
    paths, pieces = tail > 0, shape.pieces
    n_warps, wait_all = row_warps * groups, isa.COPY_WAIT[0]
    moves_registers = n_warps == MULTIPLYING_WARPS  # fewer warps have enough
    span = make_span(isa, earlier=words > 0, paths=paths, windowed=windowed)
    load_tile = make_load_tile(isa, shape, held=pieces)
    owns_tail, load_tail, add_paths = make_paths(
        isa, shape, threads=32 * n_warps, held=pieces, tail=tail, tiles=1, windowed=windowed
    )
    follow, _, _ = make_ring(isa, shape, row_warps=units, groups=groups, units=units)
    last_of = make_last_of(isa, shape, groups=groups)
    fetch_sets = make_fetch_sets(isa, shape, groups=groups, units=units, stages=stages, overlap=overlap)
    steps = make_steps(isa, shape, tiles=1, half=False, held=pieces, units=units, words=words, windowed=windowed)
    start_tops, grows, weigh = steps.start_tops, steps.grows, steps.weigh
    one_by_one = make_one_by_one(
        isa, shape, row_warps=row_warps, units=units, counting=counting, words=words, paths=paths, steps=steps,
        add_paths=add_paths, named_barrier=_CLEARED_BARRIER,
    )  # fmt: skip
    holds = holds_sums(groups)
    pinned = make_pinned(isa)
    begin, join, leave, leave_empty = make_split_sums(isa, shape, groups=groups, joined=joined)
    score, add, _ = make_products(isa, shape, units=units)
    settle_scores = isa.group_settle(UNIT * units)
    forget, settle_sums = isa.group_forget(shape.dim), isa.group_settle(shape.dim, 1)
    fewer_registers = isa.fewer_registers(_FETCHING_REGISTERS)
    more_registers = isa.more_registers(_MULTIPLYING_REGISTERS)

    group, dim, splits, streams = shape.group, shape.dim, shape.splits, shape.streams
    zero, interleave = np.float32(0), splits * streams
    keys_bytes = dim // 64 * half_set_bytes(units)
    set_bytes, step = units * shape.unit_bytes, units * interleave
    ring_bytes, own_totals = stages * set_bytes, sums_bytes(shape, groups)
    totals_offset, tail_offset, turns_offset, full_offset, empty_offset = group_offsets(
        shape, row_warps, groups, units, stages, tail
    )
    row_shift, stream_shift = row_warps.bit_length() - 1, streams.bit_length() - 1
    split_mask, unit_shift = streams - 1, UNIT.bit_length() - 1
    n_queries, n_accumulators, n_scores, n_weights = 8 * pieces, dim // 2, 8 * units, 4 * units
    n_held = n_accumulators if holds else 1
    counts_turns = windowed  # the ring's place and its round in one register: with two the assembler spilled
    uniform = isa.warp_max_i32  # of equal values: tells the assembler that one register serves the whole warp

    def await_set(full: Any, parity: Any) -> None:
        isa.mbarrier_wait(full, parity)
        isa.group_fence()

    def weigh_set(scores: Any, weights: Any, own: Any, tops: Any, sums: Any, scale: Any) -> None:
        for u in range(units):
            weigh(8 * u, scores, own, tops, sums, scale)
            for i in range(4):
                weights[4 * u + i] = own[i]

    def place_of(turn: Any) -> Any:
        slot, parity = turn, i32(0)
        if turn >= stages:
            slot, parity = i32(turn - stages), i32(1)
        return slot, parity

    weigh_set, await_set, place_of = isa.inlined(weigh_set), isa.inlined(await_set), isa.inlined(place_of)

    def attention_group(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any, k_map: Any, v_map: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), uniform(i32(tid >> 5))
        kv_head, n_kv = uniform(cuda.blockIdx.y), i32(cuda.gridDim.y)
        # The last first: of a prompt's spans that is the one of most keys, and no long block is left over at the end.
        b = uniform(i32(cuda.gridDim.z - 1) - i32(cuda.blockIdx.z))
        rows = i32(tokens * group)
        row_blocks = i32((rows + (TILE_ROWS * row_warps - 1)) >> (4 + row_shift))
        part = uniform(cuda.blockIdx.x // row_blocks)
        # A kilobyte is eight rows, by whose place there columns are exchanged.
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=1024))
        if tid < groups * stages:
            isa.mbarrier_init(i32(base + full_offset + tid * 8), i32(1))
            isa.mbarrier_init(i32(base + empty_offset + tid * 8), i32(row_warps * isa.ARRIVING_LANES))
            isa.mbarrier_fence_init()
        if tid < groups * row_warps:
            isa.mbarrier_init(i32(base + turns_offset + tid * 8), i32(isa.ARRIVING_LANES))
        cuda.syncthreads()
        ctx = uniform(isa.load_u32(prefix + b * 4))
        end, n_units, first_unit, seen_by_all = span(ctx, tokens, window)
        table = tables + i64(b) * table_width * 4
        first_stream = i32(part * run * streams)
        last_stream = i32(min((part + 1) * run, splits) * streams)
        stop = last_stream
        if holds and first_unit == 0:  # splits past the last unit have no keys
            stop = i32(min(last_stream, i32(n_units + (streams - 1)) & -streams))
        if overlap:
            isa.let_next_start()

        if warp >= n_warps:
            if moves_registers:
                fewer_registers()
            own_group = i32(warp - n_warps)
            if own_group < groups:
                first = i32(first_of(i32(first_stream + own_group), first_unit) - step)
                first = follow(first, last_stream, first_unit, n_units)
                fetch_sets(
                    i32(base + own_group * ring_bytes), i32(base + full_offset + own_group * (8 * stages)),
                    i32(base + empty_offset + own_group * (8 * stages)), k_map, v_map, table, first, last_stream, ctx,
                    first_unit, n_units, kv_head, n_kv, lane,
                )  # fmt: skip
            # A block that never waited would end before the kernel before, and let the next one start too early.
            if overlap:
                isa.wait_previous()
        else:
            if moves_registers:
                more_registers()
            row_warp, own_group = i32(warp & (row_warps - 1)), i32(warp >> row_shift)
            row0 = i32(((cuda.blockIdx.x - part * row_blocks) * row_warps + row_warp) * TILE_ROWS)
            ring = i32(base + own_group * ring_bytes)
            totals = i32(base + totals_offset + row_warp * own_totals)
            turns = i32(base + turns_offset + row_warp * (8 * groups))
            full = i32(base + full_offset + own_group * (8 * stages))
            empty = i32(base + empty_offset + own_group * (8 * stages))
            if overlap:
                isa.wait_previous()
            has_tail = i32(0)
            if paths:
                has_tail = owns_tail(ctx, n_units, first_stream, last_stream)
                if has_tail != 0:
                    mask = masks + i64(i32(b * tokens) * ((tokens + 31) >> 5)) * 4
                    load_tail(i32(base + tail_offset), k, v, table, mask, tokens, ctx, kv_head, n_kv, tid)
            queries, spare = cuda.local.array(n_queries, i32), cuda.local.array(8, i32)
            load_tile(0, q, queries, spare, i32(0), b, kv_head, n_kv, tokens, row0, lane)
            if paths and has_tail != 0:
                wait_all()
                isa.named_barrier(_NODES_BARRIER, 32 * n_warps)  # every warp reads what all have brought
            accumulators = cuda.local.array(n_accumulators, f32)
            scores = cuda.local.array(n_scores, f32)
            weights, own_weights = cuda.local.array(n_weights, i32), cuda.local.array(4, i32)
            tops, sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
            total_tops, total_sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
            held = cuda.local.array(n_held, f32)
            if not holds and own_group == 0:
                begin(i32(totals + lane * 16))
            executed, mask_empty = i32(0), i32(0)
            slot, parity, turn, turn_parity = i32(0), i32(0), i32(0), i32(0)
            stream = i32(first_stream + own_group)
            last_with_keys = last_of(stream, last_stream, first_unit, n_units)
            if stream <= last_with_keys:
                await_set(full, parity)
                score(scores, queries, ring)
                isa.group_commit()
                settle_scores(scores)
            unit, goes_on = first_of(stream, first_unit), i32(0)  # a stream's first set begins the sums
            forget(accumulators)
            for i in range(2):
                tops[i] = FLOOR
                sums[i] = zero
            while stream < stop:
                if unit < n_units:
                    # The scores are there. Next comes the set after, or this one once more, whose scores nobody reads.
                    next_slot, next_parity, next_turn = slot, parity, turn
                    if i32(unit + step) < n_units or stream < last_with_keys:
                        next_slot, next_turn = i32(slot + 1), i32(turn + 1)
                        if next_slot == stages:
                            next_slot, next_parity = i32(0), i32(parity ^ 1)
                        if next_turn == 2 * stages:
                            next_turn = i32(0)
                    if counts_turns:
                        slot, _ = place_of(turn)
                        next_slot, next_parity = place_of(next_turn)
                    reading, later = i32(ring + slot * set_bytes), i32(ring + next_slot * set_bytes)
                    careful = i32(0)
                    if i32((unit + (step - interleave)) * UNIT + UNIT) > ctx or i32(unit * UNIT) < seen_by_all:
                        careful = i32(1)
                    else:
                        if goes_on == 0:
                            start_tops(scores, tops, scale)
                        careful = isa.group_any(i32(_ANY_BARRIER + (warp >> 2)), grows(scores, tops, scale))
                    if careful == 0:
                        weigh_set(scores, weights, own_weights, tops, sums, scale)
                        await_set(i32(full + next_slot * 8), next_parity)
                        add(weights, accumulators, goes_on, reading)
                        isa.group_commit()
                        isa.group_fence()
                        score(scores, queries, later)
                        isa.group_commit()
                        settle_sums(accumulators)
                        if counting:
                            executed = i32(executed + units)
                    else:
                        n_whole = n_units
                        if paths:
                            n_whole = i32(ctx >> unit_shift)
                        executed, mask_empty = one_by_one(
                            unit, goes_on, i32(reading + keys_bytes), scores, own_weights, accumulators, tops, sums,
                            scale, queries, i32(base + tail_offset), masks, all_positions, b, row0, tokens, ctx, end,
                            window, n_whole, n_units, seen_by_all, lane, row_warp, own_group, executed, mask_empty,
                        )  # fmt: skip
                        await_set(i32(full + next_slot * 8), next_parity)
                        score(scores, queries, later)
                        isa.group_commit()
                    # All that this warp reads of the stage has been read: its keys a set ago, its values now.
                    if lane < isa.ARRIVING_LANES:
                        isa.mbarrier_arrive(i32(empty + slot * 8))
                    slot, parity, turn = next_slot, next_parity, next_turn
                else:
                    nothing = isa.f32_of_bits(pinned(i32(0)))  # a plain zero would be chosen or not for every sum
                    for i in range(n_accumulators):
                        accumulators[i] = nothing
                unit, goes_on = i32(unit + step), i32(1)
                if unit >= n_units:
                    # The stream has ended, perhaps before it began: its turn to join the sums of the split.
                    place = i32(stream & split_mask)
                    if groups > 1 and stream > first_stream:
                        # The streams of a split join in ascending order, whichever group is ahead.
                        isa.mbarrier_wait(i32(turns + own_group * 8), turn_parity)
                        turn_parity = i32(turn_parity ^ 1)
                    here = isa.lane_number()
                    totals_at = i32(totals + here * 16)
                    join(totals_at, place == 0, accumulators, tops, sums, held, total_tops, total_sums, scale)
                    if place == split_mask:
                        # Read again: held, it would cost a register.
                        head = i32(pinned(b) * n_kv + i32(cuda.blockIdx.y))
                        first_row, split = i32(i32(head * splits) * rows), i32(stream >> stream_shift)
                        leave(
                            totals_at, split, i32(stream + 1) == stop, row0, rows, first_row, here, accumulators, held,
                            total_tops, total_sums, partial, tops_sums, scale,
                        )  # fmt: skip
                    if groups > 1:
                        cuda.syncwarp()
                        if lane < isa.ARRIVING_LANES:
                            isa.mbarrier_arrive(i32(turns + ((own_group + 1) & (groups - 1)) * 8))
                    stream = i32(stream + groups)
                    unit, goes_on = first_of(stream, first_unit), i32(0)
                    forget(accumulators)
                    for i in range(2):
                        tops[i] = FLOOR
                        sums[i] = zero
                settle_scores(scores)
            if holds:
                head = i32(b * n_kv + i32(cuda.blockIdx.y))
                leave_empty(
                    i32(max(stop, first_stream) >> stream_shift), i32(last_stream >> stream_shift), row0, rows,
                    i32(i32(head * splits) * rows), lane, tops_sums,
                )  # fmt: skip
            if counting and lane == 0 and row0 < rows:
                isa.atomic_add_i32(counters + 4 * TILE_EXECUTED, executed)
                isa.atomic_add_i32(counters + 4 * TILE_MASK_EMPTY, mask_empty)
                if part == 0 and own_group == 0:
                    held_units = i32(max(n_units - first_unit, 0))
                    isa.atomic_add_i32(counters + 4 * TILE_TOTAL, i32(table_width * 4))
                    isa.atomic_add_i32(counters + 4 * TILE_SPAN_EMPTY, i32(table_width * 4 - held_units))

    return attention_group
