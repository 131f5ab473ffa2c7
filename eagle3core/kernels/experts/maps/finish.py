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


def make_look_up_row(isa: Any, gate: str, place_of: Any) -> Any:
    """Inlined `look_up_row(there, local_row, info, places, norms, chosen)`: (place, 1 / rms) of a row of a group.

    1 / rms is that of its row of x before gate and up, else 1. The place is negative where the group has no such row,
    or `there` says that nobody asks.
    """
    i32, i64, one = isa.i32, isa.i64, np.float32(1)

    def look_up_row(there: Any, local_row: Any, info: Any, places: Any, norms: Any, chosen: Any) -> Any:
        place, factor = i32(-1), one
        if there and local_row < info[2]:
            place = i32(place_of(places, i32(info[1] + local_row)))
            if gate != "":
                factor = isa.load_f32(norms + i64(isa.quotient(place, chosen)) * 4)
        return place, factor

    return isa.inlined(look_up_row)


def make_fetch_own(isa: Any, has_bias: bool, fp8: bool) -> Any:
    """Inlined `fetch_own(place, own, scales, bias)`: (two scales, two biases) of row `own` of all experts' matrices.

    As they lie in memory, so that nobody waits for them before `finish` does.
    """
    i32, one = isa.i32, np.float32(1)

    def fetch_own(place: Any, own: Any, scales: Any, bias: Any) -> Any:
        s0, s1, b0, b1 = one, one, i32(0), i32(0)
        if place >= 0:
            if fp8:
                s0, s1 = isa.load_f32(scales + own * 4), isa.load_f32(scales + own * 4 + 32)
            if has_bias:
                b0, b1 = isa.load_u16(bias + own * 2), isa.load_u16(bias + own * 2 + 16)
        return s0, s1, b0, b1

    return isa.inlined(fetch_own)


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
    """Inlined `finish(v0, v1, place, factor, s0, s1, b0, b1, tile, pair, width, y)`, with what the others gave."""
    i64, low, to_bits, zero, gated = isa.i64, isa.LOW[dtype], isa.PACK[dtype], np.float32(0), make_gate(isa, gate)

    def finish(
        v0: Any, v1: Any, place: Any, factor: Any, s0: Any, s1: Any, b0: Any, b1: Any, tile: Any, pair: Any,
        width: Any, y: Any,
    ) -> None:  # fmt: skip
        if fp8:
            v0, v1 = isa.product(v0, isa.product(s0, factor)), isa.product(v1, isa.product(s1, factor))
        elif gate != "":
            v0, v1 = isa.product(v0, factor), isa.product(v1, factor)
        v0, v1 = v0 + low(b0), v1 + low(b1)
        if gate != "":
            isa.store_u16(y + (i64(place) * width + tile * 8 + pair) * 2, to_bits(zero, gated(v0, v1)))
        else:
            at = y + (i64(place) * width + tile * 16 + pair) * 4
            isa.store_f32(at, v0)
            isa.store_f32(at + 32, v1)

    return isa.inlined(finish)
