"""A warp's walk over its pieces: what they read, several at once, then the epilogue of each, in so many words.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue, make_fetch_columns, make_opened
from eagle3core.kernels.gemm.fragments.kinds import KINDS
from eagle3core.kernels.gemm.values import make_scaled

# Pieces whose operands are asked for before the first is used, as many as the registers hold that the products left.
_AT_ONCE = 8


def make_finish_fragments(isa: Any, epilogue: Epilogue, dtype: str, x_tiles: int) -> Any:
    """Inlined `finish_fragments(sums, scales, ...)`: the epilogue of a warp's tile of W by `x_tiles` pieces.

    `sums` is a register array of 4 f32 a piece; `scales` where the block's row scales lie in shared memory. `rows` is 0
    for a warp that has no tile; it names another one's all the same, so that every warp goes the same way.
    """
    cuda, i32, zero = isa.cuda, isa.i32, np.float32(0)
    begin, fetch, n_fetched, act = KINDS[epilogue.kind](isa, epilogue, dtype)
    fetch_columns, scaled, scales_ = make_fetch_columns(isa, epilogue), make_scaled(isa, epilogue), epilogue.quads > 0
    _, opened_columns = make_opened(isa, epilogue, dtype)
    at_once = min(_AT_ONCE, x_tiles)
    n_held, n_rest = max(1, n_fetched * at_once), x_tiles % at_once

    def fetch_piece(piece: Any, first: Any, held: Any, own: Any) -> None:
        fetch(own, piece, held, i32((piece - first) * n_fetched))

    def finish_piece(
        piece: Any, first: Any, held: Any, own: Any, sums: Any, scales: Any, bias0: Any, bias1: Any
    ) -> None:
        scale0, scale1 = zero, zero
        if scales_:
            both = isa.shared_load_u32x2(i32(scales + piece * 32))
            scale0, scale1 = isa.f32_of_bits(both[0]), isa.f32_of_bits(both[1])
        at = i32(piece * 4)
        act(
            own, piece, held, i32((piece - first) * n_fetched),
            scaled(sums[at], scale0, bias0), scaled(sums[at + 2], scale0, bias1),
            scaled(sums[at + 1], scale1, bias0), scaled(sums[at + 3], scale1, bias1),
        )  # fmt: skip

    fetch_rest, finish_rest = make_in_turn(isa, fetch_piece, n_rest), make_in_turn(isa, finish_piece, n_rest)
    fetch_pieces, finish_pieces = make_in_turn(isa, fetch_piece, at_once), make_in_turn(isa, finish_piece, at_once)

    def finish_some(some: Any, held: Any, own: Any, sums: Any, scales: Any, bias0: Any, bias1: Any) -> None:
        first = i32(some * at_once)
        fetch_pieces(first, first, held, own)
        finish_pieces(first, first, held, own, sums, scales, bias0, bias1)

    finish_whole = make_in_turn(isa, finish_some, x_tiles // at_once)

    def finish_fragments(
        sums: Any, scales: Any, lane: Any, row0: Any, tile: Any, rows: Any, n: Any, bias: Any, gain: Any,
        residual: Any, positions: Any, slots: Any, table: Any, q_heads: Any, kv_heads: Any, y: Any, second: Any,
        third: Any, ordered: Any,
    ) -> None:  # fmt: skip
        held, own_scales = cuda.local.array(n_held, i32), i32(scales + (lane & 3) * 8)
        columns = fetch_columns(tile, i32(lane >> 2), n, bias, gain)
        gain0, gain1, bias0, bias1 = opened_columns(columns[0], columns[1], columns[2], columns[3])
        own = begin(
            lane, row0, tile, rows, n, gain0, gain1, residual, positions, slots, table, q_heads, kv_heads, y, second,
            third, ordered,
        )  # fmt: skip
        finish_whole(i32(0), held, own, sums, own_scales, bias0, bias1)
        first = i32(x_tiles - n_rest)
        fetch_rest(first, first, held, own)
        finish_rest(first, first, held, own, sums, own_scales, bias0, bias1)

    return isa.inlined(finish_fragments)


def make_in_turn(isa: Any, step: Any, count: int) -> Any:
    """Inlined `in_turn(first, *operands)`: `step(i, *operands)` for `count` numbers from `first` on.

    In so many words, by halves: the compiler leaves a loop over large steps rolled, and a register array that such a
    loop walks over lies in local memory.
    """
    i32 = isa.i32
    if count < 2:

        def nothing(first: Any, *operands: Any) -> None: ...

        return isa.inlined(step if count else nothing)
    half = count // 2
    lower, upper = make_in_turn(isa, step, half), make_in_turn(isa, step, count - half)

    def in_turn(first: Any, *operands: Any) -> None:
        lower(first, *operands)
        upper(i32(first + half), *operands)

    return isa.inlined(in_turn)
