"""The sums of a split in `attention_group` where a ring has a stream at a time: they stay in a warp's registers.

Streams join them there, so a stream's end costs no turn through shared memory; what is left of that memory holds the
sums of a bundle, which a split joins when it ends and which leave the block once a bundle. Where a block does not have
whole bundles, splits leave it from their registers.

Source: the order of sums is that of `layout`; the words are those of `totals`, so equal bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, Shape
from eagle3core.kernels.attention.totals import LANES, make_join_row, make_weigh


def bundle_bytes(shape: Shape) -> int:
    """Shared memory of one warp's sums of a bundle, bytes: 16 a lane for 8 columns of 16 rows; maxima and sums."""
    return (shape.dim // 8 + 1) * LANES


def make_held_totals(isa: Any, shape: Shape, *, joined: bool) -> tuple[Any, Any, Any]:
    """`join`, `leave` and `leave_empty`, of one warp's 16 rows.

    `join(is_first, accumulators, tops, sums, totals, total_tops, total_sums, scale)`: a stream joins those of its split
    that came before, or begins one; `totals` holds D / 2 f32.
    `leave(at, split, is_last, row0, rows, first_row, lane, totals, total_tops, total_sums, partial, tops_sums, scale)`:
    the split's sums go out, or join those of its bundle at `at`, the lane's own address, which go out with its last
    split, or with that one which `is_last` of the block. `first_row` is that of split 0.
    `leave_empty(split, end, row0, rows, first_row, lane, tops_sums)`: splits of which none has keys; of a bundle whose
    first splits have been left it leaves nothing.

    Args:
        joined: all splits of a bundle are left by this block, one after the other.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    dim, n_columns, zero = shape.dim, shape.dim // 8, np.float32(0)
    step, weigh, join_row = shape.bundle if joined else 1, make_weigh(isa), make_join_row(isa)
    rows_at = n_columns * LANES

    def join(
        is_first: Any, accumulators: Any, tops: Any, sums: Any, totals: Any, total_tops: Any, total_sums: Any,
        scale: Any,
    ) -> None:  # fmt: skip
        keep, take = cuda.local.array(2, f32), cuda.local.array(2, f32)
        if is_first:
            for r in range(2):
                total_tops[r], total_sums[r] = FLOOR, zero
        for r in range(2):
            join_row(r, total_tops, total_sums, keep, take, tops, sums, scale)
        if is_first:
            for i in range(4 * n_columns):
                totals[i] = accumulators[i]
        else:
            for i in range(4 * n_columns):
                r = (i >> 1) & 1
                totals[i] = isa.fused(totals[i], keep[r], isa.product(accumulators[i], take[r]))

    def join_bundle(at: Any, totals: Any, total_tops: Any, total_sums: Any, scale: Any) -> None:
        held = isa.shared_load_f32x4(i32(at + rows_at))
        keep, take = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for r in range(2):
            high, kept, taken = weigh(held[r], total_tops[r], scale)
            keep[r], take[r], total_tops[r] = kept, taken, high
            total_sums[r] = isa.fused(held[2 + r], kept, isa.product(total_sums[r], taken))
        for o in range(n_columns):
            t = isa.shared_load_f32x4(i32(at + o * LANES))
            for c in range(4):
                r = c >> 1
                totals[4 * o + c] = isa.fused(t[c], keep[r], isa.product(totals[4 * o + c], take[r]))

    def keep_bundle(at: Any, totals: Any, total_tops: Any, total_sums: Any) -> None:
        isa.shared_store_f32x4(i32(at + rows_at), total_tops[0], total_tops[1], total_sums[0], total_sums[1])
        for o in range(n_columns):
            i = 4 * o
            isa.shared_store_f32x4(i32(at + o * LANES), totals[i], totals[i + 1], totals[i + 2], totals[i + 3])

    def leave_rows(
        row: Any, rows: Any, place: Any, lane: Any, totals: Any, total_tops: Any, total_sums: Any, partial: Any,
        tops_sums: Any,
    ) -> None:  # fmt: skip
        near, far, wide = row < rows, row + 8 < rows, i64(place)
        target, beyond = partial + wide * (4 * dim) + (lane & 3) * 8, 8 * 4 * dim
        if (lane & 3) == 0:
            # Also FLOOR and 0: they say that the row has no values here.
            if near:
                isa.store_f32x2(tops_sums + wide * 8, total_tops[0], total_sums[0])
            if far:
                isa.store_f32x2(tops_sums + wide * 8 + 8 * 8, total_tops[1], total_sums[1])
        near, far = near and total_sums[0] != zero, far and total_sums[1] != zero  # else nobody reads them
        for n in range(n_columns):
            if near:
                isa.store_f32x2(target + n * 32, totals[4 * n], totals[4 * n + 1])
            if far:
                isa.store_f32x2(target + beyond + n * 32, totals[4 * n + 2], totals[4 * n + 3])

    join_bundle, keep_bundle, leave_rows = isa.inlined(join_bundle), isa.inlined(keep_bundle), isa.inlined(leave_rows)

    def leave(
        at: Any, split: Any, is_last: Any, row0: Any, rows: Any, first_row: Any, lane: Any, totals: Any,
        total_tops: Any, total_sums: Any, partial: Any, tops_sums: Any, scale: Any,
    ) -> None:  # fmt: skip
        place = i32(split & (step - 1))
        if joined and place > 0:
            join_bundle(at, totals, total_tops, total_sums, scale)
        if joined and place < step - 1 and not is_last:
            keep_bundle(at, totals, total_tops, total_sums)
        else:
            row = i32(row0 + (lane >> 2))
            first = i32(first_row + i32(split - place) * rows + row)
            leave_rows(row, rows, first, lane, totals, total_tops, total_sums, partial, tops_sums)

    def leave_empty(split: Any, end: Any, row0: Any, rows: Any, first_row: Any, lane: Any, tops_sums: Any) -> None:
        s, row = i32(i32(split + (step - 1)) & -step), i32(row0 + (lane >> 2))
        while s < end:
            place = tops_sums + i64(i32(first_row + s * rows + row)) * 8
            if (lane & 3) == 0 and row < rows:
                isa.store_f32x2(place, FLOOR, zero)
            if (lane & 3) == 0 and row + 8 < rows:
                isa.store_f32x2(place + 8 * 8, FLOOR, zero)
            s = i32(s + step)

    return isa.inlined(join), isa.inlined(leave), isa.inlined(leave_empty)
