"""Keys of `top_k`: a sixteen-bit logit as an integer that orders as it does, with room below for a place.

Source: see `top_k`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WARPS = 16  # of a row's block


def per_thread(pieces: int) -> int:
    """Pieces that a thread holds: its p-th is number p * 512 + thread."""
    return -(-pieces // (32 * WARPS))


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
