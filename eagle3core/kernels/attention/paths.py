"""Keys of a tree's nodes, for every row in the places that plain decoding gives them.

In the cache the nodes of a tree lie one after the other, and a row's ancestors are some of them. Its sums have to be
those of plain decoding, where the ancestors lie next to each other: bits depend on which keys share a unit, and on
their places in it. So a unit that reaches beyond the prefix is put together for each node by itself: its place j is the
key at position 16 u + j, an old one or the ancestor at depth 16 u + j - ctx. Keys and values of all nodes are brought
to shared memory once, and lanes read their operands from wherever those lie; other nodes' rows add exactly zero.

Source: derived here; tree attention after SpecInfer, arXiv 2305.09781, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eagle3core.kernels.attention.layout import BLOCK_SHIFT, UNIT, Shape, make_token_of
from eagle3core.kernels.attention.mask import HIDDEN
from eagle3core.kernels.attention.tile import make_steps


def tail_units(tokens: int) -> int:
    """Units that `tokens` nodes and the prefix's last unit take in shared memory, wherever the prefix ends."""
    return -(-(UNIT - 1 + tokens) // UNIT)


def make_paths(isa: Any, shape: Shape, *, threads: int, held: int, wanted: bool) -> tuple[Any, Any, Any]:
    """`owns_tail`, `load_tail` and `add_paths` of a block of `threads`; three that do nothing unless `wanted`."""
    if wanted:
        return make_owns_tail(isa, shape), make_load_tail(isa, shape, threads), make_add_paths(isa, shape, held=held)

    def nothing(*operands: Any) -> Any:
        return isa.i32(0)

    return (isa.inlined(nothing),) * 3


def make_owns_tail(isa: Any, shape: Shape) -> Any:
    """`owns_tail(ctx, n_units, first_stream, last_stream)`: whether streams of a block reach beyond the prefix."""
    i32, interleave = isa.i32, shape.splits * shape.streams

    def owns_tail(ctx: Any, n_units: Any, first_stream: Any, last_stream: Any) -> Any:
        unit, owns = i32(ctx >> 4), i32(0)  # paths of up to 16 nodes reach into one unit more
        while unit < n_units and ctx >= 0:
            stream = i32(unit & (interleave - 1))
            if stream >= first_stream and stream < last_stream:
                owns = i32(1)
            unit = i32(unit + 1)
        return owns

    return isa.inlined(owns_tail)


def make_load_tail(isa: Any, shape: Shape, threads: int) -> Any:
    """`load_tail(tail, k, v, table, ctx, end, kv_head, n_kv, tid)`: the block copies all units beyond the prefix.

    They are laid out as in `fetch`, the one that the prefix ends in first. The copies are committed, not waited for.
    """
    i32, i64 = isa.i32, isa.i64
    pieces, row_bytes, half_bytes = shape.pieces, 2 * shape.dim, shape.half_bytes
    head_bytes, unit_bytes = row_bytes << BLOCK_SHIFT, shape.unit_bytes
    columns = 4 * pieces  # of 16 bytes
    column_shift = columns.bit_length() - 1

    def load_tail(tail: Any, k: Any, v: Any, table: Any, ctx: Any, end: Any, kv_head: Any, n_kv: Any, tid: Any) -> None:
        first = i32(ctx & -UNIT)
        i, n = i32(tid), i32((end - first) * 2 * columns)
        while i < n:
            column, is_value, row = i32(i & (columns - 1)), i32((i >> column_shift) & 1), i32(i >> (column_shift + 1))
            piece, t, g = i32(column >> 2), i32(column & 3), i32(row & 7)
            block = isa.load_u32(table + i32((first + row) >> BLOCK_SHIFT) * 4)
            source, place = k, i32(0)
            if is_value != 0:
                source, place, t = v, i32(half_bytes), i32(t ^ (g >> 1))
            source = source + i64(i32(block * n_kv + kv_head)) * head_bytes
            source = source + i32(((first + row) & 63) * row_bytes + column * 16)
            place = i32(place + (row >> 4) * unit_bytes + (((row >> 3) & 1) * pieces + piece) * 512)
            isa.copy16_fill(i32(tail + place + g * 64 + (t << 4)), source, i32(16))
            i = i32(i + threads)
        isa.copy_commit()

    return isa.inlined(load_tail)


def make_add_paths(isa: Any, shape: Shape, *, held: int) -> Callable[..., Any]:
    """`add_paths(...)`: a warp's 32 rows take in the unit that begins at `first`, node by node; 1 if any row sees it.

    Operands: `tail` (see `load_tail`), queries and q_at as `score` takes them, accumulators, tops, sums, `mask` (words
    of this sequence's first node), tokens, ctx, first, row0, scale, lane.

    Args:
        held: of `make_steps`.
    """
    cuda, i32, f32 = isa.cuda, isa.i32, isa.f32
    token_of = make_token_of(isa, shape.group)
    pieces, half_bytes, unit_bytes = shape.pieces, shape.half_bytes, shape.unit_bytes

    def row_at(j: Any, first: Any, ctx: Any, low: Any, high: Any) -> Any:
        """The row of shared memory that stands in place j of a unit; the root's where nothing does."""
        depth, base = i32(first + j - ctx), i32(ctx & (UNIT - 1))
        bits, n_low = low, isa.popcount(low)
        row = i32(base + depth)  # of the prefix, if that is where the place lies
        if depth >= 0:
            start = base
            if depth >= n_low:
                bits, depth, start = high, i32(depth - n_low), i32(base + 32)
            # Ancestors come before their descendants, so the one at depth d has the d-th bit.
            while depth > 0 and bits != 0:
                bits, depth = i32(bits & (bits - 1)), i32(depth - 1)
            row = base
            if bits != 0:
                row = i32(start + isa.popcount(i32((bits & -bits) - 1)))
        return row

    row_at = isa.inlined(row_at)

    def keys_at(row: Any, lane: Any) -> Any:
        half = i32((row >> 4) * unit_bytes + ((row >> 3) & 1) * (pieces * 512))
        return i32(half + (row & 7) * 64 + (lane & 3) * 16)

    keys_at = isa.inlined(keys_at)

    def hide_others(scores: Any, row: Any, node: Any, n_seen: Any, lane: Any) -> None:
        """All but the first `n_seen` keys of a unit, and other nodes' rows."""
        column = i32((lane & 3) * 2)
        for far in range(2):
            n = i32(n_seen)
            if token_of(i32(row + far * 8)) != node:
                n = i32(0)
            for h in range(2):
                for e in range(2):
                    if column + h * 8 + e >= n:
                        scores[far * 2 + h * 4 + e] = HIDDEN

    hide_others = isa.inlined(hide_others)

    def of_tile(tile: int) -> Any:
        steps = make_steps(isa, shape, tiles=1, half=False, held=held, first_tile=tile)
        score, raise_tops, add_values = steps.score_apart, steps.raise_tops, steps.add_values

        def add_tile(
            tail: Any, queries: Any, q_at: Any, accumulators: Any, tops: Any, sums: Any, mask: Any, tokens: Any,
            ctx: Any, first: Any, row0: Any, scale: Any, lane: Any,
        ) -> Any:  # fmt: skip
            scores = cuda.local.array(8, f32)
            row, words, sees = i32(row0 + tile * 16), i32((tokens + 31) >> 5), i32(0)
            node, last = token_of(row), i32(min(token_of(i32(row + 15)), tokens - 1))
            while node <= last:
                low, high = isa.load_u32(mask + node * words * 4), i32(0)
                if words > 1:
                    high = isa.load_u32(mask + (node * words + 1) * 4)
                n_seen = i32(ctx + isa.popcount(low) + isa.popcount(high) - first)
                if n_seen > 0:
                    near = i32(tail + keys_at(row_at(i32(lane >> 2), first, ctx, low, high), lane))
                    far = i32(tail + keys_at(row_at(i32((lane >> 2) + 8), first, ctx, low, high), lane))
                    score(scores, queries, q_at, near, far)
                    hide_others(scores, i32(row + (lane >> 2)), node, n_seen, lane)
                    raise_tops(scores, accumulators, tops, sums, scale, lane)
                    value = row_at(i32((lane & 7) + ((lane >> 3) & 1) * 8), first, ctx, low, high)
                    v_at = i32(tail + half_bytes + keys_at(value, i32(0)))
                    v_at = i32(v_at + (((lane >> 4) ^ ((value & 7) >> 1)) << 4))
                    add_values(0, scores, accumulators, tops, sums, v_at, i32(v_at ^ 32), scale)
                    sees = i32(1)
                node = i32(node + 1)
            return sees

        return isa.inlined(add_tile)

    first_tile, second_tile = of_tile(0), of_tile(1)

    def add_paths(
        tail: Any, queries: Any, q_at: Any, accumulators: Any, tops: Any, sums: Any, mask: Any, tokens: Any, ctx: Any,
        first: Any, row0: Any, scale: Any, lane: Any,
    ) -> Any:  # fmt: skip
        sees = first_tile(tail, queries, q_at, accumulators, tops, sums, mask, tokens, ctx, first, row0, scale, lane)
        return i32(
            sees
            | second_tile(tail, queries, q_at, accumulators, tops, sums, mask, tokens, ctx, first, row0, scale, lane)
        )

    return isa.inlined(add_paths)  # type: ignore[no-any-return]
