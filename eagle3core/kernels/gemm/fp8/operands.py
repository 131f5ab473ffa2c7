"""How W in e4m3 lies in memory, and its values as operands of tensor cores: one load of 16 bytes a lane and unit.

A unit of 32 k of a tile is one run of 512 bytes, half of what 16-bit W takes. A lane's 16 bytes are the 8 values of its
row of the pairs' lower half, then those of the upper; of every 4 values the middle two have changed places, so that two
masks and shifts make two words of two 16-bit values, in the places where 16-bit W has them.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eagle3core.kernels.gemm.epilogue import Epilogue, make_pairing
from eagle3core.kernels.gemm.fp8.blocks import BLOCK_UNITS

_UNIT = 32  # k of one unit


def lanes_first(packed: Tensor) -> Tensor:
    """Bytes `[n_w, units * 32]` in the order of 16-bit W as kernels read those of FP8."""
    pieces = packed.view(len(packed) // 16, -1, 2, 8, 4, 2, 2, 2)  # tile, unit, half, row, lane, word, pair, value
    return pieces.permute(0, 1, 3, 4, 2, 5, 7, 6).reshape(packed.shape).contiguous()


def halves_first(packed: Tensor) -> Tensor:
    """The inverse of `lanes_first`."""
    pieces = packed.view(len(packed) // 16, -1, 8, 4, 2, 2, 2, 2)  # tile, unit, row, lane, half, word, value, pair
    return pieces.permute(0, 1, 4, 2, 3, 5, 7, 6).reshape(packed.shape).contiguous()


def by_element(scales: Tensor, k: int) -> Tensor:
    """Scales `[rows]`, or `[rows / 8, blocks]` of 8 rows by 128 k, as factors of a matrix `[rows, k]`."""
    if scales.ndim == 1:
        return scales[:, None]
    return scales.repeat_interleave(8, 0).repeat_interleave(BLOCK_UNITS * _UNIT, 1)[:, :k]


def make_load_widened(isa: Any, dtype: str) -> Any:
    """Inlined `load_widened(at)`: a lane's 16 bytes of a unit of W in shared memory as 16-bit operands of `MMA`.

    Gives four int32 of the row of the pairs' lower half, and four of the upper: what two loads give of 16-bit W.
    """
    widen = isa.WIDEN_E4M3[dtype]

    def load_widened(at: Any) -> Any:
        v = isa.shared_load_u32x4(at)
        a0, b0 = widen(v[0]), widen(v[2])
        a1, b1 = widen(v[1]), widen(v[3])
        return (a0[0], a0[1], a1[0], a1[1]), (b0[0], b0[1], b1[0], b1[1])

    return isa.inlined(load_widened)


def make_fetch_scales(isa: Any, epilogue: Epilogue) -> Any:
    """Inlined `fetch_scales(scales, tile, pair, n)`: the scales of an item's two rows of W, f32."""
    i32, i64 = isa.i32, isa.i64
    first_row, distance = make_pairing(isa, epilogue)

    def fetch_scales(scales: Any, tile: Any, pair: Any, n: Any) -> Any:
        at = scales + i64(i32(first_row(tile) + pair)) * 4
        return isa.load_f32(at), isa.load_f32(at + i64(distance(n)) * 4)

    return isa.inlined(fetch_scales)
