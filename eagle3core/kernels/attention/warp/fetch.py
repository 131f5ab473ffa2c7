"""What a warp of `attention_streams` reads: sets of units, copied ahead on its stream and into the next split; queries.

Table entries come 32 at a time, one a lane, a chunk before they are needed, so no copy waits for the one before.

Slot of a unit: keys, then values, as [half of 8][64-byte piece][key][16-byte column ^ (key / 2)], which ldmatrix reads
without bank conflicts. Keys in e4m3 alone lie as [half of 8][piece][lane] 16 bytes, the order in which lanes read them.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.attention.layout import (
    BLOCK_SHIFT,
    UNIT,
    Shape,
    make_fp8_order,
    make_own_words,
    make_token_of,
    make_walk,
)

CHUNK = 32  # units of a stream, a lane each


def make_fetch(isa: Any, shape: Shape, *, units: int, apart: int) -> tuple[Any, Any, Any, Any]:
    """`look_up`, `chunk_after`, `follow` and `copy_set` for sets of `units` units, of a warp whose streams are `apart`.

    `look_up(table, unit, n_units, lane)`: lane l's cache block, that of unit l of the chunk that begins at `unit`.
    `chunk_after(stream, unit, end, first_unit, n_units)`: (its stream, its first unit or -1).
    `follow(...)`: the set after that at `unit`: (unit or -1, place in its chunk, the chunk's entries, and of the chunk
    after: stream, first unit or -1, entries).
    `copy_set(slot, unit, place, entries, ...)`: asks for a set; keys past the end become zeros.
    """
    i32, i64 = isa.i32, isa.i64
    _, advance = make_walk(isa, shape)
    pieces, half_bytes, row_bytes = shape.row_pieces, shape.half_bytes, shape.row_bytes
    interleave, unit_bytes = shape.splits * shape.streams, shape.unit_bytes
    block_mask, fp8 = (1 << BLOCK_SHIFT) - 1, shape.is_fp8

    def look_up(table: Any, unit: Any, n_units: Any, lane: Any) -> Any:
        own, entry = i32(unit + lane * interleave), i32(0)
        if own < n_units:
            entry = isa.load_u32(table + (own >> (BLOCK_SHIFT - 4)) * 4)
        return entry

    def chunk_after(stream: Any, unit: Any, end: Any, first_unit: Any, n_units: Any) -> Any:
        stream, unit = advance(stream, i32(unit + (CHUNK - 1) * interleave), apart, end, first_unit, n_units)
        if stream >= end:
            unit = i32(-1)
        return stream, unit

    look_up, chunk_after = isa.inlined(look_up), isa.inlined(chunk_after)

    def follow(
        unit: Any, place: Any, entries: Any, later_stream: Any, later_unit: Any, later: Any, table: Any, end: Any,
        first_unit: Any, n_units: Any, lane: Any,
    ) -> Any:  # fmt: skip
        unit, place = i32(unit + units * interleave), i32(place + units)
        if unit >= n_units or place == CHUNK:
            unit, place, entries = later_unit, i32(0), later
            if later_unit >= 0:
                later_stream, later_unit = chunk_after(later_stream, later_unit, end, first_unit, n_units)
                if later_unit >= 0:
                    later = look_up(table, later_unit, n_units, lane)
        return unit, place, entries, later_stream, later_unit, later

    def copy_unit(
        slot: Any, unit: Any, block: Any, k: Any, v: Any, end: Any, kv_head: Any, n_kv: Any, lane: Any
    ) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        first = i32(unit * UNIT)
        # Cache rows: [block][key head][64 tokens][D].
        row = i32(((block * n_kv + kv_head) << BLOCK_SHIFT) + ((first & block_mask) + g))
        source = i64(row) * row_bytes + t * 16
        # ldmatrix reads 16 bytes of eight keys, which the exchange by key / 2 spreads over all banks.
        place = i32(g * 64 + ((t ^ (g >> 1)) << 4))
        keys, values = i32(slot + place), i32(slot + half_bytes + place)
        if fp8:
            keys = i32(slot + lane * 16)  # read by the lane that copies them
        near, far = i32(0), i32(0)  # keys past the end become zeros: 0 * NaN would spoil the sums
        if first + g < end:
            near = i32(16)
        if first + g + 8 < end:
            far = i32(16)
        for j in range(pieces):
            isa.copy16_fill(i32(keys + j * 512), k + source + j * 64, near)
            isa.copy16_fill(i32(keys + (pieces + j) * 512), k + source + (8 * row_bytes + j * 64), far)
        for j in range(pieces):
            isa.copy16_fill(i32(values + j * 512), v + source + j * 64, near)
            isa.copy16_fill(i32(values + (pieces + j) * 512), v + source + (8 * row_bytes + j * 64), far)

    copy_unit = isa.inlined(copy_unit)

    def copy_set(
        slot: Any, unit: Any, place: Any, entries: Any, k: Any, v: Any, end: Any, kv_head: Any, n_kv: Any, lane: Any
    ) -> None:
        for u in range(units):
            # The entry came to a lane a chunk ago: no load stands between here and the copy.
            block = isa.shuffle_i32(entries, i32(place + u))
            copy_unit(i32(slot + u * unit_bytes), i32(unit + u * interleave), block, k, v, end, kv_head, n_kv, lane)

    return look_up, chunk_after, isa.inlined(follow), isa.inlined(copy_set)


def make_queries(isa: Any, shape: Shape, *, half: bool = False) -> tuple[Any, Any]:
    """`query_at(row, b, kv_head, n_kv, tokens)` and `load_queries(q, at, m, near, far, lane, piece)`.

    The first gives which query of q a row of a key head is, -1 if none. The second gives one lane's fragment of 32
    elements of queries `near` and `far`: eight int32 go to `at[8 m ..]`, zeros for rows that do not exist; with `half`
    no `far` one does.
    """
    i32, i64 = isa.i32, isa.i64
    token_of = make_token_of(isa, shape.group)
    group, row_bytes, fp8 = shape.group, 2 * shape.dim, shape.is_fp8
    (beside, as_operands), own_words = make_fp8_order(isa, shape), make_own_words(isa)

    def query_at(row: Any, b: Any, kv_head: Any, n_kv: Any, tokens: Any) -> Any:
        query, token = i32(-1), token_of(row)
        if row < tokens * group:
            query = i32(i32((b * tokens + token) * n_kv + kv_head) * group + i32(row - token * group))
        return query

    def load_half(q: Any, at: Any, place: Any, query: Any, lane: Any, piece: Any) -> None:
        v = (i32(0), i32(0), i32(0), i32(0))
        if query >= 0:
            source = q + i64(query) * row_bytes + (lane & 3) * 16 + piece * 64
            if fp8:
                source += beside(lane, piece)
            v = isa.load_u32x4(source)
            if fp8:
                v = as_operands(v)
        if not fp8:
            v = own_words(v, lane)
        for c in range(4):
            at[place + 2 * c] = v[c]

    load_half = isa.inlined(load_half)

    def load_queries(q: Any, at: Any, m: Any, near: Any, far: Any, lane: Any, piece: Any) -> None:
        load_half(q, at, m * 8, near, lane, piece)
        if half:
            for c in range(4):
                at[m * 8 + 1 + 2 * c] = i32(0)
        else:
            load_half(q, at, m * 8 + 1, far, lane, piece)

    return isa.inlined(query_at), isa.inlined(load_queries)
