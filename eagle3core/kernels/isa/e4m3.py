"""Four e4m3 of an int32, bytes upwards 0 to 3, exactly as two sixteen-bit pairs.

A part of `ptx`, which offers it. In integers a NaN comes out as 480, the value that its bits would stand for; by the
instruction that compute capability 8.9 and later have it stays one.
Source: derived here; e4m3 after Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.isa.instruction import i32, instruction


def _moved(shift: int) -> str:
    """Statements that put sign, exponent and fraction of the upper bytes of two halves to their places in 16 bits."""
    return (
        "and.b32 {to}, {of}, 0x7F007F00; "
        f"shr.u32 {{to}}, {{to}}, {shift}; "
        "lop3.b32 {to}, {of}, 0x80008000, {to}, 0xEA; "  # (of and the signs) or to
    )


def widen_e4m3(kind: str, shift: int, power: str) -> Any:
    """Sign, exponent and fraction to their places; a product with `power`, twice, for the other bias of the exponent.

    The product makes subnormal values right as well. Compute capability 8 has it fused alone: minus zero adds nothing.
    """
    moved = _moved(shift)
    return instruction(
        f"widen_e4m3_{kind}",
        "{ .reg .b32 even, odd, word, power, zero; shl.b32 word, $2, 8; "
        + moved.format(to="even", of="word")
        + moved.format(to="odd", of="$2")
        + f"mov.b32 power, {power}; mov.b32 zero, 0x80008000; "
        f"fma.rn.{kind}x2 $0, even, power, zero; fma.rn.{kind}x2 $1, odd, power, zero; }}",
        [i32] * 2,
        [i32],
    )


WIDEN_E4M3 = {
    "bf16": widen_e4m3("bf16", 4, "0x7B807B80"),  # 2^120
    "f16": widen_e4m3("f16", 1, "0x5C005C00"),  # 2^8
}


def _converted(name: str, order: str) -> Any:
    """fp16 by the instruction; `order`: of the bytes, as `prmt` takes it, or nothing."""
    moved = f"prmt.b32 word, $2, 0, {order}; " if order else "mov.b32 word, $2; "
    return instruction(
        name,
        "{ .reg .b32 word; .reg .b16 low, high; " + moved + "mov.b32 {low, high}, word; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        [i32] * 2,
        [i32],
    )


def neighbours_in_integers() -> Any:
    """fp16 of bytes 0 and 1, and of 2 and 3: `widen_e4m3`'s pairs, with their inner halves exchanged."""
    moved = _moved(1)
    return instruction(
        "f16_of_e4m3_in_integers",
        "{ .reg .b32 even, odd, word, power, zero; shl.b32 word, $2, 8; "
        + moved.format(to="even", of="word")
        + moved.format(to="odd", of="$2")
        + "mov.b32 power, 0x5C005C00; mov.b32 zero, 0x80008000; "
        "fma.rn.f16x2 even, even, power, zero; fma.rn.f16x2 odd, odd, power, zero; "
        "prmt.b32 $0, even, odd, 0x5410; prmt.b32 $1, even, odd, 0x7632; }",
        [i32] * 2,
        [i32],
    )


# By whether the target has the instruction: fp16 of bytes 0 and 1, and 2 and 3; of bytes 0 and 2, and 1 and 3.
F16_OF_E4M3 = {True: _converted("f16_of_e4m3", ""), False: neighbours_in_integers()}
F16_OF_E4M3_APART = {True: _converted("f16_of_e4m3_apart", "0x3120"), False: WIDEN_E4M3["f16"]}
