"""Eight e2m1 of an int32 as pairs of bf16, exactly, times a power of two.

Sign, exponent and fraction go to their places in the wider format, where the exponent's bias is another one; a product
with a power of two makes up for it, and makes subnormal values right as well. Compute capability 8 has that product
fused alone: minus zero adds nothing. A part of `ptx`, which offers it.

Source: PTX ISA 9.0, the instructions named in the texts; bits of E2M1: `four_bits`.
"""

from __future__ import annotations

from eagle3core.kernels.isa.instruction import i32, instruction

# ---- eight e2m1 of an int32 as four pairs, times a power: of `powers` the lower bf16, or the upper, which stand for
# 2^126 times the values' scale. A half of a word is named by the product that reads it, and takes no instruction.
_WHOLE, _HIGHEST, _OTHERS, _SIGNS = "0x81C081C0", "0x01000100", "0x80C080C0", "0x80008000"


def _widen(half: str) -> str:
    return (
        "{ .reg .b32 a, b, c, d, e, zero, power; .reg .b16 lower, upper;\n"
        f" and.b32 a, $4, {_WHOLE};\n"
        f" shl.b32 b, $4, 4; and.b32 b, b, {_WHOLE};\n"
        f" shf.l.wrap.b32 c, $4, $4, 10; and.b32 c, c, {_WHOLE};\n"
        f" shl.b32 d, $4, 6; and.b32 d, d, {_OTHERS}; shr.u32 e, $4, 2; lop3.b32 d, e, {_HIGHEST}, d, 0xEA;\n"
        f" mov.b32 {{lower, upper}}, $5; mov.b32 power, {{{half}, {half}}}; mov.b32 zero, {_SIGNS};\n"
        " fma.rn.bf16x2 $0, a, power, zero; fma.rn.bf16x2 $1, b, power, zero;\n"
        " fma.rn.bf16x2 $2, c, power, zero; fma.rn.bf16x2 $3, d, power, zero; }"
    )


WIDEN_E2M1 = tuple(_widen(half) for half in ("lower", "upper"))
# `WIDEN_E2M1_BF16[half](word, powers)`.
WIDEN_E2M1_BF16 = tuple(
    instruction(f"widen_e2m1_bf16_{half}", text, [i32] * 4, [i32] * 2) for half, text in enumerate(WIDEN_E2M1)
)
# Two bf16 2^(b - 127), b a byte of a word: `selector` names both in prmt's way, each below a zero.
POWERS_BF16 = "{ .reg .b32 t; prmt.b32 t, $1, 0, $2; shl.b32 $0, t, 7; }"
powers_bf16 = instruction("powers_bf16", POWERS_BF16, [i32], [i32, i32])
