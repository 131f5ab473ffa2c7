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

from eagle3core.kernels.attention.layout import BLOCK_SHIFT, EARLIER_BITS, UNIT, Shape, make_token_of
from eagle3core.kernels.attention.mask import HIDDEN
from eagle3core.kernels.attention.tile import make_steps

PLACES = 2 * UNIT  # of a node: two units, from the one that the prefix ends in
PLACES_BYTES = PLACES + 4  # of a node: rows of its places, a byte each, then how many of them are filled, a word


def tail_units(tokens: int) -> int:
    """Units that `tokens` nodes and the prefix's last unit take in shared memory, wherever the prefix ends."""
    return -(-(UNIT - 1 + tokens) // UNIT)


def tail_bytes(shape: Shape, tail: int) -> int:
    """Shared memory of `tail` units and of the places of as many nodes as they may hold, bytes."""
    return tail * (shape.unit_bytes + UNIT * PLACES_BYTES)


def make_paths(
    isa: Any, shape: Shape, *, threads: int, held: int, tail: int, tiles: int, abreast: int = 0, windowed: bool = False
) -> tuple[Any, Any, Any]:
    """`owns_tail`, `load_tail` and `add_paths` of a block of `threads`; three that do nothing where `tail` is 0."""
    if tail:
        return (
            make_owns_tail(isa, shape),
            make_load_tail(isa, shape, threads, tail),
            make_add_paths(
                isa, shape, held=held, tail=tail, tiles=tiles, abreast=abreast or 3 - tiles, windowed=windowed
            ),
        )

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


def make_load_tail(isa: Any, shape: Shape, threads: int, tail: int) -> Any:
    """`load_tail(at, k, v, table, mask, tokens, ctx, kv_head, n_kv, tid)`: the block copies all units beyond the
    prefix, and says which of their rows stand in each node's places.

    The units are laid out as in `fetch`, the one that the prefix ends in first. The copies are committed, not waited
    for. `mask` is of this sequence's first node.
    """
    i32, i64 = isa.i32, isa.i64
    pieces, row_bytes, half_bytes = shape.row_pieces, shape.row_bytes, shape.half_bytes
    head_bytes, unit_bytes = row_bytes << BLOCK_SHIFT, shape.unit_bytes
    columns = 4 * pieces  # of 16 bytes
    column_shift, fp8 = columns.bit_length() - 1, shape.is_fp8
    row_at, places_at = make_row_at(isa), tail * unit_bytes
    counts_at = places_at + tail * UNIT * PLACES

    def copy_units(at: Any, k: Any, v: Any, table: Any, ctx: Any, end: Any, kv_head: Any, n_kv: Any, tid: Any) -> None:
        first = i32(ctx & -UNIT)
        i, n = i32(tid), i32((end - first) * 2 * columns)
        # 64 nodes after up to 15 old keys, from a whole unit on, lie in two blocks at most: no copy waits for an entry.
        near = isa.load_u32(table + i32(first >> BLOCK_SHIFT) * 4)
        far = isa.load_u32(table + i32((end - 1) >> BLOCK_SHIFT) * 4)
        while i < n:
            column, is_value, row = i32(i & (columns - 1)), i32((i >> column_shift) & 1), i32(i >> (column_shift + 1))
            piece, g = i32(column >> 2), i32(row & 7)
            t = i32((column & 3) ^ (g >> 1))
            block = near
            if i32((first + row) >> BLOCK_SHIFT) != i32(first >> BLOCK_SHIFT):
                block = far
            source, place = k, i32(0)
            if is_value != 0:
                source, place = v, i32(half_bytes)
            elif fp8:
                t = i32(column & 3)
            source = source + i64(i32(block * n_kv + kv_head)) * head_bytes
            source = source + i32(((first + row) & 63) * row_bytes + column * 16)
            place = i32(place + (row >> 4) * unit_bytes + (((row >> 3) & 1) * pieces + piece) * 512)
            isa.copy16_fill(i32(at + place + g * 64 + (t << 4)), source, i32(16))
            i = i32(i + threads)
        isa.copy_commit()

    def lay_places(at: Any, mask: Any, tokens: Any, ctx: Any, tid: Any) -> None:
        # A word of a node has places g and g + 8 of both units.
        i, words, base = i32(tid), i32((tokens + 31) >> 5), i32(ctx & (UNIT - 1))
        while i < i32(tokens * 8):
            node, g = i32(i >> 3), i32(i & 7)
            low, high = isa.load_u32(mask + node * words * 4), i32(0)
            if words > 1:
                high = isa.load_u32(mask + (node * words + 1) * 4)
            rows = i32(row_at(g, base, low, high) | (row_at(i32(g + 8), base, low, high) << 8))
            rows = i32(rows | (row_at(i32(g + 16), base, low, high) << 16))
            rows = i32(rows | (row_at(i32(g + 24), base, low, high) << 24))
            isa.shared_store_u32(i32(at + places_at + i * 4), rows)
            if g == 0:
                n_filled = i32(base + isa.popcount(low) + isa.popcount(high))
                isa.shared_store_u32(i32(at + counts_at + node * 4), n_filled)
            i = i32(i + threads)

    copy_units, lay_places = isa.inlined(copy_units), isa.inlined(lay_places)

    def load_tail(
        at: Any, k: Any, v: Any, table: Any, mask: Any, tokens: Any, ctx: Any, kv_head: Any, n_kv: Any, tid: Any
    ) -> None:
        copy_units(at, k, v, table, ctx, i32(ctx + tokens), kv_head, n_kv, tid)
        lay_places(at, mask, tokens, ctx, tid)

    return isa.inlined(load_tail)


def make_row_at(isa: Any) -> Any:
    """`row_at(place, base, low, high)`: the row of shared memory that stands in a place of a node with that mask; the
    root's where nothing does. The prefix ends at place and row `base`."""
    i32 = isa.i32

    def row_at(place: Any, base: Any, low: Any, high: Any) -> Any:
        row, depth = i32(place), i32(place - base)
        if depth >= 0:
            bits, start, n_low = low, base, isa.popcount(low)
            if depth >= n_low:
                bits, depth, start = high, i32(depth - n_low), i32(base + 32)
            # Ancestors come before their descendants, so the one at depth d has the d-th bit.
            while depth > 0 and bits != 0:
                bits, depth = i32(bits & (bits - 1)), i32(depth - 1)
            row = base
            if bits != 0:
                row = i32(start + isa.popcount(i32((bits & -bits) - 1)))
        return row

    return isa.inlined(row_at)


def make_add_paths(
    isa: Any, shape: Shape, *, held: int, tail: int, tiles: int, abreast: int, windowed: bool = False
) -> Callable[..., Any]:
    """`add_paths(...)`: a warp's rows take in the unit that begins at `first`; 1 if any row sees it.

    Operands: `at` (see `load_tail`), queries and q_at as `score` takes them, accumulators, tops, sums, tokens, ctx,
    first, row0, behind, scale, lane. Scores and values are those of one node after the other; maxima move once for all.

    Args:
        held: of `make_steps`. tail: units at `at`. tiles: of the warp, 16 rows each. abreast: nodes scored at once,
            whose products then need not wait for each other.
        windowed: `behind` holds a window (`layout.EARLIER_BITS`), counted back from the node's last place, its own.
    """
    cuda, i32, f32 = isa.cuda, isa.i32, isa.f32
    token_of, fp8 = make_token_of(isa, shape.group), shape.is_fp8
    pieces, half_bytes, unit_bytes = shape.row_pieces, shape.half_bytes, shape.unit_bytes
    places_at = tail * unit_bytes
    counts_at = places_at + tail * UNIT * PLACES
    n_scores, n_keys = 8 * abreast, (2 if fp8 else 1) * abreast

    def keys_at(row: Any) -> Any:
        return i32((row >> 4) * unit_bytes + ((row >> 3) & 1) * (pieces * 512) + (row & 7) * 64)

    keys_at = isa.inlined(keys_at)

    def read_at(rows: Any, past: Any, lane: Any) -> Any:
        # Where ldmatrix finds a lane's key, or value: that of place (lane mod 16), 16-byte column lane / 16.
        row = i32((rows >> i32(past + (lane & 8))) & 255)
        return i32(keys_at(row) + (((lane >> 4) ^ ((row & 7) >> 1)) << 4))

    read_at = isa.inlined(read_at)

    def take_own(
        s: Any, scores: Any, all_scores: Any, row: Any, node: Any, n_seen: Any, behind: Any, lane: Any
    ) -> None:
        """A node's scores join those of its tile, but for places that are not filled, or out of its window."""
        column, nearest = i32((lane & 3) * 2), i32(0)
        if windowed:
            nearest = i32(n_seen - (behind >> EARLIER_BITS))
        for far in range(2):
            if token_of(i32(row + far * 8)) == node:
                for h in range(2):
                    for e in range(2):
                        if column + h * 8 + e < n_seen and (not windowed or column + h * 8 + e >= nearest):
                            all_scores[far * 2 + h * 4 + e] = scores[s + far * 2 + h * 4 + e]

    def weights_of(all_weights: Any, weights: Any, row: Any, node: Any) -> None:
        """The weights of a node's rows; of others', zeros."""
        for far in range(2):
            is_own = token_of(i32(row + far * 8)) == node
            for h in range(2):
                weights[far + 2 * h] = i32(0)
                if is_own:
                    weights[far + 2 * h] = all_weights[far + 2 * h]

    take_own, weights_of = isa.inlined(take_own), isa.inlined(weights_of)

    def of_tile(tile: int) -> Any:
        steps = make_steps(isa, shape, tiles=1, half=False, held=held, first_tile=tile)
        score = make_steps(isa, shape, tiles=1, half=False, held=held, units=abreast, first_tile=tile).score_apart
        raise_tops, weigh, add_weighed = steps.raise_tops, steps.weigh, steps.add_weighed

        def add_tile(
            at: Any, queries: Any, q_at: Any, accumulators: Any, tops: Any, sums: Any, tokens: Any, ctx: Any,
            first: Any, row0: Any, behind: Any, scale: Any, lane: Any,
        ) -> Any:  # fmt: skip
            scores, all_scores = cuda.local.array(n_scores, f32), cuda.local.array(8, f32)
            seen, keys = cuda.local.array(abreast, i32), cuda.local.array(n_keys, i32)
            weights, all_weights = cuda.local.array(4, i32), cuda.local.array(4, i32)
            for i in range(8):
                all_scores[i] = HIDDEN
            row, sees, past = i32(row0 + tile * 16), i32(0), i32(first - (ctx & -UNIT))  # 0, or a unit
            own, node, last = i32(row + (lane >> 2)), token_of(row), i32(min(token_of(i32(row + 15)), tokens - 1))
            places, counts = i32(at + places_at), i32(at + counts_at)
            while node <= last:
                sees_here = i32(0)
                for a in range(abreast):
                    # Past the last node the one before stands in; nobody takes its scores.
                    own_at = i32(min(node + a, last))
                    seen[a] = i32(isa.shared_load_u32(i32(counts + own_at * 4)) - past)
                    sees_here = i32(sees_here | i32(seen[a] > 0))
                    if fp8:
                        rows = i32(isa.shared_load_u32(i32(places + own_at * PLACES + (lane >> 2) * 4)) >> past)
                        own_16 = i32(at + (lane & 3) * 16)
                        keys[2 * a] = i32(own_16 + keys_at(i32(rows & 255)))
                        keys[2 * a + 1] = i32(own_16 + keys_at(i32((rows >> 8) & 255)))
                    else:
                        rows = isa.shared_load_u32(i32(places + own_at * PLACES + (lane & 7) * 4))
                        keys[a] = i32(at + read_at(rows, past, lane))
                if sees_here != 0:
                    score(scores, queries, q_at, keys)
                    for a in range(abreast):
                        take_own(8 * a, scores, all_scores, own, i32(node + a), seen[a], behind, lane)
                    sees = i32(1)
                node = i32(node + abreast)
            if sees != 0:
                raise_tops(all_scores, accumulators, tops, sums, scale, lane)
                weigh(0, all_scores, all_weights, tops, sums, scale)
                node = token_of(row)
                while node <= last:
                    if i32(isa.shared_load_u32(i32(counts + node * 4)) - past) > 0:
                        weights_of(all_weights, weights, own, node)
                        rows = isa.shared_load_u32(i32(places + node * PLACES + (lane & 7) * 4))
                        v_at = i32(at + half_bytes + read_at(rows, past, lane))
                        add_weighed(weights, accumulators, v_at, i32(v_at ^ 32))
                    node = i32(node + 1)
            return sees

        return isa.inlined(add_tile)

    first_tile, second_tile = of_tile(0), of_tile(tiles - 1)

    def add_paths(
        at: Any, queries: Any, q_at: Any, accumulators: Any, tops: Any, sums: Any, tokens: Any, ctx: Any, first: Any,
        row0: Any, behind: Any, scale: Any, lane: Any,
    ) -> Any:  # fmt: skip
        sees = first_tile(at, queries, q_at, accumulators, tops, sums, tokens, ctx, first, row0, behind, scale, lane)
        if tiles == 2:
            sees |= second_tile(
                at, queries, q_at, accumulators, tops, sums, tokens, ctx, first, row0, behind, scale, lane
            )
        return i32(sees)

    return isa.inlined(add_paths)  # type: ignore[no-any-return]
