"""What the two kernels of `top_k` share: keys, and where the first leaves what the second reads.

A key is a sixteen-bit logit as an integer that orders as it does, with room below for a place. Source: see `top_k`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GROUP = 256  # columns whose best the first pass gives: one 16-byte load a lane
SEEKERS = 16  # warps of the second pass that seek the best
LOWEST = -2e38  # below every logit, and finite even times LOG2_E: a piece of nothing but -inf has the sum 0, not NaN
LOG2_E = 1.4426950408889634


def per_seeker(groups: int) -> int:
    """Groups that a lane of a seeker holds: group (p * 32 + lane) * 16 + warp is its p-th."""
    return -(-groups // (32 * SEEKERS))


def make_value_key(isa: Any, dtype: str) -> Any:
    """`value_key(v)`: sixteen bits that order as the value does, in the upper half; -0 counts as +0."""
    i32, pack, zero = isa.i32, isa.PACK[dtype], np.float32(0)

    def value_key(v: Any) -> Any:
        bits = pack(v + zero, zero)
        return i32(bits ^ ((bits >> 31) & 0x7FFF0000))

    return isa.inlined(value_key)


def make_key_value(isa: Any, dtype: str) -> Any:
    """`key_value(key)`: the f32 value in a key."""
    i32, high = isa.i32, isa.HIGH[dtype]

    def key_value(key: Any) -> Any:
        return high(i32((key ^ ((key >> 31) & 0x7FFF0000)) & -65536))

    return isa.inlined(key_value)
