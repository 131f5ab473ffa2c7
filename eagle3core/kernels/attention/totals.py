"""The sums of a split in `attention_rows`: streams join them one after the other, then they go out.

They lie in shared memory as the lanes hold them: 16 bytes a lane for each 8 columns of D of 16 rows, then the maxima
of its four rows and their sums of probabilities; those of the bundle follow. The bundle's sums of values, which are
needed once a split, stay where they are to be left, in the place of its first split.

Source: the order of sums is that of `layout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, Shape

LANES = 512  # bytes: 16 of every lane


def make_weigh(isa: Any) -> Any:
    """`weigh(top, other, scale)`: (the higher maximum, factor of what had `top`, factor of what had `other`)."""

    def weigh(top: Any, other: Any, scale: Any) -> Any:
        high = isa.maximum(top, other)
        return high, isa.exp2((top - high) * scale), isa.exp2((other - high) * scale)

    return isa.inlined(weigh)


def make_join_row(isa: Any) -> Any:
    """`join_row(r, total_tops, total_sums, keep, take, tops, sums, scale)`: row r of a stream joins those before.

    It gives the factors of what was there, `keep[r]`, and of what the stream adds, `take[r]`.
    """
    weigh = make_weigh(isa)

    def join_row(
        r: Any, total_tops: Any, total_sums: Any, keep: Any, take: Any, tops: Any, sums: Any, scale: Any
    ) -> None:
        # The row's four lanes, 1 and then 2 apart, as in `split.lay_row`; then the words of `split.join_tile`: equal
        # bits.
        total = sums[r]
        total = total + isa.shuffle_xor_f32(total, 1)
        total = total + isa.shuffle_xor_f32(total, 2)
        high, kept, taken = weigh(total_tops[r], tops[r], scale)
        total_tops[r], keep[r], take[r] = high, kept, taken
        total_sums[r] = isa.fused(total_sums[r], kept, isa.product(total, taken))

    return isa.inlined(join_row)


def totals_bytes(shape: Shape, tiles: int) -> int:
    """Shared memory of one warp's sums of a split, bytes."""
    return (shape.dim // 8 * tiles + 4) * LANES


def make_column_at(isa: Any, shape: Shape) -> Any:
    """`column_at(n)`: bytes from a lane's first two columns of a row to those of its sums n."""
    i32 = isa.i32

    def of_pairs(n: Any) -> Any:
        return n * 32

    def of_fp8(n: Any) -> Any:
        return i32((n >> 1) * 64 + (n & 1) * 8)  # see `unit.weighed`

    return isa.inlined(of_fp8 if shape.is_fp8 else of_pairs)


def make_totals(isa: Any, shape: Shape, *, joined: bool, tiles: int) -> tuple[Any, Any, Any]:
    """`begin`, `join` and `leave`, of one warp; `at` is always the lane's own address.

    `begin(at)`: no stream has joined yet.
    `join(at, is_first, accumulators, tops, sums, total_tops, total_sums, scale)`: a stream joins those before.
    `leave(at, split, row0, rows, first_row, lane, buffer, total_tops, total_sums, partial, tops_sums, scale)`: the
    split's sums go out, or join those of its bundle that have; `buffer` holds D / 2 f32 a tile, `first_row` is that of
    split 0.

    Args:
        joined: all splits of a bundle are left by this block, one after the other.
        tiles: of the warp, 1 or 2, 16 rows each.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    step, lane_bytes = shape.bundle if joined else 1, 16 if shape.is_fp8 else 8
    weigh, join_row = make_weigh(isa), make_join_row(isa)
    dim, zero, one = shape.dim, np.float32(0), np.float32(1)
    n_columns, column_at = dim // 8, make_column_at(isa, shape)
    n_tops, n_sums = 2 * tiles, dim // 2 * tiles
    last = n_tops - 2  # of one tile the first pair, stored twice
    tops_at = tiles * n_columns * LANES
    sums_at = tops_at + LANES
    bundle_at = sums_at + LANES

    def begin(at: Any) -> None:
        isa.shared_store_f32x4(i32(at + tops_at), FLOOR, FLOOR, FLOOR, FLOOR)
        isa.shared_store_f32x4(i32(at + sums_at), zero, zero, zero, zero)

    def store_rows(at: Any, values: Any) -> None:
        isa.shared_store_f32x4(at, values[0], values[1], values[last], values[last + 1])

    def join_column(o: Any, at: Any, accumulators: Any, keep: Any, take: Any) -> None:
        r, i = 2 * (o // n_columns), 4 * o
        t = isa.shared_load_f32x4(i32(at + o * LANES))
        a0 = isa.fused(t[0], keep[r], isa.product(accumulators[i], take[r]))
        a1 = isa.fused(t[1], keep[r], isa.product(accumulators[i + 1], take[r]))
        a2 = isa.fused(t[2], keep[r + 1], isa.product(accumulators[i + 2], take[r + 1]))
        a3 = isa.fused(t[3], keep[r + 1], isa.product(accumulators[i + 3], take[r + 1]))
        isa.shared_store_f32x4(i32(at + o * LANES), a0, a1, a2, a3)

    begin, store_rows = isa.inlined(begin), isa.inlined(store_rows)
    join_row, join_column = isa.inlined(join_row), isa.inlined(join_column)

    def join(
        at: Any, is_first: Any, accumulators: Any, tops: Any, sums: Any, total_tops: Any, total_sums: Any, scale: Any
    ) -> None:
        keep, take = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        held, summed = isa.shared_load_f32x4(i32(at + tops_at)), isa.shared_load_f32x4(i32(at + sums_at))
        for r in range(n_tops):
            total_tops[r], total_sums[r] = held[r], summed[r]
        for r in range(n_tops):
            join_row(r, total_tops, total_sums, keep, take, tops, sums, scale)
        # No barrier: a lane reads back only what it wrote itself, or what the lane of the same number in another group
        # wrote before that group passed the turn on.
        if is_first:
            for o in range(tiles * n_columns):
                i = 4 * o
                isa.shared_store_f32x4(
                    i32(at + o * LANES), accumulators[i], accumulators[i + 1], accumulators[i + 2], accumulators[i + 3]
                )
        else:
            for o in range(tiles * n_columns):
                join_column(o, at, accumulators, keep, take)
        store_rows(i32(at + tops_at), total_tops)
        store_rows(i32(at + sums_at), total_sums)

    def weigh_bundle(at: Any, total_tops: Any, total_sums: Any, keep: Any, take: Any, scale: Any) -> None:
        """The split's maxima and sums become the bundle's."""
        held = isa.shared_load_f32x4(i32(at + bundle_at))
        summed = isa.shared_load_f32x4(i32(at + (bundle_at + LANES)))
        for r in range(n_tops):
            high, kept, taken = weigh(held[r], total_tops[r], scale)
            keep[r], take[r] = kept, taken
            if summed[r] == zero:
                keep[r] = zero  # what lies there was never written
            total_tops[r] = high
            total_sums[r] = isa.fused(summed[r], kept, isa.product(total_sums[r], taken))

    def fetch_row(m: Any, far: Any, target: Any, buffer: Any) -> None:
        for n in range(n_columns):
            x, i = isa.load_f32x2(target + column_at(n)), (m * n_columns + n) * 4 + far * 2
            buffer[i], buffer[i + 1] = x[0], x[1]

    fetch_row = isa.inlined(fetch_row)

    def leave_tile(
        m: Any, at: Any, row: Any, rows: Any, place: Any, lane: Any, buffer: Any, keep: Any, take: Any,
        total_tops: Any, total_sums: Any, partial: Any, tops_sums: Any,
    ) -> None:  # fmt: skip
        near, far, wide = row < rows, row + 8 < rows, i64(place)
        target, beyond = partial + wide * (4 * dim) + (lane & 3) * lane_bytes, 8 * 4 * dim
        if (lane & 3) == 0:
            # Maximum and sum of probabilities always go out, also FLOOR and 0: they say that the row has no values
            # here.
            if near:
                isa.store_f32x2(tops_sums + wide * 8, total_tops[2 * m], total_sums[2 * m])
            if far:
                isa.store_f32x2(tops_sums + wide * 8 + 8 * 8, total_tops[2 * m + 1], total_sums[2 * m + 1])
        near, far = near and total_sums[2 * m] != zero, far and total_sums[2 * m + 1] != zero  # else nobody reads them
        if joined:
            if near and keep[2 * m] > zero:
                fetch_row(m, 0, target, buffer)
            if far and keep[2 * m + 1] > zero:
                fetch_row(m, 1, target + beyond, buffer)
            for n in range(n_columns):
                t, i = isa.shared_load_f32x4(i32(at + (m * n_columns + n) * LANES)), (m * n_columns + n) * 4
                if near:
                    isa.store_f32x2(
                        target + column_at(n),
                        isa.fused(buffer[i], keep[2 * m], isa.product(t[0], take[2 * m])),
                        isa.fused(buffer[i + 1], keep[2 * m], isa.product(t[1], take[2 * m])),
                    )
                if far:
                    isa.store_f32x2(
                        target + beyond + column_at(n),
                        isa.fused(buffer[i + 2], keep[2 * m + 1], isa.product(t[2], take[2 * m + 1])),
                        isa.fused(buffer[i + 3], keep[2 * m + 1], isa.product(t[3], take[2 * m + 1])),
                    )
        else:
            n = i32(0)
            # Rolled on purpose: nothing is held over from one column to the next.
            while n < n_columns:
                t = isa.shared_load_f32x4(i32(at + (m * n_columns + n) * LANES))
                if near:
                    isa.store_f32x2(target + column_at(n), t[0], t[1])
                if far:
                    isa.store_f32x2(target + beyond + column_at(n), t[2], t[3])
                n = i32(n + 1)

    weigh_bundle, leave_tile = isa.inlined(weigh_bundle), isa.inlined(leave_tile)

    def leave(
        at: Any, split: Any, row0: Any, rows: Any, first_row: Any, lane: Any, buffer: Any, total_tops: Any,
        total_sums: Any, partial: Any, tops_sums: Any, scale: Any,
    ) -> None:  # fmt: skip
        keep, take = cuda.local.array(n_tops, f32), cuda.local.array(n_tops, f32)
        # The accumulators are free between two splits: `buffer` is theirs.
        row, place = i32(row0 + (lane >> 2)), i32(split & (step - 1))
        if joined:
            for r in range(n_tops):
                keep[r], take[r] = zero, one
            for i in range(n_sums):
                buffer[i] = zero
            if place > 0:
                weigh_bundle(at, total_tops, total_sums, keep, take, scale)
            store_rows(i32(at + bundle_at), total_tops)
            store_rows(i32(at + (bundle_at + LANES)), total_sums)
        first = i32(first_row + i32(split - place) * rows + row)
        leave_tile(0, at, row, rows, first, lane, buffer, keep, take, total_tops, total_sums, partial, tops_sums)
        if tiles == 2:
            leave_tile(
                1, at, i32(row + 16), rows, i32(first + 16), lane, buffer, keep, take, total_tops, total_sums, partial,
                tops_sums,
            )  # fmt: skip
        begin(at)

    return begin, isa.inlined(join), isa.inlined(leave)
