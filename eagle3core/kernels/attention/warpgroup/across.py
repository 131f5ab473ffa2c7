"""Sessions so short that no stream has a second unit: `attention_group` takes sets across the streams of a split.

A set along a stream would be three quarters empty there, and every stream would make products of a whole set for the
scores of one unit. Across streams a set's units are neighbours, unit u of stream u; scores of all are made at once,
then each unit's sums are those of its stream, which join the split one after the other as in any walk: equal bits.

While the values of a unit are added, the next one is weighed; while the last of a set joins, the scores of the next set
are made. Not of trees: with nodes to follow such kernels gained by themselves and lost in a step (docs/log.md).

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, UNIT, Shape
from eagle3core.kernels.attention.pieces import make_pinned, make_take_unit
from eagle3core.kernels.attention.tile import Steps
from eagle3core.kernels.attention.warpgroup.stages import (
    TILE_BYTES,
    half_set_bytes,
    make_await_set,
    make_clear_past,
    make_place_of,
    make_products,
)
from eagle3core.kernels.attention.warpgroup.sums import SplitSums, holds_sums


def has_short_walk(shape: Shape, groups: int, units: int) -> bool:
    """Whether sets across streams stay within a split, whose sums a warp holds alone."""
    return holds_sums(groups) and shape.streams % units == 0


def make_is_short(isa: Any, shape: Shape) -> Any:
    """`is_short(first_unit, n_units)`: whether stream u has unit u and no other."""
    i32, interleave = isa.i32, shape.splits * shape.streams

    def is_short(first_unit: Any, n_units: Any) -> Any:
        return i32(first_unit == 0 and n_units <= interleave)

    return isa.inlined(is_short)


def make_short_walk(
    isa: Any, shape: Shape, *, row_warps: int, units: int, stages: int, counting: bool, words: int, at_once: bool,
    steps: Steps, split_sums: SplitSums, leave_set: Any, named_barrier: int,
) -> Any:  # fmt: skip
    """`walk(ring, full, empty, ...)`: (`executed`, `mask_empty`) after all units from `first` to `stop`, by one warp.

    Args:
        row_warps, units, stages, counting, words: as in `attention_group`.
        at_once: units of a set that all rows see whole follow each other without a loop.
        steps, split_sums, leave_set: the kernel's. named_barrier: as in `make_clear_past`.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    hide, start_tops, weigh = steps.hide, steps.start_tops, steps.weigh
    join, leave = split_sums.join, split_sums.leave
    pinned, take_unit = make_pinned(isa), make_take_unit(isa, units=units, unit_scores=8)
    products = make_products(isa, shape, units=units)
    score, begin_alone = products.score, products.begin_alone
    await_set, place_of = make_await_set(isa), make_place_of(isa, stages)
    clear_past = make_clear_past(isa, shape, units=units, row_warps=row_warps, named_barrier=named_barrier)
    settle_scores = isa.group_settle(UNIT * units)
    settle_sums, settle_older_sums = isa.group_settle(shape.dim), isa.group_settle(shape.dim, 1)
    zero, splits, n_accumulators, n_scores = np.float32(0), shape.splits, shape.dim // 2, 8 * units
    set_bytes, keys_bytes = units * shape.unit_bytes, shape.dim // 64 * half_set_bytes(units)
    is_split = shape.streams == units
    split_mask, stream_shift = shape.streams - 1, shape.streams.bit_length() - 1

    def weigh_unit(
        u: Any, unit: Any, values: Any, scores: Any, weights: Any, tops: Any, sums: Any, scale: Any, masks: Any,
        all_positions: Any, b: Any, row0: Any, tokens: Any, ctx: Any, end: Any, window: Any, seen_by_all: Any,
        row_warp: Any, own_group: Any,
    ) -> Any:  # fmt: skip
        """Unit u of a set, which is `unit`: weights of its values; 1 if a row of this warp sees any of its keys."""
        one = cuda.local.array(8, f32)
        take_unit(u, scores, one)
        first, sees, here = i32(unit * UNIT), i32(1), isa.lane_number()
        if i32(first + UNIT) > ctx or first < seen_by_all:
            token0 = i32(pinned(b) * tokens)
            mask = masks + i64(token0 * ((tokens + 31) >> 5)) * 4
            if words > 0:
                mask = masks + i64(i32(token0 * words)) * 4
            positions = all_positions + i64(token0) * 4
            sees = isa.any_lane(hide(one, first, row0, tokens, ctx, end, window, mask, positions, here))
        if i32(first + UNIT) > end:  # so for all warps of the ring
            clear_past(i32(values + u * TILE_BYTES), i32(end - first), i32(row_warp * 32 + here), own_group)
        for r in range(2):
            tops[r], sums[r] = FLOOR, zero
        start_tops(0, one, tops, scale)
        weigh(0, one, weights, tops, sums, scale)
        return sees

    weigh_unit = isa.inlined(weigh_unit)

    def add_careful(
        unit: Any, n_there: Any, values: Any, scores: Any, weights: Any, accumulators: Any, tops: Any, sums: Any,
        held: Any, total_tops: Any, total_sums: Any, totals: Any, scale: Any, masks: Any, all_positions: Any, b: Any,
        row0: Any, tokens: Any, ctx: Any, end: Any, window: Any, seen_by_all: Any, row_warp: Any, own_group: Any,
    ) -> Any:  # fmt: skip
        """All units of a set join but the last, which is weighed; how many of them a row of this warp sees."""
        later_weights, later_tops = cuda.local.array(4, i32), cuda.local.array(2, f32)
        later_sums, u = cuda.local.array(2, f32), i32(0)
        n_seen = weigh_unit(
            u, unit, values, scores, weights, tops, sums, scale, masks, all_positions, b, row0, tokens, ctx, end,
            window, seen_by_all, row_warp, own_group,
        )  # fmt: skip
        while i32(u + 1) < n_there:
            isa.group_fence()
            begin_alone(0, weights, accumulators, i32(values + u * TILE_BYTES))
            isa.group_commit()
            sees = weigh_unit(
                i32(u + 1), i32(unit + u + 1), values, scores, later_weights, later_tops, later_sums, scale, masks,
                all_positions, b, row0, tokens, ctx, end, window, seen_by_all, row_warp, own_group,
            )  # fmt: skip
            n_seen = i32(n_seen + sees)
            settle_sums(accumulators)
            is_first = i32(unit + u) & split_mask == 0
            join(totals, is_first, accumulators, tops, sums, held, total_tops, total_sums, scale)
            for i in range(4):
                # Merged with the weights under way, they would keep the products from running on.
                weights[i] = pinned(later_weights[i])
            for r in range(2):
                tops[r], sums[r] = later_tops[r], later_sums[r]
            u = i32(u + 1)
        return n_seen

    def add_unit(
        u: Any, is_first: Any, values: Any, scores: Any, weights: Any, tops: Any, sums: Any, accumulators: Any,
        held: Any, total_tops: Any, total_sums: Any, totals: Any, scale: Any,
    ) -> None:  # fmt: skip
        """Unit u joins, and the one after is weighed meanwhile."""
        later_weights, later_tops = cuda.local.array(4, i32), cuda.local.array(2, f32)
        later_sums = cuda.local.array(2, f32)
        isa.group_fence()
        begin_alone(0, weights, accumulators, i32(values + u * TILE_BYTES))
        isa.group_commit()
        for r in range(2):
            later_tops[r], later_sums[r] = FLOOR, zero
        start_tops(8 * (u + 1), scores, later_tops, scale)
        weigh(8 * (u + 1), scores, later_weights, later_tops, later_sums, scale)
        settle_sums(accumulators)
        join(totals, is_first, accumulators, tops, sums, held, total_tops, total_sums, scale)
        for i in range(4):
            weights[i] = pinned(later_weights[i])
        for r in range(2):
            tops[r], sums[r] = later_tops[r], later_sums[r]

    add_unit = isa.inlined(add_unit)

    def add_whole(
        unit: Any, values: Any, scores: Any, weights: Any, accumulators: Any, tops: Any, sums: Any, held: Any,
        total_tops: Any, total_sums: Any, totals: Any, scale: Any,
    ) -> None:  # fmt: skip
        """`add_careful` where all rows see all keys of a whole set."""
        for r in range(2):
            tops[r], sums[r] = FLOOR, zero
        start_tops(0, scores, tops, scale)
        weigh(0, scores, weights, tops, sums, scale)
        add_unit(
            0, is_split or unit & split_mask == 0, values, scores, weights, tops, sums, accumulators, held, total_tops,
            total_sums, totals, scale,
        )  # fmt: skip
        for u in range(1, units - 1):
            add_unit(
                u, False, values, scores, weights, tops, sums, accumulators, held, total_tops, total_sums, totals,
                scale,
            )  # fmt: skip

    add_careful, add_whole = isa.inlined(add_careful), isa.inlined(add_whole)

    def walk(
        ring: Any, full: Any, empty: Any, totals: Any, first: Any, stop: Any, n_units: Any, queries: Any, scale: Any,
        masks: Any, all_positions: Any, b: Any, n_kv: Any, row0: Any, rows: Any, tokens: Any, ctx: Any, end: Any,
        window: Any, seen_by_all: Any, row_warp: Any, own_group: Any, partial: Any, tops_sums: Any,
    ) -> Any:  # fmt: skip
        executed, mask_empty = i32(0), i32(0)
        accumulators, held = cuda.local.array(n_accumulators, f32), cuda.local.array(n_accumulators, f32)
        scores = cuda.local.array(n_scores, f32)
        tops, sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
        total_tops, total_sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
        weights = cuda.local.array(4, i32)
        last, unit, turn = i32(min(stop, n_units)), i32(first), i32(0)
        if unit < last:
            await_set(full, i32(0))
            score(scores, queries, ring)
            isa.group_commit()
            settle_scores(scores)
        while unit < last:
            # The scores are there. Next comes the set after, or this one once more, whose scores nobody reads.
            next_turn = turn
            if i32(unit + units) < last:
                next_turn = i32(turn + 1)
                if next_turn == 2 * stages:
                    next_turn = i32(0)
            slot, _ = place_of(turn)
            values = i32(ring + slot * set_bytes + keys_bytes)
            n_there = i32(min(last - unit, units))
            n_seen, u = n_there, i32(n_there - 1)
            if at_once and n_there == units and i32((unit + units) * UNIT) <= ctx and i32(unit * UNIT) >= seen_by_all:
                add_whole(
                    unit, values, scores, weights, accumulators, tops, sums, held, total_tops, total_sums, totals,
                    scale,
                )  # fmt: skip
            else:
                n_seen = add_careful(
                    unit, n_there, values, scores, weights, accumulators, tops, sums, held, total_tops, total_sums,
                    totals, scale, masks, all_positions, b, row0, tokens, ctx, end, window, seen_by_all, row_warp,
                    own_group,
                )  # fmt: skip
            isa.group_fence()
            begin_alone(0, weights, accumulators, i32(values + u * TILE_BYTES))
            isa.group_commit()
            next_slot, next_parity = place_of(next_turn)
            await_set(i32(full + next_slot * 8), next_parity)
            score(scores, queries, i32(ring + next_slot * set_bytes))
            isa.group_commit()
            settle_older_sums(accumulators)
            here, own = isa.lane_number(), i32(unit + u)
            # All that this warp reads of the stage has been read; of the last one, which stays, scores are made again.
            leave_set(i32(empty + slot * 8), here)
            join(totals, own & split_mask == 0, accumulators, tops, sums, held, total_tops, total_sums, scale)
            if own & split_mask == split_mask or i32(own + 1) == last:
                # Read again: held, it would cost a register.
                head = i32(pinned(b) * n_kv + i32(cuda.blockIdx.y))
                first_row, split = i32(i32(head * splits) * rows), i32(own >> stream_shift)
                leave(
                    i32(totals + here * 16), split, i32((own | split_mask) + 1) == stop, row0, rows, first_row, here,
                    accumulators, held, total_tops, total_sums, partial, tops_sums, scale,
                )  # fmt: skip
            settle_scores(scores)
            if counting:
                executed, mask_empty = i32(executed + n_seen), i32(mask_empty + n_there - n_seen)
            unit, turn = i32(unit + units), next_turn
        return executed, mask_empty

    return isa.inlined(walk)
