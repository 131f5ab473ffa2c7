"""What warps that walk by themselves have in common, in `attention_streams` and `attention_splits`: how they begin,
what they do with a unit that not every row may see, and what they count.

Source: derived here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle3core.kernels.attention.layout import (
    BLOCK_SHIFT,
    TILE_EXECUTED,
    TILE_MASK_EMPTY,
    TILE_SPAN_EMPTY,
    TILE_TOTAL,
    UNIT,
    Shape,
    make_span,
    make_walk,
)
from eagle3core.kernels.attention.pieces import make_pinned
from eagle3core.kernels.attention.warp.fetch import make_fetch


class Walk(NamedTuple):
    """How a warp walks.

    Attributes:
        first_of: of `layout.make_walk`. follow, copy_set: of `fetch.make_fetch`.
        begin: `(table, table_width, first_stream, end_stream, ctx_at, tokens, window, lane)`: (ctx, end, units, first
            unit, first key that all rows see, the next set's unit or -1, its chunk's entries, and of the chunk after:
            stream, first unit or -1, entries).
        sees: `(scores, unit, ctx, end, seen_by_all, b, tokens, window, masks, positions, lane)`: hides keys of a
            unit from rows that may not see them; 0 where no row sees any.
        count: `(counters, executed, mask_empty, n_units, first_unit, table_width, warp, lane)`: adds to the counters of
            R-109.
    """

    first_of: Any
    follow: Any
    copy_set: Any
    begin: Any
    sees: Any
    count: Any


def make_own_walk(isa: Any, shape: Shape, *, units: int, apart: int, words: int, windowed: bool, hide: Any) -> Walk:
    """The walk of a warp over sets of `units` units of streams that are `apart`; `words`, `windowed` and `hide` as of
    `tile.make_steps`."""
    cuda, i32, i64, uniform = isa.cuda, isa.i32, isa.i64, isa.warp_max_i32
    interleave = shape.splits * shape.streams
    first_of, advance = make_walk(isa, shape)
    span, pinned = make_span(isa, earlier=words > 0, windowed=windowed), make_pinned(isa)
    look_up, chunk_after, follow, copy_set = make_fetch(isa, shape, units=units, apart=apart)

    def begin(
        table: Any, table_width: Any, first_stream: Any, end_stream: Any, ctx_at: Any, tokens: Any, window: Any,
        lane: Any,
    ) -> Any:  # fmt: skip
        # The first entries are asked for beside the length, and again if that or a window says that they are others.
        entries = look_up(table, first_stream, i32(table_width << (BLOCK_SHIFT - 4)), lane)
        ctx = uniform(isa.load_u32(ctx_at))
        end, n_units, first_unit, seen_by_all = span(ctx, tokens, window)
        stream, unit = advance(
            first_stream, i32(first_of(first_stream, first_unit) - interleave), apart, end_stream, first_unit, n_units
        )
        next_unit, later_stream, later_unit, later = i32(-1), stream, i32(-1), i32(0)
        if stream < end_stream:
            next_unit = unit
            if unit != first_stream:
                entries = look_up(table, unit, n_units, lane)
            later_stream, later_unit = chunk_after(stream, unit, end_stream, first_unit, n_units)
            if later_unit >= 0:
                later = look_up(table, later_unit, n_units, lane)
        return ctx, end, n_units, first_unit, seen_by_all, next_unit, entries, later_stream, later_unit, later

    def sees(
        scores: Any, unit: Any, ctx: Any, end: Any, seen_by_all: Any, b: Any, tokens: Any, window: Any, masks: Any,
        all_positions: Any, lane: Any,
    ) -> Any:  # fmt: skip
        first, seen = i32(unit * UNIT), i32(1)
        if i32(first + UNIT) > ctx or first < seen_by_all:
            here, token0 = pinned(lane), i32(pinned(b) * tokens)
            mask = masks + i64(token0 * ((tokens + 31) >> 5)) * 4
            if words > 0:
                mask = masks + i64(i32(token0 * words)) * 4
            positions = all_positions + i64(token0) * 4
            seen = isa.any_lane(hide(scores, first, 0, tokens, ctx, end, window, mask, positions, here))
        return seen

    def count(
        counters: Any, executed: Any, mask_empty: Any, n_units: Any, first_unit: Any, table_width: Any, warp: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        if lane == 0:
            isa.atomic_add_i32(counters + 4 * TILE_EXECUTED, executed)
            isa.atomic_add_i32(counters + 4 * TILE_MASK_EMPTY, mask_empty)
            if warp == 0 and cuda.blockIdx.x == 0:
                held = i32(max(n_units - first_unit, 0))
                isa.atomic_add_i32(counters + 4 * TILE_TOTAL, i32(table_width * 4))
                isa.atomic_add_i32(counters + 4 * TILE_SPAN_EMPTY, i32(table_width * 4 - held))

    return Walk(first_of, follow, copy_set, isa.inlined(begin), isa.inlined(sees), isa.inlined(count))
