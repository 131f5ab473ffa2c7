"""What the GEMM's sums become, and what that reads: the part that differs between a model's linear maps.

A block of the GEMM owns tiles of 16 weight rows, arranged as 8 pairs (r, r + distance): 8 apart in general, half a head
apart where a rotary embedding mixes the two, and gate with up where an activation does. One epilogue item is one pair
of one row of x; the 8 items of a tile and row lie in 8 neighbouring lanes.

Norm without a kernel: whoever makes the residual stream h also writes h * gain (the next norm's) and the sum of squares
of every 16 columns; the GEMM that reads it multiplies its sums by 1 / rms from those partial sums (`scale`). What
is done with the sums is in `finish`.

Source: derived here; paged cache: Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import PLAIN_TORCH, Parameter, parameters

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
        activation: of `swiglu`; kernels exist for silu alone, and are named and kept without it.
        head_dim, block: of `qkv`: head size and tokens of a cache block, powers of two.
        has_powers: of `head`: the sum of powers of every 16 logits (`isa.powers`) in the place of the best's column.
        e4m3_cache: of `qkv`: k and v are cached in e4m3, by factors (`layer.cache_write`).
        ordered_tiles: of `residual` and `swiglu`: what the next map reads, h * gain or y, is also written in the order
            in which blocks of 8 `ordered_tiles` rows fetch it (`gemm.order`); 0: by rows alone.
    """

    kind: Kind
    quads: int = 0
    has_bias: bool = False
    has_residual: bool = True
    head_dim: int = 0
    block: int = 0
    has_powers: bool = False
    ordered_tiles: int = 0
    e4m3_cache: bool = False
    activation: str = field(default="silu", repr=False)  # a kernel's digest is made of the representation

    def check(self) -> None:
        """Refuse what the kernels are not made for.

        Raises:
            KernelLimit: a head size or cache block that is no power of two of 16 or more, another activation than silu,
                an order of what no kernel fetches so.
        """
        if self.ordered_tiles and self.kind not in ("residual", "swiglu"):
            raise KernelLimit(f"the order of {self.kind}", "residual or swiglu", "leave out where the next map reads")
        if self.activation != "silu":
            raise KernelLimit(f"the activation is {self.activation}", "silu", PLAIN_TORCH)
        if self.kind == "qkv":
            for name, size in (("head_dim", self.head_dim), ("block", self.block)):
                if size < 16 or size & (size - 1):
                    raise KernelLimit(f"{name} is {size}", "a power of two, 16 or more", PLAIN_TORCH)

    @property
    def name(self) -> str:
        """Short text, unique per epilogue."""
        parts = [self.kind if self.has_residual else "first", f"n{self.quads}" if self.quads else ""]
        parts += ["b" if self.has_bias else "", f"d{self.head_dim}p{self.block}" if self.kind == "qkv" else ""]
        parts += [
            "e4m3" if self.e4m3_cache else "",
            "powers" if self.has_powers else "",
            f"o{self.ordered_tiles}" if self.ordered_tiles else "",
        ]
        return "_".join(part for part in parts if part)


def gemm_parameters() -> tuple[Parameter, ...]:
    """The GEMM kernels' parameters; what a kind of epilogue does not use is passed as address 0.

    x `[rows, k]`, w `[n_w, k]` (or packed), sums `[rows, 128 quads]` f32, bias `[n_w]`, gain `[n]`, residual
    `[rows, n]`, positions and slots `[rows]` int32 (a slot is block * block size + offset; negative: write no k and v),
    table `[positions, head_dim / 2, 2]` f32 cos and sin, workspace f32 and counters int32 of the split GEMM,
    tiles the tiles of W, and the outputs: y `[rows, n]` (h, activation, q, logits), then by kind
    residual: second `[rows, n]` h * gain, third `[rows, 128 quads']` f32; qkv: second, third the k and v blocks
    `[n_blocks, kv_heads, block, head_dim]`; head: second `[rows, n / 16]` f32 best logit, third int32 its
    column, or f32 the sum of powers. With `e4m3_cache` the cache is of bytes, and gain is `[2]` f32: what k and v are
    multiplied by as they are stored. ordered: what the next map reads, in its order, with `ordered_tiles`. scales: of W
    in e4m3, f32, `[n_w]` or `[tiles, blocks, 2]` (`order.weight.pack_scales`).
    """
    return parameters(
        "x:in w:const sums:in bias:const gain:const residual:in positions:in slots:in table:const "
        "workspace:inout counters:inout y:out second:out third:out ordered:out "
        "rows:i32 n:i32 k:i32 tiles:i32 q_heads:i32 kv_heads:i32 inv_width:f32 eps:f32 scales:const"
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


def make_fetch_columns(isa: Any, epilogue: Epilogue) -> Any:
    """Inlined `fetch_columns(tile, pair, n, bias, gain)`: the operands of a pair that all rows of x share.

    Returns (gain0, gain1, bias0, bias1) as they lie in memory, int32 for `make_opened`; gain is the factors of k and v
    for a cache in e4m3.
    """
    i32, i64 = isa.i32, isa.i64
    first_row, distance = make_pairing(isa, epilogue)
    bias_, residual_, e4m3_ = epilogue.has_bias, epilogue.kind == "residual", epilogue.e4m3_cache

    def fetch_columns(tile: Any, pair: Any, n: Any, bias: Any, gain: Any) -> Any:
        g0, g1, b0, b1 = i32(0), i32(0), i32(0), i32(0)
        column = i32(first_row(tile) + pair)
        far = i64(distance(n)) * 2
        if bias_:
            at = bias + i64(column) * 2
            b0, b1 = isa.load_u16(at), isa.load_u16(at + far)
        if residual_:
            at = gain + i64(column) * 2
            g0, g1 = isa.load_u16(at), isa.load_u16(at + far)
        if e4m3_:
            g0, g1 = isa.load_u32x2(gain)
        return g0, g1, b0, b1

    return isa.inlined(fetch_columns)


def make_fetch_angle(isa: Any, epilogue: Epilogue) -> Any:
    """Inlined `fetch_angle(tile, pair, row, positions, table)`: cos and sin of a pair of a row of x, of `qkv`, f32 as
    int32."""
    i64, half, tiles_mask = isa.i64, epilogue.head_dim // 2, epilogue.head_dim // 16 - 1

    def fetch_angle(tile: Any, pair: Any, row: Any, positions: Any, table: Any) -> Any:
        line = i64(isa.load_u32(positions + i64(row) * 4)) * half
        return isa.load_u32x2(table + (line + (tile & tiles_mask) * 8 + pair) * 8)

    return isa.inlined(fetch_angle)


def make_fetch(isa: Any, epilogue: Epilogue) -> Any:
    """Inlined `fetch(tile, pair, row, rows, n, bias, gain, residual, positions, slots, table)`: an item's operands.

    Returns ((a0, a1, gain0, gain1, bias0, bias1), slot), all as they lie in memory, int32 for `make_opened`: a is the
    residual, or (cos, sin); gain the factors of k and v for a cache in e4m3. Of what is loaded here a row's position
    alone is used, for where its angle lies: a thread has the loads of its items under way at once.
    """
    i32, i64 = isa.i32, isa.i64
    first_row, distance = make_pairing(isa, epilogue)
    fetch_columns, fetch_angle = make_fetch_columns(isa, epilogue), make_fetch_angle(isa, epilogue)
    add_, qkv_ = epilogue.kind == "residual" and epilogue.has_residual, epilogue.kind == "qkv"

    def fetch(
        tile: Any, pair: Any, row: Any, rows: Any, n: Any, bias: Any, gain: Any, residual: Any, positions: Any,
        slots: Any, table: Any,
    ) -> Any:  # fmt: skip
        a0, a1, g0, g1, b0, b1 = i32(0), i32(0), i32(0), i32(0), i32(0), i32(0)
        slot = i32(-1)
        if row < rows:
            g0, g1, b0, b1 = fetch_columns(tile, pair, n, bias, gain)
            if add_:
                at = residual + (i64(row) * n + first_row(tile) + pair) * 2
                a0, a1 = isa.load_u16(at), isa.load_u16(at + i64(distance(n)) * 2)
            if qkv_:
                slot = isa.load_u32(slots + i64(row) * 4)
                a0, a1 = fetch_angle(tile, pair, row, positions, table)
        return (a0, a1, g0, g1, b0, b1), slot

    return isa.inlined(fetch)


def make_opened(isa: Any, epilogue: Epilogue, dtype: str) -> tuple[Any, Any]:
    """Inlined `opened(a0, a1, gain0, gain1, bias0, bias1)` and `opened_columns(gain0, gain1, bias0, bias1)`: what was
    fetched, as f32."""
    low, as_f32, zero = isa.LOW[dtype], isa.f32_of_bits, np.float32(0)
    bias_, add_ = epilogue.has_bias, epilogue.kind == "residual" and epilogue.has_residual
    residual_, qkv_, e4m3_ = epilogue.kind == "residual", epilogue.kind == "qkv", epilogue.e4m3_cache

    def opened_columns(gain0: Any, gain1: Any, bias0: Any, bias1: Any) -> Any:
        g0, g1, b0, b1 = zero, zero, zero, zero
        if bias_:
            b0, b1 = low(bias0), low(bias1)
        if residual_:
            g0, g1 = low(gain0), low(gain1)
        if e4m3_:
            g0, g1 = as_f32(gain0), as_f32(gain1)
        return g0, g1, b0, b1

    opened_columns = isa.inlined(opened_columns)

    def opened(a0: Any, a1: Any, gain0: Any, gain1: Any, bias0: Any, bias1: Any) -> Any:
        v0, v1 = zero, zero
        if add_:
            v0, v1 = low(a0), low(a1)
        if qkv_:
            v0, v1 = as_f32(a0), as_f32(a1)
        g0, g1, b0, b1 = opened_columns(gain0, gain1, bias0, bias1)
        return v0, v1, g0, g1, b0, b1

    return isa.inlined(opened), opened_columns
