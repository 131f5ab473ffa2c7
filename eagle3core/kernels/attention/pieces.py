"""What all three kernels of attention do with a value or a set's scores: small pieces that cost or save registers."""

from __future__ import annotations

from typing import Any


def make_pinned(isa: Any) -> Any:
    """`pinned(value)`: `value` through a shuffle, so that what depends on it is not computed ahead of the loop and held
    in registers there."""
    i32 = isa.i32

    def pinned(value: Any) -> Any:
        return isa.shuffle_xor_i32(value, i32(0))

    return isa.inlined(pinned)


def make_take_unit(isa: Any, *, units: int, unit_scores: int) -> Any:
    """`take_unit(u, scores, one)`: unit u's scores of a set of `units`, `unit_scores` f32 each, into `one`."""

    def take_unit(u: Any, scores: Any, one: Any) -> None:
        # By comparisons: an index that is not constant would move the scores from registers to local memory.
        for i in range(unit_scores):
            x = scores[i]
            for other in range(units - 1):
                if u == other + 1:
                    x = scores[unit_scores * (other + 1) + i]
            one[i] = x

    return isa.inlined(take_unit)
