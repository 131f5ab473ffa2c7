"""Values of a unit, weighted, added to a warp's sums: what `tile` ends with.

Values lie in shared memory by rows of keys, in 64-byte pieces whose 16-byte columns are exchanged by key (`fetch`), and
`ldmatrix` turns them. In e4m3 what it turns are pairs of neighbouring columns, and the two halves of a pair become
operands of two products: of the even columns, and of the odd ones. So a lane holds other columns of the sums than of a
16-bit cache, four neighbours in place of two pairs (`split` and `totals` know where they go); each column's sum is the
same, key by key.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.attention.layout import Fp8Shape, Shape


def make_add_weighed(isa: Any, shape: Shape, *, tiles: int, half: bool, first_tile: int) -> Any:
    """`add_weighed` of `tile.Steps`; arguments of `tile.make_steps`."""
    if not isinstance(shape, Fp8Shape):
        add_step = _make_add_step(isa, shape, tiles=tiles, half=half, first_tile=first_tile)
    elif half:
        add_step = _make_add_stored_tall(isa, shape)
    else:
        add_step = _make_add_stored(isa, shape, tiles=tiles, first_tile=first_tile)
    pieces = shape.row_pieces

    # A piece of a value is 64 bytes: two steps of two 16-byte columns. In the slot they lie 32 bytes apart but for the
    # exchange of columns, which an exclusive or follows: hence two addresses, `v_odd` = `v_even` ^ 32.
    def add_weighed(weights: Any, accumulators: Any, v_even: Any, v_odd: Any) -> None:
        add_step(0, v_even, weights, accumulators)
        add_step(1, v_odd, weights, accumulators)
        if pieces > 1:
            add_step(2, v_even, weights, accumulators)
            add_step(3, v_odd, weights, accumulators)
        if pieces == 4:
            add_step(4, v_even, weights, accumulators)
            add_step(5, v_odd, weights, accumulators)
            add_step(6, v_even, weights, accumulators)
            add_step(7, v_odd, weights, accumulators)

    return isa.inlined(add_weighed)


def _make_add_step(isa: Any, shape: Shape, *, tiles: int, half: bool, first_tile: int) -> Any:
    """16 columns of 16-bit values."""
    i32, mma, n_columns = isa.i32, isa.MMA[shape.dtype], shape.dim // 8

    def add_step(step: Any, v_at: Any, weights: Any, accumulators: Any) -> None:
        v = isa.ldmatrix_x4_trans(i32(v_at + (step >> 1) * 512))
        if half:
            o = step * 4
            # Values stand as the operand of 16 rows, columns of D, and weights as that of eight: [D / 16][4] sums.
            d = mma(
                v[0], v[1], v[2], v[3], weights[0], weights[2],
                accumulators[o], accumulators[o + 1], accumulators[o + 2], accumulators[o + 3],
            )  # fmt: skip
            for i in range(4):
                accumulators[o + i] = d[i]
        else:
            for m in range(tiles):
                for c in range(2):
                    o, w = ((first_tile + m) * n_columns + step * 2 + c) * 4, m * 4
                    d = mma(
                        weights[w], weights[w + 1], weights[w + 2], weights[w + 3], v[2 * c], v[2 * c + 1],
                        accumulators[o], accumulators[o + 1], accumulators[o + 2], accumulators[o + 3],
                    )  # fmt: skip
                    for i in range(4):
                        accumulators[o + i] = d[i]

    return isa.inlined(add_step)


def _make_add_stored(isa: Any, shape: Fp8Shape, *, tiles: int, first_tile: int) -> Any:
    """32 columns of values in e4m3: of each 16 the even ones in one product, the odd ones in another.

    Sums n of a row are columns 16 (n / 2) + 4t + 2 (n mod 2), + 1 of lane (g, t): neighbours come from both products.
    """
    i32, mma, widen = isa.i32, isa.MMA[shape.product_dtype], isa.F16_OF_E4M3_APART[shape.converts]
    n_columns = shape.dim // 8

    def add_step(step: Any, v_at: Any, weights: Any, accumulators: Any) -> None:
        v = isa.ldmatrix_x4_trans(i32(v_at + (step >> 1) * 512))
        for c in range(2):
            # Of keys 2t and 2t + 1, and of those 8 further: columns 2g of both, then columns 2g + 1.
            near, far = widen(v[2 * c]), widen(v[2 * c + 1])
            for m in range(tiles):
                w = m * 4
                for odd in range(2):
                    o = ((first_tile + m) * n_columns + step * 4 + c * 2) * 4 + odd
                    d = mma(
                        weights[w], weights[w + 1], weights[w + 2], weights[w + 3], near[odd], far[odd],
                        accumulators[o], accumulators[o + 4], accumulators[o + 2], accumulators[o + 6],
                    )  # fmt: skip
                    accumulators[o], accumulators[o + 4] = d[0], d[1]
                    accumulators[o + 2], accumulators[o + 6] = d[2], d[3]

    return isa.inlined(add_step)


def _make_add_stored_tall(isa: Any, shape: Fp8Shape) -> Any:
    """The same for eight rows: [D / 16][4] sums, of columns 16n + 2g and then 16n + 2g + 1 of rows 2t, 2t + 1."""
    i32, mma, widen = isa.i32, isa.MMA[shape.product_dtype], isa.F16_OF_E4M3_APART[shape.converts]

    def add_step(step: Any, v_at: Any, weights: Any, accumulators: Any) -> None:
        v = isa.ldmatrix_x4_trans(i32(v_at + (step >> 1) * 512))
        for c in range(2):
            near, far, o = widen(v[c]), widen(v[c + 2]), (step * 2 + c) * 4
            d = mma(
                near[0], near[1], far[0], far[1], weights[0], weights[2],
                accumulators[o], accumulators[o + 1], accumulators[o + 2], accumulators[o + 3],
            )  # fmt: skip
            for i in range(4):
                accumulators[o + i] = d[i]

    return isa.inlined(add_step)
