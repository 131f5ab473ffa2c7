"""Sessions of any length: `attention_group` takes sets along its streams, units of one stream `splits` * streams apart.

While the values of a set are added, the scores of the next set are made. Sums are waited for alone: where a stream
ends, they join its split while those scores are still under way. Meanwhile the other warpgroup weighs its set, for
which the tensor cores are not needed. A warpgroup goes unit by unit (`careful`) if any of its warps has to, as all of
its products are made together: its warps tell each other so at a barrier of their own.

Source: derived here; two warpgroups by turns after FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, UNIT, Shape, make_walk
from eagle3core.kernels.attention.pieces import make_pinned
from eagle3core.kernels.attention.tile import Steps
from eagle3core.kernels.attention.warpgroup.careful import make_one_by_one
from eagle3core.kernels.attention.warpgroup.stages import (
    half_set_bytes,
    make_await_set,
    make_last_of,
    make_place_of,
    make_products,
)
from eagle3core.kernels.attention.warpgroup.sums import SplitSums, holds_sums


def make_long_walk(
    isa: Any, shape: Shape, *, row_warps: int, groups: int, units: int, stages: int, counting: bool, words: int,
    paths: bool, windowed: bool, steps: Steps, split_sums: SplitSums, add_paths: Any, leave_set: Any, any_barrier: int,
    cleared_barrier: int,
) -> Any:  # fmt: skip
    """`walk(ring, full, empty, ...)`: (`executed`, `mask_empty`) after all streams of a group, by one warp.

    Args:
        row_warps, groups, units, stages, counting, words, windowed: as in `attention_group`. paths: it has a tail.
        steps, split_sums, add_paths, leave_set: the kernel's. any_barrier: of `group_any`, of the first warpgroup.
        cleared_barrier: as in `make_clear_past`.
    """
    cuda, i32, f32 = isa.cuda, isa.i32, isa.f32
    first_of, _ = make_walk(isa, shape)
    last_of = make_last_of(isa, shape, groups=groups)
    start_tops, grows, weigh = steps.start_tops, steps.grows, steps.weigh
    one_by_one = make_one_by_one(
        isa, shape, row_warps=row_warps, units=units, counting=counting, words=words, paths=paths, steps=steps,
        add_paths=add_paths, named_barrier=cleared_barrier,
    )  # fmt: skip
    holds, pinned = holds_sums(groups), make_pinned(isa)
    begin, join, leave, _ = split_sums
    products = make_products(isa, shape, units=units)
    score, add = products.score, products.add
    await_set, place_of = make_await_set(isa), make_place_of(isa, stages)
    settle_scores = isa.group_settle(UNIT * units)
    forget, settle_sums = isa.group_forget(shape.dim), isa.group_settle(shape.dim, 1)
    dim, splits, streams = shape.dim, shape.splits, shape.streams
    zero, interleave = np.float32(0), splits * streams
    keys_bytes = dim // 64 * half_set_bytes(units)
    set_bytes, step = units * shape.unit_bytes, units * interleave
    stream_shift, split_mask, unit_shift = streams.bit_length() - 1, streams - 1, UNIT.bit_length() - 1
    n_accumulators, n_scores, n_weights = dim // 2, 8 * units, 4 * units
    n_held = n_accumulators if holds else 1
    counts_turns = windowed  # the ring's place and its round in one register: with two the assembler spilled

    def weigh_set(scores: Any, weights: Any, own: Any, tops: Any, sums: Any, scale: Any) -> None:
        for u in range(units):
            weigh(8 * u, scores, own, tops, sums, scale)
            for i in range(4):
                weights[4 * u + i] = own[i]

    weigh_set = isa.inlined(weigh_set)

    def walk(
        ring: Any, full: Any, empty: Any, turns: Any, totals: Any, tail_at: Any, first_stream: Any, last_stream: Any,
        stop: Any, first_unit: Any, n_units: Any, queries: Any, scale: Any, masks: Any, all_positions: Any, b: Any,
        n_kv: Any, row0: Any, rows: Any, tokens: Any, ctx: Any, end: Any, window: Any, seen_by_all: Any, lane: Any,
        warp: Any, row_warp: Any, own_group: Any, partial: Any, tops_sums: Any,
    ) -> Any:  # fmt: skip
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
                        start_tops(0, scores, tops, scale)
                    careful = isa.group_any(i32(any_barrier + (warp >> 2)), grows(scores, tops, scale))
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
                        scale, queries, tail_at, masks, all_positions, b, row0, tokens, ctx, end,
                        window, n_whole, n_units, seen_by_all, lane, row_warp, own_group, executed, mask_empty,
                    )  # fmt: skip
                    await_set(i32(full + next_slot * 8), next_parity)
                    score(scores, queries, later)
                    isa.group_commit()
                # All that this warp reads of the stage has been read: its keys a set ago, its values now.
                leave_set(i32(empty + slot * 8), lane)
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
        return executed, mask_empty

    return isa.inlined(walk)
