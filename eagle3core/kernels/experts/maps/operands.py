"""A lane's operands of one unit of an expert's matrix, by format: 16 rows by 32 k from shared memory into registers.

Source: derived here; the order in memory is that of `order`.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.experts.maps.order import FP8, FP8_BLOCKS, VALUE_BYTES
from eagle3core.kernels.gemm.fp8.operands import make_load_widened
from eagle3core.kernels.gemm.products import FRAGMENT


def make_load_operands(isa: Any, form: str, dtype: str) -> tuple[Any, Any]:
    """Inlined `lane_places(lane)` and `load_operands(at, own)`, with what it gives, which is the same in all units.

    Four int32 of the row of the pairs' lower half, and four of the upper: what two products of 16 k need of W, see
    `gemm.products`. `at` is the shared address of the unit.
    """
    i32 = isa.i32

    def lane_places(lane: Any) -> Any:
        return i32(lane * 16), i32(0), i32(0)

    if form in (FP8, FP8_BLOCKS):
        load_widened = make_load_widened(isa, dtype)

        def load_operands(at: Any, own: Any) -> Any:
            return load_widened(i32(at + own[0]))

    elif form == "plain":

        def load_operands(at: Any, own: Any) -> Any:
            place = i32(at + own[0])
            return isa.shared_load_u32x4(place), isa.shared_load_u32x4(i32(place + FRAGMENT))

    else:
        widen_lower, widen_upper = isa.WIDEN_E2M1_BF16[0], isa.WIDEN_E2M1_BF16[1]

        def steady(value: Any, lane: Any) -> Any:
            """From the lane itself: it stays in a register, where a compiler would compute it anew in every step."""
            return isa.shuffle_i32(i32(value), lane)

        steady = isa.inlined(steady)

        def lane_places(lane: Any) -> Any:
            # A word has the scales of two pairs of rows; of this lane's pair that of the lower row comes first. Each
            # gets half a word, below a zero: prmt's bytes 4 to 7 are those zeros.
            selector = 0x4140 + ((lane >> 2) & 1) * 0x0202
            return steady(lane * 8, lane), steady(VALUE_BYTES + (lane >> 3) * 4, lane), steady(selector, lane)

        def load_operands(at: Any, own: Any) -> Any:
            words = isa.shared_load_u32x2(i32(at + own[0]))
            powers = isa.powers_bf16(isa.shared_load_u32(i32(at + own[1])), own[2])
            return widen_lower(words[0], powers), widen_upper(words[1], powers)

    return isa.inlined(lane_places), isa.inlined(load_operands)
