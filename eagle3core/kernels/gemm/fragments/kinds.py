"""The epilogues, a kind each: what becomes of a piece, two rows of x by a pair a lane.

A kind gives `begin(...)`, what all pieces of a tile have in common; `fetch(own, piece, held, at)`, which puts what a
piece reads into the words of `held` from `at` on; how many words; and `act(own, piece, held, at, v00, v01, v10,
v11)` for the pair (v00, v01) of x row 2t and (v10, v11) of 2t + 1, scales and bias in them. `own` is what `begin` gave.

Source: derived here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import PARTIALS_STEP, Epilogue, make_fetch_angle
from eagle3core.kernels.gemm.order.place import HALF_BYTES, make_parts
from eagle3core.kernels.gemm.values import make_best, make_cache_line, make_gated, make_rotated, make_squares
from eagle3core.kernels.layer.cache_write import make_to_e4m3


def _make_no_fetch(isa: Any) -> Any:
    def nothing(own: Any, piece: Any, held: Any, at: Any) -> None: ...

    return isa.inlined(nothing)


def _make_halves(isa: Any) -> tuple[Any, Any]:
    """Of rows whose tiles have 16 columns, both halves of them: inlined `begin_halves` and `store_halves`.

    `begin_halves(y, lane, row0, tile, rows, n)` gives where this lane's first word of x row g of the first piece lies
    in y, bytes from a row to the next, and how many rows there are from it on; `store_halves(place, piece, lower,
    upper)` stores two words that have been transposed.
    """
    i32, i64 = isa.i32, isa.i64

    def begin_halves(y: Any, lane: Any, row0: Any, tile: Any, rows: Any, n: Any) -> Any:
        row = i32(row0 + (lane >> 2))
        return y + (i64(row) * n + tile * 16 + (lane & 3) * 2) * 2, i32(n * 2), i32(rows - row)

    def store_halves(place: Any, piece: Any, lower: Any, upper: Any) -> None:
        at = isa.address_after(place[0], place[1], i32(piece * 8))
        isa.store_u32_twice_below(at, lower, at + 16, upper, i32(piece * 8), place[2])

    return isa.inlined(begin_halves), isa.inlined(store_halves)


def _make_ordered(isa: Any, epilogue: Epilogue) -> tuple[Any, Any]:
    """Of what the next map reads in its order: inlined `begin_ordered` and `ordered_at`.

    `begin_ordered(ordered, lane, row0, column, n)` gives where the word with an even column lies within eight rows, n,
    and the number of the first eight; `ordered_at(place, piece)` the word's address in a piece. The word of the column
    eight further is the next one.
    """
    i32, x_tiles = isa.i32, epilogue.ordered_tiles or 1
    of_group, within = make_parts(isa)

    def begin_ordered(ordered: Any, lane: Any, row0: Any, column: Any, n: Any) -> Any:
        half = i32((column >> 1) & 1)
        # The first row alone would do, but what all lanes share has fewer registers.
        group = i32((row0 + (lane >> 2)) >> 3)
        return ordered + within(x_tiles, i32(lane >> 2), column) + half * HALF_BYTES, n, group

    def ordered_at(place: Any, piece: Any) -> Any:
        return of_group(place[0], x_tiles, place[1], i32(place[2] + piece))

    return isa.inlined(begin_ordered), isa.inlined(ordered_at)


def _make_store(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    to_bits, (begin_halves, store_halves) = isa.PACK[dtype], _make_halves(isa)

    def begin(
        lane: Any, row0: Any, tile: Any, rows: Any, n: Any, gain0: Any, gain1: Any, residual: Any, positions: Any,
        slots: Any, table: Any, q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> Any:  # fmt: skip
        return begin_halves(y, lane, row0, tile, rows, n)

    def store(own: Any, piece: Any, held: Any, at: Any, v00: Any, v01: Any, v10: Any, v11: Any) -> None:
        store_halves(own, piece, isa.transpose(to_bits(v10, v00)), isa.transpose(to_bits(v11, v01)))

    return isa.inlined(begin), _make_no_fetch(isa), 0, isa.inlined(store)


def _make_swiglu(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, orders_ = isa.i32, isa.i64, isa.PACK[dtype], epilogue.ordered_tiles > 0
    gated, (begin_ordered, ordered_at) = make_gated(isa), _make_ordered(isa, epilogue)

    def begin(
        lane: Any, row0: Any, tile: Any, rows: Any, n: Any, gain0: Any, gain1: Any, residual: Any, positions: Any,
        slots: Any, table: Any, q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> Any:  # fmt: skip
        row, column = i32(row0 + (lane >> 2)), i32(tile * 8 + (lane & 3) * 2)
        place = begin_ordered(ordered, lane, row0, column, n)
        return y + (i64(row) * n + column) * 2, i32(n * 2), i32(rows - row), place

    def swiglu(own: Any, piece: Any, held: Any, at: Any, v00: Any, v01: Any, v10: Any, v11: Any) -> None:
        first, pitch, left, place = own
        word = isa.transpose(to_bits(gated(v10, v11), gated(v00, v01)))
        isa.store_u32_below(isa.address_after(first, pitch, i32(piece * 8)), word, i32(piece * 8), left)
        if orders_:
            isa.store_u32_below(ordered_at(place, piece), word, i32(piece * 8), left)

    return isa.inlined(begin), _make_no_fetch(isa), 0, isa.inlined(swiglu)


def _make_residual(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    """Fetched of a piece: the words of both halves of the residual, of x row g; zeros past the last row."""
    i32, i64, to_bits, low, high = isa.i32, isa.i64, isa.PACK[dtype], isa.LOW[dtype], isa.HIGH[dtype]
    partials_mask, zero = -PARTIALS_STEP, np.float32(0)
    orders_, add_ = epilogue.ordered_tiles > 0, epilogue.has_residual
    squares_of, (begin_halves, store_halves) = make_squares(isa, 4), _make_halves(isa)
    begin_ordered, ordered_at = _make_ordered(isa, epilogue)

    def begin(
        lane: Any, row0: Any, tile: Any, rows: Any, n: Any, gain0: Any, gain1: Any, residual: Any, positions: Any,
        slots: Any, table: Any, q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> Any:  # fmt: skip
        # All eight lanes of a row have its sum of squares; of rows 2t and 2t + 1 the first two store one each.
        e = i32(lane >> 2)
        row, pitch = i32(row0 + (lane & 3) * 2 + (e & 1)), i32(((n >> 4) + (PARTIALS_STEP - 1)) & partials_mask)
        left = i32(rows - row)
        if e > 1:
            left = i32(0)
        partials = third + (i64(row) * pitch + tile) * 4, i32(pitch * 4), left, i32(e & 1)
        return (
            begin_halves(y, lane, row0, tile, rows, n), begin_halves(second, lane, row0, tile, rows, n),
            begin_halves(residual, lane, row0, tile, rows, n), partials, gain0, gain1,
            begin_ordered(ordered, lane, row0, i32(tile * 16 + (lane & 3) * 2), n),
        )  # fmt: skip

    def fetch(own: Any, piece: Any, held: Any, at: Any) -> None:
        if add_:
            first, pitch, left = own[2]
            held[at], held[at + 1] = i32(0), i32(0)
            if piece * 8 < left:
                source = isa.address_after(first, pitch, i32(piece * 8))
                held[at], held[at + 1] = isa.load_u32(source), isa.load_u32(source + 16)

    def residual(own: Any, piece: Any, held: Any, at: Any, v00: Any, v01: Any, v10: Any, v11: Any) -> None:
        gain0, gain1 = own[4], own[5]
        a00, a01, a10, a11 = zero, zero, zero, zero
        if add_:
            lower, upper = isa.transpose(held[at]), isa.transpose(held[at + 1])
            a00, a01, a10, a11 = low(lower), low(upper), high(lower), high(upper)
        lower, upper = to_bits(a10 + v10, a00 + v00), to_bits(a11 + v11, a01 + v01)
        # h as stored, of rows 2t and 2t + 1.
        h00, h01, h10, h11 = low(lower), low(upper), high(lower), high(upper)
        store_halves(own[0], piece, isa.transpose(lower), isa.transpose(upper))
        lower, upper = to_bits(h10 * gain0, h00 * gain0), to_bits(h11 * gain1, h01 * gain1)
        lower, upper = isa.transpose(lower), isa.transpose(upper)
        store_halves(own[1], piece, lower, upper)
        if orders_:
            isa.store_u32x2_below(ordered_at(own[6], piece), lower, upper, i32(piece * 8), own[0][2])
        squares, others = squares_of(h00, h01), squares_of(h10, h11)
        first, pitch, left, e = own[3]
        if e == 1:
            squares = others
        to = isa.address_after(first, pitch, i32(piece * 8))
        isa.store_u32_below(to, isa.bits_of_f32(squares), i32(piece * 8), left)

    return isa.inlined(begin), isa.inlined(fetch), 2 if add_ else 0, isa.inlined(residual)


def _make_qkv(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    """Fetched of a piece: the slot of x row g, none past the last row; cos and sin of pair g for rows 2t and 2t + 1.

    The head, and so every branch on it, is that of all lanes.
    """
    i32, i64, to_bits = isa.i32, isa.i64, isa.PACK[dtype]
    head_dim, half = epilogue.head_dim, epilogue.head_dim // 2
    tiles_shift, tiles_mask = (head_dim // 16).bit_length() - 1, head_dim // 16 - 1
    fetch_angle, rotated, cache_line = (
        make_fetch_angle(isa, epilogue), make_rotated(isa), make_cache_line(isa, epilogue)
    )  # fmt: skip
    e4m3_, to_e4m3 = epilogue.e4m3_cache, make_to_e4m3(isa)

    def begin(
        lane: Any, row0: Any, tile: Any, rows: Any, n: Any, gain0: Any, gain1: Any, residual: Any, positions: Any,
        slots: Any, table: Any, q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> Any:  # fmt: skip
        row, head = i32(row0 + (lane >> 2)), i32(tile >> tiles_shift)
        channel = i32((tile & tiles_mask) * 8 + (lane & 3) * 2)
        query = (
            y + ((i64(row) * q_heads + head) * head_dim + channel) * 2,
            i32(q_heads * (head_dim * 2)),
            i32(rows - row),
        )
        own, base, factor = i32(head - q_heads), second, gain0
        if own >= kv_heads:
            own, base, factor = i32(own - kv_heads), third, gain1
        cached = base, own, channel, factor, kv_heads
        kinds = i32(head < q_heads + kv_heads), i32(head < q_heads)
        return query, cached, kinds, (positions, slots, table), (lane, row0, tile, rows)

    def fetch(own: Any, piece: Any, held: Any, at: Any) -> None:
        positions, slots, table = own[3]
        lane, row0, tile, rows = own[4]
        # Past the last row the last one's, of which nothing is stored: loads without branches are under way together.
        row, last = i32(row0 + piece * 8 + (lane >> 2)), max(i32(rows - 1), i32(0))
        held[at] = isa.load_u32(slots + i64(min(row, last)) * 4)
        if row >= rows:
            held[at] = i32(-1)
        for e in range(2):
            row = min(i32(row0 + piece * 8 + (lane & 3) * 2 + e), last)
            held[at + 1 + 2 * e], held[at + 2 + 2 * e] = fetch_angle(tile, i32(lane >> 2), row, positions, table)

    def to_bytes(high: Any, low: Any, factor: Any) -> Any:
        # Two rows' values in e4m3, each in 16 bits; transposed, two columns' in the lower 16.
        word = isa.transpose(i32(to_e4m3(low, factor) | to_e4m3(high, factor) << 16))
        return i32((word & 0xFF) | (word >> 8 & 0xFF00))

    to_bytes = isa.inlined(to_bytes)

    def qkv(own: Any, piece: Any, held: Any, at: Any, v00: Any, v01: Any, v10: Any, v11: Any) -> None:
        rotates, is_query = own[2]
        if rotates != 0:
            v00, v01 = rotated(v00, v01, isa.f32_of_bits(held[at + 1]), isa.f32_of_bits(held[at + 2]))
            v10, v11 = rotated(v10, v11, isa.f32_of_bits(held[at + 3]), isa.f32_of_bits(held[at + 4]))
        if e4m3_ and is_query == 0:
            base, head, channel, factor, kv_heads = own[1]
            lower, upper = to_bytes(v10, v00, factor), to_bytes(v11, v01, factor)
            if held[at] >= 0:
                to = base + (cache_line(held[at], head, kv_heads) * head_dim + channel)
                isa.store_u16(to, lower)
                isa.store_u16(to + half, upper)
        else:
            lower, upper = isa.transpose(to_bits(v10, v00)), isa.transpose(to_bits(v11, v01))
            first, pitch, end = own[0]
            to, index = isa.address_after(first, pitch, i32(piece * 8)), i32(piece * 8)
            if is_query == 0:
                base, head, channel, factor, kv_heads = own[1]
                to = base + (cache_line(held[at], head, kv_heads) * head_dim + channel) * 2
                index, end = i32(-1), held[at]  # where there is a slot
            isa.store_u32_twice_below(to, lower, to + head_dim, upper, index, end)

    return isa.inlined(begin), isa.inlined(fetch), 5, isa.inlined(qkv)


def _make_head(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, low, high = isa.i32, isa.i64, isa.PACK[dtype], isa.LOW[dtype], isa.HIGH[dtype]
    powers_, best_of, (begin_halves, store_halves) = (
        epilogue.has_powers, make_best(isa, epilogue, 4), _make_halves(isa)
    )  # fmt: skip

    def begin(
        lane: Any, row0: Any, tile: Any, rows: Any, n: Any, gain0: Any, gain1: Any, residual: Any, positions: Any,
        slots: Any, table: Any, q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> Any:  # fmt: skip
        # All eight lanes of a row have what is left of it; of rows 2t and 2t + 1 the first two store one each.
        e = i32(lane >> 2)
        row = i32(row0 + (lane & 3) * 2 + (e & 1))
        left = i32(rows - row)
        if e > 1:
            left = i32(0)
        place = (i64(row) * (n >> 4) + tile) * 4
        return (
            begin_halves(y, lane, row0, tile, rows, n),
            (second + place, third + place, i32((n >> 4) * 4), left, i32(e & 1), i32(tile * 16 + e)),
        )  # fmt: skip

    def head(own: Any, piece: Any, held: Any, at: Any, v00: Any, v01: Any, v10: Any, v11: Any) -> None:
        first, second_first, pitch, left, e, column0 = own[1]
        lower, upper = to_bits(v10, v00), to_bits(v11, v01)
        best, column, total = best_of(low(lower), low(upper), column0)
        other, other_column, other_total = best_of(high(lower), high(upper), column0)
        store_halves(own[0], piece, isa.transpose(lower), isa.transpose(upper))
        if e == 1:
            best, column, total = other, other_column, other_total
        isa.store_u32_below(
            isa.address_after(first, pitch, i32(piece * 8)), isa.bits_of_f32(best), i32(piece * 8), left
        )  # fmt: skip
        if powers_:
            column = isa.bits_of_f32(total)
        isa.store_u32_below(isa.address_after(second_first, pitch, i32(piece * 8)), column, i32(piece * 8), left)

    return isa.inlined(begin), _make_no_fetch(isa), 0, isa.inlined(head)


KINDS: dict[str, Callable[[Any, Epilogue, str], tuple[Any, Any, int, Any]]] = {
    "store": _make_store, "residual": _make_residual, "swiglu": _make_swiglu, "qkv": _make_qkv, "head": _make_head,
}  # fmt: skip
