"""The sums of a split in `attention_group` where a ring has a stream at a time: they stay in a warp's registers.

Streams join them there, so a stream's end costs no turn through shared memory; what is left of that memory holds the
sums of a bundle, which a split joins when it ends and which leave the block once a bundle. Where a block does not have
whole bundles, splits leave it from their registers.

Source: the order of sums is that of `layout`; the words are those of `totals`, so equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, Shape
from eagle3core.kernels.attention.totals import LANES, make_join_row, make_weigh


def bundle_bytes(shape: Shape) -> int:
    """Shared memory of one warp's sums of a bundle, bytes: 16 a lane for 8 columns of 16 rows; maxima and sums."""
    return (shape.dim // 8 + 1) * LANES


class BundleSums(NamedTuple):
    """A split's sums and those of its bundle, which lie at a lane's own address `at`; `keep` and `take` their factors.

    Attributes:
        join: `(at, tops, sums, keep, take, scale)`: maxima and sums of probabilities of a split become the bundle's.
        joined: `(at, o, totals, keep, take)`: the bundle's sums 4 o .. 4 o + 3 with those of the split.
        own: the same of a bundle's first split, which joins none.
        hold_rows: `(at, tops, sums)`: they are the bundle's from now on.
        hold_joined, hold_own: `(at, totals, keep, take)`: likewise all sums that `joined`, or `own`, gives.
    """

    join: Any
    joined: Any
    own: Any
    hold_rows: Any
    hold_joined: Any
    hold_own: Any


def make_bundle_sums(isa: Any, shape: Shape) -> BundleSums:
    """What a bundle's sums are made of, of one warp's 16 rows."""
    i32, n_columns, weigh = isa.i32, shape.dim // 8, make_weigh(isa)
    rows_at = n_columns * LANES

    def join_bundle(at: Any, tops: Any, sums: Any, keep: Any, take: Any, scale: Any) -> None:
        held = isa.shared_load_f32x4(i32(at + rows_at))
        for r in range(2):
            high, kept, taken = weigh(held[r], tops[r], scale)
            keep[r], take[r], tops[r] = kept, taken, high
            sums[r] = isa.fused(held[2 + r], kept, isa.product(sums[r], taken))

    def joined_column(at: Any, o: Any, totals: Any, keep: Any, take: Any) -> Any:
        t, i = isa.shared_load_f32x4(i32(at + o * LANES)), 4 * o
        return (
            isa.fused(t[0], keep[0], isa.product(totals[i], take[0])),
            isa.fused(t[1], keep[0], isa.product(totals[i + 1], take[0])),
            isa.fused(t[2], keep[1], isa.product(totals[i + 2], take[1])),
            isa.fused(t[3], keep[1], isa.product(totals[i + 3], take[1])),
        )

    def own_column(at: Any, o: Any, totals: Any, keep: Any, take: Any) -> Any:
        i = 4 * o
        return totals[i], totals[i + 1], totals[i + 2], totals[i + 3]

    joined_column, own_column = isa.inlined(joined_column), isa.inlined(own_column)

    def hold_rows(at: Any, tops: Any, sums: Any) -> None:
        isa.shared_store_f32x4(i32(at + rows_at), tops[0], tops[1], sums[0], sums[1])

    def make_hold(column_of: Any) -> Any:
        def hold(at: Any, totals: Any, keep: Any, take: Any) -> None:
            for o in range(n_columns):
                t = column_of(at, o, totals, keep, take)
                isa.shared_store_f32x4(i32(at + o * LANES), t[0], t[1], t[2], t[3])

        return isa.inlined(hold)

    return BundleSums(
        isa.inlined(join_bundle), joined_column, own_column, isa.inlined(hold_rows), make_hold(joined_column),
        make_hold(own_column),
    )  # fmt: skip


def make_held_join(isa: Any, shape: Shape) -> Any:
    """`join(is_first, accumulators, tops, sums, totals, total_tops, total_sums, scale)`, of one warp's 16 rows.

    A stream joins those of its split that came before, or begins one; `totals` holds D / 2 f32.
    """
    cuda, f32, zero = isa.cuda, isa.f32, np.float32(0)
    n_columns, join_row = shape.dim // 8, make_join_row(isa)

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
        # Both ways make a product, of which each sum is a register of its own; a copy of the sums, whose factor is one,
        # would have the other way's sums copied as well.
        if is_first:
            for i in range(4 * n_columns):
                totals[i] = isa.product(accumulators[i], take[(i >> 1) & 1])
        else:
            for i in range(4 * n_columns):
                r = (i >> 1) & 1
                totals[i] = isa.fused(totals[i], keep[r], isa.product(accumulators[i], take[r]))

    return isa.inlined(join)


def make_held_leave(isa: Any, shape: Shape, *, joined: bool) -> tuple[Any, Any]:
    """`leave` and `leave_empty`, of one warp's 16 rows, whose splits `attention_combine` puts together.

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
    step = shape.bundle if joined else 1
    join_bundle, joined_column, own_column, hold_rows, hold_joined, hold_own = make_bundle_sums(isa, shape)

    def make_leave_columns(column_of: Any) -> Any:
        def leave_columns(
            at: Any, totals: Any, keep: Any, take: Any, near: Any, far: Any, target: Any, beyond: Any
        ) -> None:
            for o in range(n_columns):
                t = column_of(at, o, totals, keep, take)
                if near:
                    isa.store_f32x2(target + o * 32, t[0], t[1])
                if far:
                    isa.store_f32x2(target + beyond + o * 32, t[2], t[3])

        return isa.inlined(leave_columns)

    leave_joined, leave_own = make_leave_columns(joined_column), make_leave_columns(own_column)

    # `totals` are read alone: were they written here, all would be copied to where the next stream looks for them.
    def leave(
        at: Any, split: Any, is_last: Any, row0: Any, rows: Any, first_row: Any, lane: Any, totals: Any,
        total_tops: Any, total_sums: Any, partial: Any, tops_sums: Any, scale: Any,
    ) -> None:  # fmt: skip
        place = i32(split & (step - 1))
        follows = joined and place > 0
        keep, take = cuda.local.array(2, f32), cuda.local.array(2, f32)
        tops, sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for r in range(2):
            keep[r], take[r], tops[r], sums[r] = zero, zero, total_tops[r], total_sums[r]
        if follows:
            join_bundle(at, tops, sums, keep, take, scale)
        if joined and place < step - 1 and not is_last:
            hold_rows(at, tops, sums)
            if follows:
                hold_joined(at, totals, keep, take)
            else:
                hold_own(at, totals, keep, take)
        else:
            row = i32(row0 + (lane >> 2))
            wide = i64(i32(first_row + i32(split - place) * rows + row))
            near, far = row < rows, row + 8 < rows
            target, beyond = partial + wide * (4 * dim) + (lane & 3) * 8, 8 * 4 * dim
            if (lane & 3) == 0:
                # Also FLOOR and 0: they say that the row has no values here.
                if near:
                    isa.store_f32x2(tops_sums + wide * 8, tops[0], sums[0])
                if far:
                    isa.store_f32x2(tops_sums + wide * 8 + 8 * 8, tops[1], sums[1])
            near, far = near and sums[0] != zero, far and sums[1] != zero  # else nobody reads them
            if follows:
                leave_joined(at, totals, keep, take, near, far, target, beyond)
            else:
                leave_own(at, totals, keep, take, near, far, target, beyond)

    def leave_empty(split: Any, end: Any, row0: Any, rows: Any, first_row: Any, lane: Any, tops_sums: Any) -> None:
        s, row = i32(i32(split + (step - 1)) & -step), i32(row0 + (lane >> 2))
        while s < end:
            place = tops_sums + i64(i32(first_row + s * rows + row)) * 8
            if (lane & 3) == 0 and row < rows:
                isa.store_f32x2(place, FLOOR, zero)
            if (lane & 3) == 0 and row + 8 < rows:
                isa.store_f32x2(place + 8 * 8, FLOOR, zero)
            s = i32(s + step)

    return isa.inlined(leave), isa.inlined(leave_empty)
