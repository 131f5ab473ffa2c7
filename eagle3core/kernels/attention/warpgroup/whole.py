"""The output of rows whose splits one block of `attention_group` has all walked: no `attention_combine` follows.

Bundles of splits wait in the scratch memory that the combination would read, in an order of their own: each lane reads
back what it wrote, 16 bytes at a time. The last bundle waits in shared memory.

Source: the words and the order of sums are those of `attention.combine`, so equal bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, LOG2_E, Shape, make_own_words, make_token_of
from eagle3core.kernels.attention.totals import LANES
from eagle3core.kernels.attention.warpgroup.held import make_bundle_sums
from eagle3core.kernels.gemm.order.place import HALF_BYTES, make_parts

_LANES_OF_ROW = 4  # of the 16 that hold a row's splits in the combination, those with a bundle's sums


def _make_places(isa: Any, shape: Shape) -> tuple[Any, Any]:
    """`sums_at` and `rows_at` `(g, first_row, row0, rows, lane, partial)`: where a lane's part of bundle g waits.

    Its sums lie in the rows of the bundle's first split and, past the last row, of its second; maxima and sums of
    probabilities in those of the third.
    """
    i32, i64, dim, bundle = isa.i32, isa.i64, shape.dim, shape.bundle

    def sums_at(g: Any, first_row: Any, row0: Any, rows: Any, lane: Any, partial: Any) -> Any:
        return partial + i64(i32(first_row + g * bundle * rows + row0)) * (4 * dim) + lane * 16

    def rows_at(g: Any, first_row: Any, row0: Any, rows: Any, lane: Any, partial: Any) -> Any:
        return partial + i64(i32(first_row + (g * bundle + 2) * rows + row0)) * (4 * dim) + lane * 16

    return isa.inlined(sums_at), isa.inlined(rows_at)


def make_whole_leave(isa: Any, shape: Shape) -> Any:
    """`leave`, called as that of `make_held_leave`: a split's sums join those of its bundle, which waits when it ends.

    The bundle of the block's last split stays at `at`, in shared memory.
    """
    cuda, i32, f32, zero = isa.cuda, isa.i32, isa.f32, np.float32(0)
    n_columns, bundle, bundle_shift = shape.dim // 8, shape.bundle, shape.bundle.bit_length() - 1
    join_bundle, joined_column, _, hold_rows, hold_joined, hold_own = make_bundle_sums(isa, shape)
    sums_at, rows_at = _make_places(isa, shape)

    def leave(
        at: Any, split: Any, is_last: Any, row0: Any, rows: Any, first_row: Any, lane: Any, totals: Any,
        total_tops: Any, total_sums: Any, partial: Any, tops_sums: Any, scale: Any,
    ) -> None:  # fmt: skip
        place = i32(split & (bundle - 1))
        keep, take = cuda.local.array(2, f32), cuda.local.array(2, f32)
        tops, sums = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for r in range(2):
            keep[r], take[r], tops[r], sums[r] = zero, zero, total_tops[r], total_sums[r]
        if place > 0:
            join_bundle(at, tops, sums, keep, take, scale)
        if place < bundle - 1 or is_last:
            hold_rows(at, tops, sums)
            if place > 0:
                hold_joined(at, totals, keep, take)
            else:
                hold_own(at, totals, keep, take)
        elif row0 < rows:
            g = i32(split >> bundle_shift)
            target = sums_at(g, first_row, row0, rows, lane, partial)
            for o in range(n_columns):
                t = joined_column(at, o, totals, keep, take)
                isa.store_f32x4(target + o * LANES, t[0], t[1], t[2], t[3])
            isa.store_f32x4(rows_at(g, first_row, row0, rows, lane, partial), tops[0], tops[1], sums[0], sums[1])

    return isa.inlined(leave)


def make_whole_end(isa: Any, shape: Shape) -> Any:
    """`end_whole(at, row0, rows, first_row, n_live, ...)`: output of a warp's 16 rows, of which `n_live` splits have
    keys; `at` is the lane's own address of the last bundle, `first_row` that of split 0, in rows of `partial`.

    Where there are `words`, the output also goes there, in the order of a map whose blocks have 8 `x_tiles` rows.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    pack, token_of, transposed = isa.PACK[shape.dtype], make_token_of(isa, shape.group), make_own_words(isa)
    sums_at, rows_at = _make_places(isa, shape)
    of_group, within = make_parts(isa)
    dim, group, bundle, n_columns = shape.dim, shape.group, shape.bundle, shape.dim // 8
    bundles, bundle_shift = shape.splits // bundle, bundle.bit_length() - 1
    n_weights, n_sums, zero, log2_e = 2 * bundles, 4 * n_columns, np.float32(0), np.float32(LOG2_E)

    def weigh_row(far: Any, tops: Any, summed: Any, sinks: Any, head: Any, scale: Any, weights: Any) -> Any:
        """Factors of a row's bundles, 0 of those without a value; what the row's sums are multiplied by."""
        totals = cuda.local.array(_LANES_OF_ROW, f32)
        high = FLOOR
        for g in range(bundles):
            high = isa.maximum(high, tops[2 * g + far])
        level, sink = isa.product(high, scale), zero
        if sinks != 0:
            sink = isa.product(isa.load_f32(sinks + head * 4), log2_e)
            level = isa.maximum(level, sink)
        for i in range(_LANES_OF_ROW):
            totals[i] = zero
        for g in range(bundles):
            factor = isa.exp2(isa.fused(tops[2 * g + far], scale, -level))
            weights[2 * g + far] = zero
            if summed[2 * g + far] != zero:  # a NaN counts: a key that is seen and is not a number has to show
                totals[g % _LANES_OF_ROW] = isa.fused(summed[2 * g + far], factor, totals[g % _LANES_OF_ROW])
                weights[2 * g + far] = factor
        total = (totals[0] + totals[1]) + (totals[2] + totals[3])
        if sinks != 0:
            total = total + isa.exp2(sink - level)
        inverse = zero
        if total != zero:  # a row that sees no key gives zeros
            inverse = isa.reciprocal(total)
        return inverse

    def weight_of(g: Any, far: Any, weights: Any) -> Any:
        # By comparisons: an index that is not constant would move the weights from registers to local memory.
        weight = zero
        for h in range(bundles):
            if g == h:
                weight = weights[2 * h + far]
        return weight

    weigh_row, weight_of = isa.inlined(weigh_row), isa.inlined(weight_of)

    def end_whole(
        at: Any, row0: Any, rows: Any, first_row: Any, n_live: Any, kv_head: Any, n_kv: Any, b: Any, tokens: Any,
        lane: Any, partial: Any, sinks: Any, out: Any, ordered: Any, x_tiles: Any, scale: Any,
    ) -> None:  # fmt: skip
        tops, summed = cuda.local.array(n_weights, f32), cuda.local.array(n_weights, f32)
        weights, inverses = cuda.local.array(n_weights, f32), cuda.local.array(2, f32)
        sums, held = cuda.local.array(n_sums, f32), cuda.local.array(n_sums, f32)
        words = cuda.local.array(4, i32)
        last, row, column = i32(i32(n_live - 1) >> bundle_shift), i32(row0 + (lane >> 2)), i32(lane & 3)
        for g in range(bundles):
            pairs = (FLOOR, FLOOR, zero, zero)
            if g < last:
                pairs = isa.load_f32x4_l2(rows_at(g, first_row, row0, rows, lane, partial))
            elif g == last:
                pairs = isa.shared_load_f32x4(i32(at + n_columns * LANES))
            for r in range(2):
                tops[2 * g + r], summed[2 * g + r] = pairs[r], pairs[2 + r]
        for far in range(2):
            own = i32(min(row + 8 * far, rows - 1))
            head = i32(kv_head * group + (own - token_of(own) * group))
            inverses[far] = weigh_row(far, tops, summed, sinks, head, scale, weights)
        for i in range(n_sums):
            sums[i] = zero
        g = i32(0)
        while g <= last:  # not before: with no keys there is no last bundle
            if g < last:
                # All columns are under way before any of them is used.
                source = sums_at(g, first_row, row0, rows, lane, partial)
                for n in range(n_columns):
                    t = isa.load_f32x4_l2(source + n * LANES)
                    for c in range(4):
                        held[4 * n + c] = t[c]
            else:
                for n in range(n_columns):
                    t = isa.shared_load_f32x4(i32(at + n * LANES))
                    for c in range(4):
                        held[4 * n + c] = t[c]
            near, far_weight = weight_of(g, 0, weights), weight_of(g, 1, weights)
            if near != zero:
                for n in range(n_columns):
                    sums[4 * n] = isa.fused(held[4 * n], near, sums[4 * n])
                    sums[4 * n + 1] = isa.fused(held[4 * n + 1], near, sums[4 * n + 1])
            if far_weight != zero:
                for n in range(n_columns):
                    sums[4 * n + 2] = isa.fused(held[4 * n + 2], far_weight, sums[4 * n + 2])
                    sums[4 * n + 3] = isa.fused(held[4 * n + 3], far_weight, sums[4 * n + 3])
            g = i32(g + 1)
        for far in range(2):
            own = i32(row + 8 * far)
            token = token_of(own)
            head = i32(kv_head * group + (own - token * group))
            x_row, width = i32(b * tokens + token), i32(n_kv * group * dim)
            target = out + (i64(x_row) * (n_kv * group) + head) * (2 * dim) + column * 16
            eight_rows = ordered
            if ordered != 0:
                eight_rows = of_group(ordered, x_tiles, width, i32(x_row >> 3))
            for part in range(n_columns // 4):
                for n in range(4):
                    o = 16 * part + 4 * n + 2 * far
                    words[n] = pack(sums[o + 1] * inverses[far], sums[o] * inverses[far])
                # A lane has two columns of each eight; the four of a row exchange theirs for eight in a row each.
                mine = transposed((words[0], words[1], words[2], words[3]), lane)
                if own < rows:
                    isa.store_u32x4(target + part * 64, mine[0], mine[1], mine[2], mine[3])
                    if ordered != 0:
                        # Eight columns: four of each of two products, two of each half of it.
                        for product in range(2):
                            first = i32(head * dim + 32 * part + column * 8 + 4 * product)
                            place = eight_rows + within(x_tiles, x_row, first)
                            isa.store_u32(place, mine[2 * product])
                            isa.store_u32(place + HALF_BYTES, mine[2 * product + 1])

    return isa.inlined(end_whole)
