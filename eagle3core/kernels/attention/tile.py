"""What both attention kernels do with one unit of 16 keys: scores, mask, online softmax, values.

Every row gets the same bits whatever rows are beside it (see `layout`). For that, a key a row may not see has a
probability of exactly zero, a row's running maximum moves only on its own account, and every product that is added to
something is written as `fused` or `product`, so that no compiler chooses the rounding.

Source: online softmax after Milakov and Gimelshein, arXiv 1805.02867; the lazily moved maximum is derived here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.mask import make_hide
from eagle3core.kernels.attention.unit.score import make_score
from eagle3core.kernels.attention.unit.weighed import make_add_weighed

GROWTH = np.float32(8.0)  # log2 by which the maximum must grow to be moved; probabilities stay below 2^8


class Steps(NamedTuple):
    """What a warp does with `units` units of keys for its 16 `tiles` rows.

    Attributes:
        score: `(scores, queries, q_at, k_at)`: 8 `tiles` scores a lane and unit.
        hide: see `make_hide`; of one unit.
        start_tops: `(s, scores, tops, scale)`: maxima of the unit whose scores begin at `s`, where nothing has been
            summed yet.
        grows: `(scores, tops, scale)`: whether a row's running maximum would move in any unit, in any lane.
        raise_tops: `(scores, accumulators, tops, sums, scale, lane)`: running maxima, if the first unit's have grown
            enough.
        add_values: `(s, scores, accumulators, tops, sums, v_even, v_odd, scale)`: sums of probabilities, and of values
            by them, of the unit whose scores begin at `s`.
        score_apart: `(scores, queries, q_at, places)`: `score` of units whose keys lie anywhere; a lane's `places` are
            what it names to ldmatrix, one a unit, or in e4m3 those of keys g and g + 8.
        weigh, add_weighed: `add_values` in two: `(s, scores, weights, tops, sums, scale)` makes 4 `tiles` weights,
            `(weights, accumulators, v_even, v_odd)` adds values by them.
    """

    score: Any
    hide: Any
    start_tops: Any
    grows: Any
    raise_tops: Any
    add_values: Any
    score_apart: Any
    weigh: Any
    add_weighed: Any


def make_steps(
    isa: Any, shape: Shape, *, tiles: int, half: bool, held: int, units: int = 1, words: int = 0,
    windowed: bool = False, first_tile: int = 0,
) -> Steps:  # fmt: skip
    """The steps of one warp.

    Args:
        tiles: 16-row tiles of the warp. half: only the first 8 rows of the tile exist.
        held: 64-byte pieces of a query that are fragments in a register array; the others are in shared memory at
            `q_at`, where a tile's pieces of 1024 bytes follow each other.
        units: units scored at once. words, windowed: see `make_hide`. first_tile: of the warp's tiles, where the steps
            are those of some; scores are always of `tiles` alone.
    """
    cuda, i32, f32 = isa.cuda, isa.i32, isa.f32
    pack = isa.PACK[shape.product_dtype]
    hide = make_hide(isa, shape, tiles, words=words, windowed=windowed)
    score, score_apart = make_score(isa, shape, tiles=tiles, half=half, held=held, units=units, first_tile=first_tile)
    add_weighed = make_add_weighed(isa, shape, tiles=tiles, half=half, first_tile=first_tile)
    unit_scores, n_weights, n_tops = 8 * tiles, 4 * tiles, 2 * tiles
    halves, n_columns = 1 if half else 2, shape.dim // 8
    n_tall = shape.dim // 16 if half else 0

    # Rows and steps are written out one by one below: loops around bodies of this size are not always unrolled, and
    # an index that is not constant would move the sums from registers to local memory.
    def own_highest(s: Any, scores: Any) -> Any:
        return isa.maximum(isa.maximum(scores[s], scores[s + 1]), isa.maximum(scores[s + 4], scores[s + 5]))

    def raised(top: Any, high: Any, scale: Any) -> Any:
        # Four lanes have a row; a maximum is the same in any order.
        top = isa.maximum(top, isa.shuffle_xor_f32(top, 1))
        top = isa.maximum(top, isa.shuffle_xor_f32(top, 2))
        if (top - high) * scale > GROWTH:
            high = top
        return high

    raised = isa.inlined(raised)

    def raise_row(
        m: Any, far: Any, highest: Any, accumulators: Any, tops: Any, sums: Any, scale: Any, lane: Any
    ) -> None:
        r = (first_tile + m) * 2 + far
        high = raised(highest[m * 2 + far], tops[r], scale)
        # exp2(0) is 1 where this row's maximum stays: what a warp does for another row leaves its bits alone.
        shrink = isa.exp2((tops[r] - high) * scale)
        tops[r] = high
        sums[r] = isa.product(sums[r], shrink)
        if half:
            # There a lane has rows 2t and 2t + 1 of the sums, whose maxima lie in lanes 8t and 8t + 4.
            own = isa.bits_of_f32(shrink)
            even = isa.f32_of_bits(isa.shuffle_i32(own, i32((lane & 3) * 8)))
            odd = isa.f32_of_bits(isa.shuffle_i32(own, i32((lane & 3) * 8 + 4)))
            for n in range(2 * n_tall):
                accumulators[2 * n] = accumulators[2 * n] * even
                accumulators[2 * n + 1] = accumulators[2 * n + 1] * odd
        else:
            for n in range(n_columns):
                o = ((first_tile + m) * n_columns + n) * 4 + far * 2
                accumulators[o] = accumulators[o] * shrink
                accumulators[o + 1] = accumulators[o + 1] * shrink

    own_highest, raise_row = isa.inlined(own_highest), isa.inlined(raise_row)

    def own_highest_of_all(s: Any, scores: Any) -> Any:
        high = own_highest(s, scores)
        for u in range(units - 1):
            high = isa.maximum(high, own_highest((u + 1) * unit_scores + s, scores))
        return high

    own_highest_of_all = isa.inlined(own_highest_of_all)

    def grown(highest: Any, tops: Any, scale: Any) -> Any:
        # A row's maximum has grown enough exactly if that of one of its four lanes has: rounding keeps the order.
        moves = i32(0)
        for m in range(tiles):
            for far in range(halves):
                if (highest[m * 2 + far] - tops[(first_tile + m) * 2 + far]) * scale > GROWTH:
                    moves = i32(1)
        return isa.any_lane(moves)

    grown = isa.inlined(grown)

    # Over all units at once: if none moves a maximum, going unit by unit would not either, so both ways give one
    # result.
    def grows(scores: Any, tops: Any, scale: Any) -> Any:
        highest = cuda.local.array(n_tops, f32)
        highest[0] = own_highest_of_all(0, scores)
        if not half:
            highest[1] = own_highest_of_all(2, scores)
        if tiles == 2:
            highest[2] = own_highest_of_all(8, scores)
            highest[3] = own_highest_of_all(10, scores)
        return grown(highest, tops, scale)

    def raise_tops(scores: Any, accumulators: Any, tops: Any, sums: Any, scale: Any, lane: Any) -> None:
        highest = cuda.local.array(n_tops, f32)
        highest[0] = own_highest(0, scores)
        if not half:
            highest[1] = own_highest(2, scores)
        if tiles == 2:
            highest[2] = own_highest(8, scores)
            highest[3] = own_highest(10, scores)
        if grown(highest, tops, scale) != 0:
            raise_row(0, 0, highest, accumulators, tops, sums, scale, lane)
            if not half:
                raise_row(0, 1, highest, accumulators, tops, sums, scale, lane)
            if tiles == 2:
                raise_row(1, 0, highest, accumulators, tops, sums, scale, lane)
                raise_row(1, 1, highest, accumulators, tops, sums, scale, lane)

    # Nothing has been summed yet, so nothing shrinks; `raise_tops` would multiply zeros.
    def start_tops(s: Any, scores: Any, tops: Any, scale: Any) -> None:
        r = 2 * first_tile
        tops[r] = raised(own_highest(s, scores), tops[r], scale)
        if not half:
            tops[r + 1] = raised(own_highest(s + 2, scores), tops[r + 1], scale)
        if tiles == 2:
            tops[2] = raised(own_highest(s + 8, scores), tops[2], scale)
            tops[3] = raised(own_highest(s + 10, scores), tops[3], scale)

    def weigh_row(m: Any, far: Any, at: Any, scores: Any, weights: Any, tops: Any, sums: Any, scale: Any) -> None:
        s, r = at + m * 8 + far * 2, (first_tile + m) * 2 + far
        # Hidden keys: exp2(-inf) is exactly 0. The product is rounded here, once for all keys of the row.
        base = -isa.product(tops[r], scale)
        p0, p1 = isa.exp2(isa.fused(scores[s], scale, base)), isa.exp2(isa.fused(scores[s + 1], scale, base))
        p2, p3 = isa.exp2(isa.fused(scores[s + 4], scale, base)), isa.exp2(isa.fused(scores[s + 5], scale, base))
        # Four keys of this lane; the row's four lanes meet when the stream ends. Unrounded, while the values' weights
        # are of 16 bits.
        sums[r] = sums[r] + ((p0 + p1) + (p2 + p3))
        weights[m * 4 + far] = pack(p1, p0)
        weights[m * 4 + far + 2] = pack(p3, p2)

    weigh_row = isa.inlined(weigh_row)

    def weigh(s: Any, scores: Any, weights: Any, tops: Any, sums: Any, scale: Any) -> None:
        for i in range(n_weights):
            weights[i] = i32(0)
        weigh_row(0, 0, s, scores, weights, tops, sums, scale)
        if not half:
            weigh_row(0, 1, s, scores, weights, tops, sums, scale)
        if tiles == 2:
            weigh_row(1, 0, s, scores, weights, tops, sums, scale)
            weigh_row(1, 1, s, scores, weights, tops, sums, scale)

    weigh = isa.inlined(weigh)

    def add_values(
        s: Any, scores: Any, accumulators: Any, tops: Any, sums: Any, v_even: Any, v_odd: Any, scale: Any
    ) -> None:
        weights = cuda.local.array(n_weights, i32)
        weigh(s, scores, weights, tops, sums, scale)
        add_weighed(weights, accumulators, v_even, v_odd)

    start_tops, grows, raise_tops, add_values = (
        isa.inlined(step) for step in (start_tops, grows, raise_tops, add_values)
    )
    return Steps(score, hide, start_tops, grows, raise_tops, add_values, score_apart, weigh, add_weighed)
