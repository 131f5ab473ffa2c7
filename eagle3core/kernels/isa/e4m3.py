"""Four e4m3 of an int32, bytes upwards 0 to 3, exactly as two sixteen-bit pairs: of bytes 0 and 2, and of 1 and 3.

A part of `ptx`, which offers it. A NaN comes out as 480, the value that its bits would stand for.
Source: derived here; e4m3 after Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.isa.instruction import i32, instruction


def widen_e4m3(kind: str, shift: int, power: str) -> Any:
    """Sign, exponent and fraction to their places; a product with `power`, twice, for the other bias of the exponent.

    The product makes subnormal values right as well. Compute capability 8 has it fused alone: minus zero adds nothing.
    """
    moved = (
        "and.b32 {to}, {of}, 0x7F007F00; shr.u32 {to}, {to}, {shift}; "
        "lop3.b32 {to}, {of}, 0x80008000, {to}, 0xEA; "  # (of and the signs) or to
    )
    return instruction(
        f"widen_e4m3_{kind}",
        "{ .reg .b32 even, odd, word, power, zero; shl.b32 word, $2, 8; "
        + moved.format(to="even", of="word", shift=shift)
        + moved.format(to="odd", of="$2", shift=shift)
        + f"mov.b32 power, {power}; mov.b32 zero, 0x80008000; "
        f"fma.rn.{kind}x2 $0, even, power, zero; fma.rn.{kind}x2 $1, odd, power, zero; }}",
        [i32] * 2,
        [i32],
    )


WIDEN_E4M3 = {
    "bf16": widen_e4m3("bf16", 4, "0x7B807B80"),  # 2^120
    "f16": widen_e4m3("f16", 1, "0x5C005C00"),  # 2^8
}
