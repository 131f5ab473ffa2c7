"""What the GEMM does with its fp32 sums, an item a lane, by the kind of its epilogue.

The 8 items of a tile and row of x lie in 8 neighbouring lanes. What is computed of them is in `values`.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import PARTIALS_STEP, Epilogue
from eagle3core.kernels.gemm.order.place import make_store_pair
from eagle3core.kernels.gemm.values import (
    make_best,
    make_cache_line,
    make_gated,
    make_rotated,
    make_scaled,
    make_squares,
)
from eagle3core.kernels.layer.cache_write import make_to_e4m3


def make_finish(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    """Inlined `finish`: what becomes of one item, v0 and v1 of a pair of one row of x.

    Every lane of the warp must call it: some kinds exchange values between the 8 lanes of a tile and row.
    """
    act = {
        "store": _make_store, "residual": _make_residual, "swiglu": _make_swiglu, "qkv": _make_qkv, "head": _make_head
    }[epilogue.kind](isa, epilogue, dtype)  # fmt: skip
    scaled = make_scaled(isa, epilogue)

    def finish(
        v0: Any, v1: Any, scale: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> None:  # fmt: skip
        v0, v1 = scaled(v0, scale, operands[4]), scaled(v1, scale, operands[5])
        act(v0, v1, operands, slot, tile, pair, row, rows, n, q_heads, kv_heads, y, second, third, ordered)

    return isa.inlined(finish)


def _make_store(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i64, to_bits, zero = isa.i64, isa.PACK[dtype], np.float32(0)

    def store(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> None:  # fmt: skip
        if row < rows:
            at = y + (i64(row) * n + tile * 16 + pair) * 2
            isa.store_u16(at, to_bits(zero, v0))
            isa.store_u16(at + 16, to_bits(zero, v1))

    return isa.inlined(store)


def _make_residual(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, low, zero = isa.i32, isa.i64, isa.PACK[dtype], isa.LOW[dtype], np.float32(0)
    partials_mask, orders_ = -PARTIALS_STEP, epilogue.ordered_tiles > 0
    store_pair, squares_of = make_store_pair(isa, epilogue.ordered_tiles or 1), make_squares(isa, 1)

    def residual(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> None:  # fmt: skip
        bits0, bits1 = to_bits(zero, operands[0] + v0), to_bits(zero, operands[1] + v1)
        h0, h1 = low(bits0), low(bits1)
        squares = squares_of(h0, h1)
        scaled0, scaled1 = h0 * operands[2], h1 * operands[3]
        word, column = i32(0), i32(tile * 16 + pair)
        if orders_:
            # Neighbouring lanes change what they hold: an even one gets two columns side by side of the lower eight, an
            # odd one of the upper, so that whole words can be stored.
            sent = scaled1
            if pair & 1:
                sent = scaled0
            came = isa.shuffle_xor_f32(sent, 1)
            word = to_bits(came, scaled0)
            if pair & 1:
                word, column = to_bits(scaled1, came), i32(column + 7)
        if row < rows:
            at = (i64(row) * n + tile * 16 + pair) * 2
            isa.store_u16(y + at, bits0)
            isa.store_u16(y + at + 16, bits1)
            if orders_:
                isa.store_u32(second + (i64(row) * n + column) * 2, word)
                store_pair(ordered, n, row, column, word)
            else:
                isa.store_u16(second + at, to_bits(zero, scaled0))
                isa.store_u16(second + at + 16, to_bits(zero, scaled1))
            if pair == 0:
                pitch = ((n >> 4) + (PARTIALS_STEP - 1)) & partials_mask
                isa.store_f32(third + (i64(row) * pitch + tile) * 4, squares)

    return isa.inlined(residual)


def _make_swiglu(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, zero, orders_ = isa.i32, isa.i64, isa.PACK[dtype], np.float32(0), epilogue.ordered_tiles > 0
    store_pair, gated_of = make_store_pair(isa, epilogue.ordered_tiles or 1), make_gated(isa)

    def swiglu(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> None:  # fmt: skip
        gated = gated_of(v0, v1)
        column = i32(tile * 8 + pair)
        at = y + (i64(row) * n + column) * 2
        if orders_:
            # A word is two columns of neighbouring lanes; the even one stores it.
            word = to_bits(isa.shuffle_xor_f32(gated, 1), gated)
            if row < rows and pair & 1 == 0:
                isa.store_u32(at, word)
                store_pair(ordered, n, row, column, word)
        elif row < rows:
            isa.store_u16(at, to_bits(zero, gated))

    return isa.inlined(swiglu)


def _make_qkv(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, zero = isa.i32, isa.i64, isa.PACK[dtype], np.float32(0)
    head_dim, half = epilogue.head_dim, epilogue.head_dim // 2
    tiles_shift, tiles_mask = (head_dim // 16).bit_length() - 1, head_dim // 16 - 1
    rotated, cache_line = make_rotated(isa), make_cache_line(isa, epilogue)
    e4m3_, to_e4m3 = epilogue.e4m3_cache, make_to_e4m3(isa)

    def qkv(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> None:  # fmt: skip
        if row < rows:
            head = i32(tile >> tiles_shift)
            channel = i32((tile & tiles_mask) * 8 + pair)
            if head < q_heads + kv_heads:
                v0, v1 = rotated(v0, v1, operands[0], operands[1])
            if head < q_heads:
                at = y + ((i64(row) * q_heads + head) * head_dim + channel) * 2
                isa.store_u16(at, to_bits(zero, v0))
                isa.store_u16(at + head_dim, to_bits(zero, v1))
            elif slot >= 0:
                own = i32(head - q_heads)
                base = second
                factor = operands[2]
                if own >= kv_heads:
                    own = i32(own - kv_heads)
                    base = third
                    factor = operands[3]
                line = cache_line(slot, own, kv_heads)
                if e4m3_:
                    at = base + (line * head_dim + channel)
                    isa.store_u8(at, to_e4m3(v0, factor))
                    isa.store_u8(at + half, to_e4m3(v1, factor))
                else:
                    at = base + (line * head_dim + channel) * 2
                    isa.store_u16(at, to_bits(zero, v0))
                    isa.store_u16(at + head_dim, to_bits(zero, v1))

    return isa.inlined(qkv)


def _make_head(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, low, zero = isa.i32, isa.i64, isa.PACK[dtype], isa.LOW[dtype], np.float32(0)
    powers_, best_of = epilogue.has_powers, make_best(isa, epilogue, 1)

    def head(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any, ordered: Any,
    ) -> None:  # fmt: skip
        bits0, bits1 = to_bits(zero, v0), to_bits(zero, v1)
        best, column, total = best_of(low(bits0), low(bits1), i32(tile * 16 + pair))
        if row < rows:
            at = y + (i64(row) * n + tile * 16 + pair) * 2
            isa.store_u16(at, bits0)
            isa.store_u16(at + 16, bits1)
            if pair == 0:
                at = (i64(row) * (n >> 4) + tile) * 4
                isa.store_f32(second + at, best)
                if powers_:
                    isa.store_f32(third + at, total)
                else:
                    isa.store_u32(third + at, column)

    return isa.inlined(head)
