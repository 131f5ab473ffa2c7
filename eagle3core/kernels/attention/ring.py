"""What warps of `attention_rows` read: sets of units of one stream, copied by all warps that read them; queries.

A warp copies eight keys, or their values, of one unit at a time, and always the same ones of every set. Slots of units
are laid out as in `fetch`.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.attention.layout import BLOCK_SHIFT, UNIT, Shape, make_load_queries, make_walk


def make_ring(isa: Any, shape: Shape, *, row_warps: int, groups: int, units: int) -> tuple[Any, Any, Any]:
    """`follow`, `look_up` and `copy_set` for sets of `units` units; units <= row_warps <= 4 units."""
    i32, i64 = isa.i32, isa.i64
    first_of, _ = make_walk(isa, shape)
    pieces, half_bytes, row_bytes = shape.row_pieces, shape.half_bytes, shape.row_bytes
    head_bytes, interleave = row_bytes << BLOCK_SHIFT, shape.splits * shape.streams
    copies, fp8 = 4 * units // row_warps, shape.is_fp8  # of eight keys or values

    def own_unit(unit: Any, row_warp: Any) -> Any:
        return i32(unit + ((row_warp * copies) >> 2) * interleave)

    own_unit = isa.inlined(own_unit)

    def follow(unit: Any, end: Any, first_unit: Any, n_units: Any) -> Any:
        """The first unit of the set after `unit`'s in this group's walk up to stream `end`; -1 if there is none."""
        unit = i32(unit + units * interleave)
        if unit >= n_units:
            stream = i32((unit & (interleave - 1)) + groups)
            unit = i32(-1)
            while stream < end and unit < 0:
                unit = first_of(stream, first_unit)
                if unit >= n_units:
                    unit = i32(-1)
                stream = i32(stream + groups)
        return unit

    def look_up(table: Any, unit: Any, n_units: Any, lane: Any, row_warp: Any) -> Any:
        """The cache block of the warp's unit of a set; 0 if the stream has ended before it."""
        own, block = own_unit(unit, row_warp), i32(0)
        if own < n_units:
            # The popcount adds zero; were the address visibly uniform, the entry would be waited for at once.
            block = isa.load_u32(table + i32((own >> 2) + (isa.popcount(lane) >> 6)) * 4)
        return block

    def copy_set(
        slot: Any, block: Any, unit: Any, k: Any, v: Any, end: Any, kv_head: Any, n_kv: Any, lane: Any, row_warp: Any
    ) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        first = i32(own_unit(unit, row_warp) * UNIT)
        head = i64(i32(block * n_kv + kv_head)) * head_bytes
        place = i32(slot + ((row_warp * copies) >> 2) * (2 * half_bytes) + g * 64)
        # A unit is four parts, the two halves of its keys and of its values; `copies` of them are this warp's.
        for i in range(copies):
            part = i32((row_warp * copies + i) & 3)  # of the unit: eight keys, the others, eight values, the others
            key, size = i32((part & 1) * 8 + g), i32(0)  # keys past the end become zeros: 0 * NaN would spoil the sums
            if i32(first + key) < end:
                size = i32(16)
            source, column = k, i32(t ^ (g >> 1))
            if fp8:
                column = t
            if part >= 2:
                source, column = v, i32(t ^ (g >> 1))
            source = source + (head + i32(((first & 63) + key) * row_bytes + t * 16))
            target = i32(place + part * (half_bytes >> 1) + (column << 4))
            for j in range(pieces):
                isa.copy16_fill(i32(target + j * 512), source + j * 64, size)

    # Merged late, what it copies from and to takes registers that 8 tokens of 4 heads do not have left.
    return isa.inlined(follow), isa.inlined(look_up), isa.inlined(copy_set, early=True)


def make_load_tile(isa: Any, shape: Shape, *, held: int) -> Any:
    """`load_tile(m, q, queries, spare, q_at, b, kv_head, n_kv, tokens, row0, lane)`: the queries of a warp's tile m.

    Of a query's 64-byte pieces `held` go to the register array `queries`, the others to shared memory at `q_at`;
    `spare` holds eight int32 on the way.
    """
    i32, load_queries, pieces = isa.i32, make_load_queries(isa, shape), shape.pieces

    def load_piece(
        m: Any, j: Any, q: Any, queries: Any, spare: Any, q_at: Any, b: Any, kv_head: Any, n_kv: Any, tokens: Any,
        row0: Any, lane: Any,
    ) -> None:  # fmt: skip
        row = i32(row0 + m * 16)
        if j < held:
            load_queries(q, queries, m * held + j, b, kv_head, n_kv, tokens, row, lane, j)
        else:
            load_queries(q, spare, 0, b, kv_head, n_kv, tokens, row, lane, j)
            at = i32(q_at + (m * (pieces - held) + j - held) * 1024)
            isa.shared_store_u32x4(at, spare[0], spare[1], spare[2], spare[3])
            isa.shared_store_u32x4(i32(at + 512), spare[4], spare[5], spare[6], spare[7])

    load_piece = isa.inlined(load_piece)

    def load_tile(
        m: Any, q: Any, queries: Any, spare: Any, q_at: Any, b: Any, kv_head: Any, n_kv: Any, tokens: Any, row0: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        # Written out: a loop that is not unrolled would move the queries to local memory.
        load_piece(m, 0, q, queries, spare, q_at, b, kv_head, n_kv, tokens, row0, lane)
        load_piece(m, 1, q, queries, spare, q_at, b, kv_head, n_kv, tokens, row0, lane)
        if pieces == 4:
            load_piece(m, 2, q, queries, spare, q_at, b, kv_head, n_kv, tokens, row0, lane)
            load_piece(m, 3, q, queries, spare, q_at, b, kv_head, n_kv, tokens, row0, lane)

    return isa.inlined(load_tile)
