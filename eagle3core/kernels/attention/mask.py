"""Which keys of a unit a row may not see: keys past the end, masked keys by their bits, old ones by the window.

A pass masks its own T keys, at most 64, and a row's bits fit one register pair. Under `earlier` it also masks the rows
that earlier passes left between the prefix and its own, and a row takes the 16 bits of a unit from the two words that
hold them, however many words there are. Rows of paths come here with units of old keys alone, which a window hides.

Source: derived here; docs/requirements.md R-108.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import EARLIER_BITS, UNIT, Shape, make_token_of

HIDDEN = np.float32("-inf")  # the score of a key that a row may not see


def make_hide(isa: Any, shape: Shape, tiles: int, *, words: int = 0, windowed: bool = False) -> Any:
    """`hide(scores, ...)` sets the scores of keys that a row may not see to `HIDDEN`; 1 if this lane sees any key.

    Args:
        words: of a row's mask where keys ctx .. end - 1 are masked and not the T newest alone.
        windowed: the operand `window` is `behind` (`layout.EARLIER_BITS`). With `words` its window hides old keys too;
            without it is that of rows of paths, whose units here hold old keys alone.
    """
    i32, i64 = isa.i32, isa.i64
    token_of = make_token_of(isa, shape.group)

    def hide_row(
        s: Any, row: Any, scores: Any, first: Any, tokens: Any, ctx: Any, end: Any, window: Any, mask: Any,
        positions: Any, lane: Any,
    ) -> Any:  # fmt: skip
        words, token, column = i32((tokens + 31) >> 5), token_of(row), i32((lane & 3) * 2)
        if token >= tokens:
            token = i32(tokens - 1)  # a row that does not exist; nobody reads its result
        new = i64(isa.load_u32(mask + token * words * 4)) & 0xFFFFFFFF  # bit i: sees new key i
        if words > 1:
            new = new | (i64(isa.load_u32(mask + (token * words + 1) * 4)) << 32)
        offset, left = i32(first - ctx), i32(end - first)
        if offset >= 0:
            seen = new >> offset
        else:
            before = i32(min(-offset, UNIT))
            seen = (new << before) | ((i64(1) << before) - 1)
        if left < UNIT:
            seen = seen & ((i64(1) << left) - 1)
        sees = i32(seen & 0xFFFF) >> column  # bit 8 h + e: sees this lane's key e of half h
        if window > 0:
            position = isa.load_u32(positions + token * 4)
            for h in range(2):
                for e in range(2):
                    key = i32(first + column + h * 8 + e)
                    stands = key
                    if key >= ctx and key < end:
                        stands = isa.load_u32(positions + i32(key - ctx) * 4)
                    if position - stands >= window:
                        sees = i32(sees & ~(1 << (h * 8 + e)))
        for h in range(2):
            for e in range(2):
                if (sees >> (h * 8 + e)) & 1 == 0:
                    scores[s + h * 4 + e] = HIDDEN
        return i32(sees & 0x303)

    if words:
        hide_row = _make_hide_row_of_many(isa, shape, words, windowed)
    else:
        hide_row = _make_hide_row_of_paths(isa, shape) if windowed else isa.inlined(hide_row)

    def hide(
        scores: Any, first: Any, row0: Any, tokens: Any, ctx: Any, end: Any, window: Any, mask: Any, positions: Any,
        lane: Any,
    ) -> Any:  # fmt: skip
        row = i32(row0 + (lane >> 2))
        sees = hide_row(0, row, scores, first, tokens, ctx, end, window, mask, positions, lane)
        sees |= hide_row(2, i32(row + 8), scores, first, tokens, ctx, end, window, mask, positions, lane)
        if tiles == 2:
            sees |= hide_row(8, i32(row + 16), scores, first, tokens, ctx, end, window, mask, positions, lane)
            sees |= hide_row(10, i32(row + 24), scores, first, tokens, ctx, end, window, mask, positions, lane)
        return i32(sees)

    return isa.inlined(hide)


def _make_hide_row_of_many(isa: Any, shape: Shape, words: int, windowed: bool) -> Any:
    """`hide_row` where the masked keys are all from ctx to end, and a row's bits take `words` words.

    A window hides none of them: a row's ancestors are fewer than any window is long."""
    i32 = isa.i32
    token_of = make_token_of(isa, shape.group)

    def hide_row(
        s: Any, row: Any, scores: Any, first: Any, tokens: Any, ctx: Any, end: Any, behind: Any, mask: Any,
        positions: Any, lane: Any,
    ) -> Any:  # fmt: skip
        token, column = token_of(row), i32((lane & 3) * 2)
        if token >= tokens:
            token = i32(tokens - 1)  # a row that does not exist; nobody reads its result
        left, offset = i32(end - first), i32(first - ctx)
        # Keys of the prefix in this unit, at most 15: without a window a unit of the prefix alone does not come here.
        before, word = i32(max(-offset, 0)), i32(max(offset, 0) >> 5)
        if windowed:
            before = i32(min(before, UNIT))
        # The bits of the unit alone, and the second word only where it reaches into that: two words in a pair of
        # registers, as above, made the largest of these kernels spill, and so did 64 bits for the first.
        at, shift = mask + i32(token * words + word) * 4, i32(max(offset, 0) & 31)
        seen = i32(i32(isa.load_u32(at) >> shift) & i32((1 << min(32 - shift, UNIT)) - 1))
        if shift > UNIT and word + 1 < words:  # after the last word lies another row's, or nothing
            seen = i32(seen | i32((isa.load_u32(at + 4) & 0xFFFF) << (32 - shift)))
        seen = i32(i32(seen << before) | i32((1 << before) - 1))
        if left < UNIT:
            seen = i32(seen & i32((1 << left) - 1))
        if windowed:  # old keys stand at their index
            position = isa.load_u32(positions + token * 4)
            gone = i32(min(max(position + 1 - (behind >> EARLIER_BITS) - first, 0), before))
            seen = i32(seen & i32(-(1 << gone)))
        sees = i32(seen & 0xFFFF) >> column  # bit 8 h + e: sees this lane's key e of half h
        for h in range(2):
            for e in range(2):
                if (sees >> (h * 8 + e)) & 1 == 0:
                    scores[s + h * 4 + e] = HIDDEN
        return i32(sees & 0x303)

    return isa.inlined(hide_row)


def _make_hide_row_of_paths(isa: Any, shape: Shape) -> Any:
    """`hide_row` of a unit of old keys alone, which stand at their index, below a tree's nodes."""
    i32 = isa.i32
    token_of = make_token_of(isa, shape.group)

    def hide_row(
        s: Any, row: Any, scores: Any, first: Any, tokens: Any, ctx: Any, end: Any, behind: Any, mask: Any,
        positions: Any, lane: Any,
    ) -> Any:  # fmt: skip
        token, column = token_of(row), i32((lane & 3) * 2)
        if token >= tokens:
            token = i32(tokens - 1)  # a row that does not exist; nobody reads its result
        position = isa.load_u32(positions + token * 4)
        gone = i32(min(max(position + 1 - (behind >> EARLIER_BITS) - first, 0), UNIT))
        sees = i32(i32(-(1 << gone)) & 0xFFFF) >> column  # bit 8 h + e: sees this lane's key e of half h
        for h in range(2):
            for e in range(2):
                if (sees >> (h * 8 + e)) & 1 == 0:
                    scores[s + h * 4 + e] = HIDDEN
        return i32(sees & 0x303)

    return isa.inlined(hide_row)
