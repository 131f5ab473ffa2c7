"""What the GEMM does with its fp32 sums, in registers: the part that differs between a model's linear maps.

A block of the GEMM owns tiles of 16 weight rows, arranged as 8 pairs (r, r + distance): 8 apart in general, half a head
apart where a rotary embedding mixes the two, and gate with up where an activation does. One epilogue item is one pair
of one row of x; the 8 items of a tile and row lie in 8 neighbouring lanes.

Norm without a kernel: whoever makes the residual stream h also writes h * gain (the next norm's) and the sum of squares
of every 16 columns; the GEMM that reads it multiplies its sums by 1 / rms from those partial sums, in fixed order.

Several kernels end in this code and must give equal bits, so every product that is added to something is written as
`fused` or `product`: no compiler chooses where to round.

Source: derived here; RMSNorm: Zhang and Sennrich, arXiv 1910.07467; RoPE: Su et al., arXiv 2104.09864; SwiGLU: Shazeer,
arXiv 2002.05202; paged cache: Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Parameter, parameters

Kind = Literal["store", "residual", "swiglu", "qkv", "head"]

# Partial sums of squares of a row are stored in groups of this many (one float4 a lane), zeros after the last.
PARTIALS_STEP = 128


def quads_of(width: int) -> int:
    """`Epilogue.quads` of a norm over `width` columns."""
    return -(-width // (16 * PARTIALS_STEP))


@dataclass(frozen=True)
class Epilogue:
    """What a GEMM does with its sums.

    Attributes:
        kind: `store` y = v; `residual` h = residual + v, h * gain and partial sums of squares; `swiglu` silu(gate) *
            up; `qkv` rotate, write q, and k and v into the paged cache; `head` logits and the best of every 16.
        quads: float4 groups of partial sums a lane adds to get 1 / rms of an x row; 0: x is used as it is.
        has_bias: add `bias[row of W]`.
        has_residual: False drops the addition from `residual`.
        head_dim, block: of `qkv`: head size and tokens of a cache block, powers of two.
    """

    kind: Kind
    quads: int = 0
    has_bias: bool = False
    has_residual: bool = True
    head_dim: int = 0
    block: int = 0

    def __post_init__(self) -> None:
        if self.kind == "qkv":
            for name, size in (("head_dim", self.head_dim), ("block", self.block)):
                if size < 16 or size & (size - 1):
                    raise KernelLimit(
                        f"{name} is {size}", "a power of two, 16 or more", "use the reference backend for this model"
                    )

    @property
    def name(self) -> str:
        """Short text, unique per epilogue."""
        parts = [self.kind if self.has_residual else "first", f"n{self.quads}" if self.quads else ""]
        parts += ["b" if self.has_bias else "", f"d{self.head_dim}p{self.block}" if self.kind == "qkv" else ""]
        return "_".join(part for part in parts if part)


def gemm_parameters() -> tuple[Parameter, ...]:
    """The GEMM kernels' parameters; what a kind of epilogue does not use is passed as address 0.

    x `[rows, k]`, w `[n_w, k]` (or packed), sums `[rows, 128 quads]` f32, bias `[n_w]`, gain `[n]`, residual
    `[rows, n]`, positions and slots `[rows]` int32 (a slot is block * block size + offset; negative: write no k and v),
    table `[positions, head_dim / 2, 2]` f32 cos and sin, workspace f32 and counters int32 of the split GEMM,
    tiles the tiles of W, and the outputs: y `[rows, n]` (h, activation, q, logits), then by kind
    residual: second `[rows, n]` h * gain, third `[rows, 128 quads']` f32; qkv: second, third the k and v blocks
    `[n_blocks, kv_heads, block, head_dim]`; head: second `[rows, n / 16]` f32 best logit, third int32 its column.
    """
    return parameters(
        "x:in w:const sums:in bias:const gain:const residual:in positions:in slots:in table:const "
        "workspace:inout counters:inout y:out second:out third:out "
        "rows:i32 n:i32 k:i32 tiles:i32 q_heads:i32 kv_heads:i32 inv_width:f32 eps:f32"
    )


def make_pairing(isa: Any, epilogue: Epilogue) -> tuple[Any, Any]:
    """Inlined `first_row(tile)`, the lower weight row of a tile's pair 0, and `distance(n)` to its partner."""
    i32 = isa.i32
    kind, half = epilogue.kind, epilogue.head_dim // 2
    tiles_shift = (epilogue.head_dim // 16).bit_length() - 1
    tiles_mask = epilogue.head_dim // 16 - 1

    if kind == "swiglu":

        def first_row(tile: Any) -> Any:
            return i32(tile * 8)

        def distance(n: Any) -> Any:
            return i32(n)

    elif kind == "qkv":

        def first_row(tile: Any) -> Any:
            return i32((tile >> tiles_shift) * (2 * half) + (tile & tiles_mask) * 8)

        def distance(n: Any) -> Any:
            return i32(half)

    else:

        def first_row(tile: Any) -> Any:
            return i32(tile * 16)

        def distance(n: Any) -> Any:
            return i32(8)

    return isa.inlined(first_row), isa.inlined(distance)


def make_fetch(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    """Inlined `fetch(tile, pair, row, rows, n, bias, gain, residual, positions, slots, table)`: an item's operands.

    Returns ((a0, a1, gain0, gain1, bias0, bias1), slot): a is the residual, or (cos, sin).
    """
    i32, i64, low = isa.i32, isa.i64, isa.LOW[dtype]
    first_row, distance = make_pairing(isa, epilogue)
    bias_, residual_ = epilogue.has_bias, epilogue.kind == "residual"
    add_, qkv_ = residual_ and epilogue.has_residual, epilogue.kind == "qkv"
    half, tiles_mask = epilogue.head_dim // 2, epilogue.head_dim // 16 - 1
    zero = np.float32(0)

    def fetch(
        tile: Any, pair: Any, row: Any, rows: Any, n: Any, bias: Any, gain: Any, residual: Any, positions: Any,
        slots: Any, table: Any,
    ) -> Any:  # fmt: skip
        a0, a1, g0, g1, b0, b1 = zero, zero, zero, zero, zero, zero
        slot = i32(-1)
        if row < rows:
            column = i32(first_row(tile) + pair)
            far = i64(distance(n)) * 2
            if bias_:
                at = bias + i64(column) * 2
                b0, b1 = low(isa.load_u16(at)), low(isa.load_u16(at + far))
            if residual_:
                at = gain + i64(column) * 2
                g0, g1 = low(isa.load_u16(at)), low(isa.load_u16(at + far))
            if add_:
                at = residual + (i64(row) * n + column) * 2
                a0, a1 = low(isa.load_u16(at)), low(isa.load_u16(at + far))
            if qkv_:
                slot = isa.load_u32(slots + i64(row) * 4)
                at = table + (i64(isa.load_u32(positions + i64(row) * 4)) * half + (tile & tiles_mask) * 8 + pair) * 8
                a0, a1 = isa.load_f32x2(at)
        return (a0, a1, g0, g1, b0, b1), slot

    return isa.inlined(fetch)


def make_finish(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    """Inlined `finish(v0, v1, scale, operands, slot, tile, pair, row, rows, n, q_heads, kv_heads, y, second, third)`.

    Every lane of the warp must call it: some kinds exchange values between the 8 lanes of a tile and row.
    """
    act = {
        "store": _make_store, "residual": _make_residual, "swiglu": _make_swiglu, "qkv": _make_qkv, "head": _make_head
    }[epilogue.kind](isa, epilogue, dtype)  # fmt: skip
    scale_, bias_ = epilogue.quads > 0, epilogue.has_bias

    def finish(
        v0: Any, v1: Any, scale: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any,
    ) -> None:  # fmt: skip
        if scale_:
            v0 = isa.product(v0, scale)
            v1 = isa.product(v1, scale)
        if bias_:
            v0 = v0 + operands[4]
            v1 = v1 + operands[5]
        act(v0, v1, operands, slot, tile, pair, row, rows, n, q_heads, kv_heads, y, second, third)

    return isa.inlined(finish)


def _make_store(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i64, to_bits, zero = isa.i64, isa.PACK[dtype], np.float32(0)

    def store(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any,
    ) -> None:  # fmt: skip
        if row < rows:
            at = y + (i64(row) * n + tile * 16 + pair) * 2
            isa.store_u16(at, to_bits(zero, v0))
            isa.store_u16(at + 16, to_bits(zero, v1))

    return isa.inlined(store)


def _make_residual(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i64, to_bits, low, zero = isa.i64, isa.PACK[dtype], isa.LOW[dtype], np.float32(0)
    partials_mask = -PARTIALS_STEP

    def residual(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any,
    ) -> None:  # fmt: skip
        bits0, bits1 = to_bits(zero, operands[0] + v0), to_bits(zero, operands[1] + v1)
        h0, h1 = low(bits0), low(bits1)
        squares = isa.fused(h0, h0, isa.product(h1, h1))
        squares = squares + isa.shuffle_xor_f32(squares, 1)
        squares = squares + isa.shuffle_xor_f32(squares, 2)
        squares = squares + isa.shuffle_xor_f32(squares, 4)
        if row < rows:
            at = (i64(row) * n + tile * 16 + pair) * 2
            isa.store_u16(y + at, bits0)
            isa.store_u16(y + at + 16, bits1)
            isa.store_u16(second + at, to_bits(zero, h0 * operands[2]))
            isa.store_u16(second + at + 16, to_bits(zero, h1 * operands[3]))
            if pair == 0:
                pitch = ((n >> 4) + (PARTIALS_STEP - 1)) & partials_mask
                isa.store_f32(third + (i64(row) * pitch + tile) * 4, squares)

    return isa.inlined(residual)


def _make_swiglu(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i64, to_bits, zero, one = isa.i64, isa.PACK[dtype], np.float32(0), np.float32(1)
    minus_log2_e = np.float32(-1.4426950408889634)

    def swiglu(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any,
    ) -> None:  # fmt: skip
        if row < rows:
            gated = v0 * isa.reciprocal(one + isa.exp2(v0 * minus_log2_e)) * v1
            isa.store_u16(y + (i64(row) * n + tile * 8 + pair) * 2, to_bits(zero, gated))

    return isa.inlined(swiglu)


def _make_qkv(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, zero = isa.i32, isa.i64, isa.PACK[dtype], np.float32(0)
    head_dim, block = epilogue.head_dim, epilogue.block
    tiles_shift = (head_dim // 16).bit_length() - 1
    tiles_mask, block_shift, block_mask = head_dim // 16 - 1, block.bit_length() - 1, block - 1

    def qkv(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any,
    ) -> None:  # fmt: skip
        if row < rows:
            head = i32(tile >> tiles_shift)
            channel = i32((tile & tiles_mask) * 8 + pair)
            if head < q_heads + kv_heads:
                rotated = isa.fused(v0, operands[0], -isa.product(v1, operands[1]))
                v1 = isa.fused(v1, operands[0], isa.product(v0, operands[1]))
                v0 = rotated
            if head < q_heads:
                at = y + ((i64(row) * q_heads + head) * head_dim + channel) * 2
                isa.store_u16(at, to_bits(zero, v0))
                isa.store_u16(at + head_dim, to_bits(zero, v1))
            elif slot >= 0:
                own = i32(head - q_heads)
                base = second
                if own >= kv_heads:
                    own = i32(own - kv_heads)
                    base = third
                line = ((i64(slot >> block_shift) * kv_heads + own) << block_shift) + (slot & block_mask)
                at = base + (line * head_dim + channel) * 2
                isa.store_u16(at, to_bits(zero, v0))
                isa.store_u16(at + head_dim, to_bits(zero, v1))

    return isa.inlined(qkv)


def _make_head(isa: Any, epilogue: Epilogue, dtype: str) -> Any:
    i32, i64, to_bits, low, zero = isa.i32, isa.i64, isa.PACK[dtype], isa.LOW[dtype], np.float32(0)

    def head(
        v0: Any, v1: Any, operands: Any, slot: Any, tile: Any, pair: Any, row: Any, rows: Any, n: Any,
        q_heads: Any, kv_heads: Any, y: Any, second: Any, third: Any,
    ) -> None:  # fmt: skip
        bits0, bits1 = to_bits(zero, v0), to_bits(zero, v1)
        # The best is chosen among the logits as stored, the lowest column of equal ones, as argmax over them would.
        best, column = low(bits0), i32(tile * 16 + pair)
        if low(bits1) > best:
            best, column = low(bits1), i32(column + 8)
        for step in range(3):
            other = isa.shuffle_xor_f32(best, 1 << step)
            other_column = isa.shuffle_xor_i32(column, 1 << step)
            if other > best or (other == best and other_column < column):
                best, column = other, i32(other_column)
        if row < rows:
            at = y + (i64(row) * n + tile * 16 + pair) * 2
            isa.store_u16(at, bits0)
            isa.store_u16(at + 16, bits1)
            if pair == 0:
                at = (i64(row) * (n >> 4) + tile) * 4
                isa.store_f32(second + at, best)
                isa.store_u32(third + at, column)

    return isa.inlined(head)


def make_row_scale(isa: Any, epilogue: Epilogue) -> tuple[Any, Any]:
    """Inlined halves of 1 / rms of an x row, by one warp.

    `partial(sums, row, rows, lane)` is this lane's share (loads only, so it can be early); `scale(partial, inv_width,
    eps)` adds the lanes' shares in fixed order.
    """
    i64, quads, zero = isa.i64, epilogue.quads, np.float32(0)

    def partial(sums: Any, row: Any, rows: Any, lane: Any) -> Any:
        share = zero
        if row < rows:
            at = sums + (i64(row) * (PARTIALS_STEP * quads) + lane * 4) * 4
            for q in range(quads):
                v = isa.load_f32x4(at + q * (PARTIALS_STEP * 4))
                share = share + ((v[0] + v[1]) + (v[2] + v[3]))
        return share

    def scale(share: Any, inv_width: Any, eps: Any) -> Any:
        for step in range(5):
            share = share + isa.shuffle_xor_f32(share, 1 << step)
        return isa.rsqrt(isa.fused(share, inv_width, eps))

    return isa.inlined(partial), isa.inlined(scale)
