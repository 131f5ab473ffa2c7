"""What becomes of an expert's sums, in registers: factors and a bias, and of gate and up the activation.

An item is a pair of a tile of one row: two columns of `down`, or gate and up of one column. Products that something is
added to are written as such: no compiler chooses where to round.

Source: SwiGLU, arXiv 2002.05202; gpt-oss's clamped form as transformers 5.17 has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.experts.gates import ALPHA, LIMIT
from eagle3core.kernels.isa.powers import LOG2_E


def make_fetch_of_row(isa: Any, dtype: str, gate: str, has_bias: bool, fp8: bool) -> Any:
    """Inlined `fetch(item, local_row, tile, n_items, info, places, norms, scales, bias, chosen, tiles)`.

    Gives (place, two factors of the sums, two biases) of an item: 1 / rms of the row before gate and up, times the
    scales of the matrix's rows with `fp8`. The place is negative where the group has no such row.
    """
    i32, i64, low, one, zero = isa.i32, isa.i64, isa.LOW[dtype], np.float32(1), np.float32(0)

    def fetch(
        item: Any, local_row: Any, tile: Any, n_items: Any, info: Any, places: Any, norms: Any, scales: Any, bias: Any,
        chosen: Any, tiles: Any,
    ) -> Any:  # fmt: skip
        place, f0, f1, b0, b1 = i32(-1), one, one, zero, zero
        if item < n_items and local_row < info[2]:
            place = i32(isa.load_u32(places + i64(info[1] + local_row) * 4))
            own = (i64(info[0]) * tiles + tile) * 16 + (item & 7)
            if gate != "":
                f0 = isa.load_f32(norms + i64(i32(place // chosen)) * 4)
                f1 = f0
            if fp8:
                f0 = isa.product(isa.load_f32(scales + own * 4), f0)
                f1 = isa.product(isa.load_f32(scales + own * 4 + 32), f1)
            if has_bias:
                b0, b1 = low(isa.load_u16(bias + own * 2)), low(isa.load_u16(bias + own * 2 + 16))
        return place, f0, f1, b0, b1

    return isa.inlined(fetch)


def make_fetch_in_parts(isa: Any, dtype: str, gate: str, has_bias: bool, fp8: bool) -> tuple[Any, Any]:
    """Inlined `fetch_row` and `fetch_rest`, which together give what `make_fetch_of_row`'s does.

    `fetch_row(there, local_row, info, places, norms, chosen)` gives (place, 1 / rms), which are a group's and not a
    tile's; `there`: whether the item has such a row. `fetch_rest(place, factor, own, scales, bias)` gives (two factors,
    two biases) of row `own` of all experts' matrices.
    """
    i32, i64, low, one, zero = isa.i32, isa.i64, isa.LOW[dtype], np.float32(1), np.float32(0)

    def fetch_row(there: Any, local_row: Any, info: Any, places: Any, norms: Any, chosen: Any) -> Any:
        place, factor = i32(-1), one
        if there:
            place = i32(isa.load_u32(places + i64(info[1] + local_row) * 4))
            if gate != "":
                factor = isa.load_f32(norms + i64(i32(place // chosen)) * 4)
        return place, factor

    def fetch_rest(place: Any, factor: Any, own: Any, scales: Any, bias: Any) -> Any:
        f0, f1, b0, b1 = factor, factor, zero, zero
        if place >= 0:
            if fp8:
                f0 = isa.product(isa.load_f32(scales + own * 4), factor)
                f1 = isa.product(isa.load_f32(scales + own * 4 + 32), factor)
            if has_bias:
                b0, b1 = low(isa.load_u16(bias + own * 2)), low(isa.load_u16(bias + own * 2 + 16))
        return f0, f1, b0, b1

    return isa.inlined(fetch_row), isa.inlined(fetch_rest)


def make_gate(isa: Any, gate: str) -> Any:
    """Inlined `gated(v0, v1)`: of a gate and its up."""
    one, limit = np.float32(1), np.float32(LIMIT)
    power = np.float32(-LOG2_E * (ALPHA if gate == "clamped" else 1.0))

    def gated(v0: Any, v1: Any) -> Any:
        if gate == "clamped":
            # By comparisons, which leave a NaN what it is.
            if v0 > limit:
                v0 = limit
            if v1 > limit:
                v1 = limit
            if v1 < -limit:
                v1 = -limit
            v1 = v1 + one
        return v0 * isa.reciprocal(one + isa.exp2(v0 * power)) * v1

    return isa.inlined(gated)


def make_finish(isa: Any, dtype: str, gate: str, fp8: bool) -> Any:
    """Inlined `finish(v0, v1, f0, f1, b0, b1, tile, pair, place, width, y)`, with what `fetch` gives."""
    i64, to_bits, zero, gated = isa.i64, isa.PACK[dtype], np.float32(0), make_gate(isa, gate)
    multiplies = fp8 or gate != ""

    def finish(
        v0: Any, v1: Any, f0: Any, f1: Any, b0: Any, b1: Any, tile: Any, pair: Any, place: Any, width: Any, y: Any
    ) -> None:
        if multiplies:
            v0, v1 = isa.product(v0, f0), isa.product(v1, f1)
        v0, v1 = v0 + b0, v1 + b1
        if gate != "":
            isa.store_u16(y + (i64(place) * width + tile * 8 + pair) * 2, to_bits(zero, gated(v0, v1)))
        else:
            at = y + (i64(place) * width + tile * 16 + pair) * 4
            isa.store_f32(at, v0)
            isa.store_f32(at + 32, v1)

    return isa.inlined(finish)
