"""A value that the compiler may not use ahead of where it is named: what a loop holds costs registers."""

from __future__ import annotations

from typing import Any


def make_pinned(isa: Any) -> Any:
    """`pinned(value)`: `value` through a shuffle, so that what depends on it is not computed ahead of the loop and held
    in registers there."""
    i32 = isa.i32

    def pinned(value: Any) -> Any:
        return isa.shuffle_xor_i32(value, i32(0))

    return isa.inlined(pinned)
