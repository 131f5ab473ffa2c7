"""A set of `attention_group` unit by unit: where keys are hidden or missing, maxima move, or nodes of a tree follow.

Its scores have been made with those of the whole set; here each unit's are hidden, weighed and multiplied by values
before the next one's, in the order of a whole set, so with its bits.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import UNIT, Shape
from eagle3core.kernels.attention.pieces import make_pinned, make_take_unit
from eagle3core.kernels.attention.tile import Steps
from eagle3core.kernels.attention.warpgroup.stages import TILE_BYTES, make_clear_past, make_products


def make_one_by_one(
    isa: Any, shape: Shape, *, row_warps: int, units: int, counting: bool, words: int, paths: bool, steps: Steps,
    add_paths: Any, named_barrier: int,
) -> Any:  # fmt: skip
    """`one_by_one(unit, goes_on, values, ...)`: (`executed`, `mask_empty`) after the set that begins at `unit`.

    All warps of a warpgroup come here together, with their scores of the set; `values` is where its values begin, and
    `tail_at` where `load_tail` has put nodes. Where `goes_on` is 0 the set begins the sums. Units from `n_whole` on, of
    the `n_units`, hold nodes of a tree.

    Args:
        row_warps, units, counting, words: as in `attention_group`. paths: it has a tail.
        steps, add_paths: the kernel's. named_barrier: as in `make_clear_past`.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    hide, raise_tops, weigh = steps.hide, steps.raise_tops, steps.weigh
    pinned, take_unit = make_pinned(isa), make_take_unit(isa, units=units, unit_scores=8)
    add_alone = make_products(isa, shape, units=units).add_alone
    clear_past = make_clear_past(isa, shape, units=units, row_warps=row_warps, named_barrier=named_barrier)
    settle_sums = isa.group_settle(shape.dim)
    zero, n_accumulators, interleave = np.float32(0), shape.dim // 2, shape.splits * shape.streams

    def one_by_one(
        unit: Any, goes_on: Any, values: Any, scores: Any, weights: Any, accumulators: Any, tops: Any, sums: Any,
        scale: Any, queries: Any, tail_at: Any, masks: Any, all_positions: Any, b: Any, row0: Any, tokens: Any,
        ctx: Any, end: Any, window: Any, n_whole: Any, n_units: Any, seen_by_all: Any, lane: Any, row_warp: Any,
        own_group: Any, executed: Any, mask_empty: Any,
    ) -> Any:  # fmt: skip
        one = cuda.local.array(8, f32)
        if goes_on == 0:
            for i in range(n_accumulators):
                accumulators[i] = zero
        u = i32(0)
        while u < units and i32(unit + u * interleave) < n_whole:
            take_unit(u, scores, one)
            first, sees = i32((unit + u * interleave) * UNIT), i32(1)
            if i32(first + UNIT) > ctx or first < seen_by_all:
                here, token0 = isa.lane_number(), i32(pinned(b) * tokens)
                mask = masks + i64(token0 * ((tokens + 31) >> 5)) * 4
                if words > 0:
                    mask = masks + i64(i32(token0 * words)) * 4
                positions = all_positions + i64(token0) * 4
                sees = isa.any_lane(hide(one, first, row0, tokens, ctx, end, window, mask, positions, here))
            if not paths and i32(first + UNIT) > end:  # so for all warps of the ring
                clear_past(values, i32(end - first), i32(row_warp * 32 + lane), own_group)
            # A warp whose rows see none of the keys adds zeros: the others' products are its too.
            raise_tops(one, accumulators, tops, sums, scale, lane)
            weigh(0, one, weights, tops, sums, scale)
            isa.group_fence()
            add_alone(weights, accumulators, values)
            isa.group_commit()
            settle_sums(accumulators)
            if counting:
                executed = i32(executed + sees)
                mask_empty = i32(mask_empty + 1 - sees)
            values = i32(values + TILE_BYTES)
            u = i32(u + 1)
        # A stream has one unit at most with nodes of a tree, its last: the scores are free by then.
        if paths and u < units and i32(unit + u * interleave) < n_units:
            sees = add_paths(
                tail_at, queries, i32(0), accumulators, tops, sums, tokens, ctx,
                i32((unit + u * interleave) * UNIT), row0, window, scale, isa.lane_number(),
            )  # fmt: skip
            if counting:
                executed = i32(executed + sees)
                mask_empty = i32(mask_empty + 1 - sees)
        return executed, mask_empty

    return isa.inlined(one_by_one)
