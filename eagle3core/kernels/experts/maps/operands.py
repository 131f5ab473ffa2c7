"""A lane's operands of one unit of an expert's matrix, by format: 16 rows by 32 k from shared memory into registers.

Source: derived here; the order in memory is that of `order`.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.experts.maps.order import FP8, FP8_BLOCKS, VALUE_BYTES
from eagle3core.kernels.gemm.fp8.operands import make_load_widened
from eagle3core.kernels.gemm.products import FRAGMENT


def make_load_operands(isa: Any, form: str, dtype: str) -> Any:
    """Inlined `load_operands(at, lane)`: four int32 of the row of the pairs' lower half, and four of the upper.

    `at` is the shared address of the unit. They are what two products of 16 k need of W: see `gemm.products`.
    """
    i32 = isa.i32
    if form in (FP8, FP8_BLOCKS):
        load_widened = make_load_widened(isa, dtype)

        def load_operands(at: Any, lane: Any) -> Any:
            return load_widened(i32(at + lane * 16))

    elif form == "plain":

        def load_operands(at: Any, lane: Any) -> Any:
            place = i32(at + lane * 16)
            return isa.shared_load_u32x4(place), isa.shared_load_u32x4(i32(place + FRAGMENT))

    else:
        widen_lower, widen_upper = isa.WIDEN_E2M1_BF16[0], isa.WIDEN_E2M1_BF16[1]

        def load_operands(at: Any, lane: Any) -> Any:
            words = isa.shared_load_u32x2(i32(at + lane * 8))
            # A word has the scales of two pairs of rows; of this lane's pair that of the lower row comes first. Each
            # gets half a word, below a zero: prmt's bytes 4 to 7 are those zeros.
            scales = isa.shared_load_u32(i32(at + VALUE_BYTES + (lane >> 3) * 4))
            powers = isa.powers_bf16(scales, i32(0x4140 + ((lane >> 2) & 1) * 0x0202))
            return widen_lower(words[0], powers), widen_upper(words[1], powers)

    return isa.inlined(load_operands)
