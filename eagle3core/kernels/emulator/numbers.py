"""Arithmetic of the emulator: conversions, special functions, and the tensor cores' product, in numpy.

Source: PTX ISA 9.0: cvt, ex2, lg2, rcp, rsqrt, and the fragment layouts of mma.m16n8k16.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.isa.four_bits import PLACES

f32 = np.float32

# A lane's numbers are single numpy scalars, and a call of numpy on one of them takes many times the sum itself. So the
# functions here take plain Python numbers where those give the same bits; NaNs go through numpy, which keeps theirs.
_ONE = f32(1)  # times a Python float: that float, rounded to fp32, in a third of the time that f32() takes
_TINY = np.finfo(f32).tiny
_pack_f32, _unpack_f32 = struct.Struct("<f").pack, struct.Struct("<f").unpack
_pack_u32, _unpack_i32 = struct.Struct("<I").pack, struct.Struct("<i").unpack


def i32(value: Any) -> int:
    """`value` as an int32; a value that does not fit is an error here, where a GPU would wrap."""
    if value.__class__ is int and -0x80000000 <= value <= 0x7FFFFFFF:
        return value
    number = int(value)
    if not -(1 << 31) <= number < 1 << 32:
        raise EmulationError(f"{number} does not fit 32 bits")
    return number - (1 << 32) if number >= 1 << 31 else number


# ---- tensor cores


def halves(registers: Any) -> Any:
    """The two sixteen-bit halves of int registers, uint16 `[..., 2]`, lower first."""
    bits = np.asarray(registers, np.int64).astype(np.uint32)
    return np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], -1).astype(np.uint16)


def wide_bf16(sixteen: Any) -> Any:
    """fp32 of bf16 bits, uint16."""
    return (sixteen.astype(np.uint32) << np.uint32(16)).view(f32)


def wide_f16(sixteen: Any) -> Any:
    """fp32 of fp16 bits, uint16."""
    return sixteen.view(np.float16).astype(f32)


# Where a lane's registers lie in the 16x16 left, 16x8 right and 16x8 sum of mma.m16n8k16, row by row.
_ROW, _COL = np.arange(32)[:, None, None] >> 2, 2 * (np.arange(32)[:, None, None] & 3) + np.arange(2)
_FAR = np.array([[0], [8]])
_LEFT = ((_ROW + np.tile(_FAR, (2, 1))) * 16 + _COL + np.repeat(_FAR, 2, 0)).reshape(-1)
_RIGHT = ((_COL + _FAR) * 8 + _ROW).reshape(-1)
_SUM = ((_ROW + _FAR) * 8 + _COL).reshape(32, 4)


def products(widen: Callable[[Any], Any]) -> Callable[[Sequence[Any], Any], list[Any]]:
    """What mma.m16n8k16 does with the 32 lanes' operands, widened from sixteen bits by `widen`."""

    def act(operands: Sequence[Any], warp: Any) -> list[Any]:
        registers = widen(halves([o[0:6] for o in operands]))  # [32, 6, 2]
        left, right = np.empty(256, f32), np.empty(128, f32)
        left[_LEFT], right[_RIGHT] = registers[:, :4].reshape(-1), registers[:, 4:].reshape(-1)
        terms = np.empty((17, 128), f32)
        terms[0, _SUM] = [o[6:10] for o in operands]
        with np.errstate(all="ignore"):
            np.multiply(left.reshape(16, 16).T[:, :, None], right.reshape(16, 1, 8), out=terms[1:].reshape(16, 16, 8))
            # One term after the other, so the order of the sum is that of k.
            total = np.add.accumulate(terms, axis=0)[16]
        return [tuple(row) for row in total[_SUM]]

    return act


# ---- conversions and arithmetic


def bits_of_f32(value: Any) -> int:
    if value != value:
        return int(f32(value).view(np.int32))
    return _unpack_i32(_pack_f32(value))[0]  # type: ignore[no-any-return]


def f32_of_bits(bits: int) -> Any:
    bits &= 0xFFFFFFFF
    (value,) = _unpack_f32(_pack_u32(bits))
    return _ONE * value if value == value else np.uint32(bits).view(f32)


def _bf16(value: Any) -> int:
    if value != value:
        return 0x7FFF
    bits = bits_of_f32(value) & 0xFFFFFFFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def _f16(value: Any) -> int:
    return int(np.float32(value).astype(np.float16).view(np.uint16))


def pack_bf16(high: Any, low: Any) -> int:
    return i32(_bf16(high) << 16 | _bf16(low))


def pack_f16(high: Any, low: Any) -> int:
    return i32(_f16(high) << 16 | _f16(low))


_SIXTEEN = np.arange(1 << 16, dtype=np.uint32)
_F32_OF_BF16, _F32_OF_F16 = list(wide_bf16(_SIXTEEN)), list(wide_f16(_SIXTEEN.astype(np.uint16)))


def low_bf16(bits: int) -> Any:
    return _F32_OF_BF16[bits & 0xFFFF]


def high_bf16(bits: int) -> Any:
    return _F32_OF_BF16[bits >> 16 & 0xFFFF]


def low_f16(bits: int) -> Any:
    return _F32_OF_F16[bits & 0xFFFF]


def high_f16(bits: int) -> Any:
    return _F32_OF_F16[bits >> 16 & 0xFFFF]


def _e4m3(code: int) -> float:
    """The value of a byte of e4m3; its NaN comes out as the instruction's arithmetic has it, 480."""
    exponent, fraction = code >> 3 & 15, code & 7
    size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -size if code & 0x80 else size


_BF16_OF_E4M3, _F16_OF_E4M3 = ([to(_e4m3(code)) for code in range(256)] for to in (_bf16, _f16))


_F16_OR_NAN = [0x7FFF if code & 0x7F == 0x7F else bits for code, bits in enumerate(_F16_OF_E4M3)]


def _widen_e4m3(table: list[int], *, apart: bool = True) -> Callable[[int], tuple[int, int]]:
    first, second = ((0, 16), (8, 24)) if apart else ((0, 8), (16, 24))

    def widen(word: int) -> tuple[int, int]:
        even, odd = ([table[word >> at & 0xFF] for at in places] for places in (first, second))
        return i32(even[1] << 16 | even[0]), i32(odd[1] << 16 | odd[0])

    return widen


widen_e4m3_bf16, widen_e4m3_f16 = _widen_e4m3(_BF16_OF_E4M3), _widen_e4m3(_F16_OF_E4M3)
F16_OF_E4M3 = {has: _widen_e4m3(_F16_OR_NAN if has else _F16_OF_E4M3, apart=False) for has in (True, False)}
F16_OF_E4M3_APART = {True: _widen_e4m3(_F16_OR_NAN), False: widen_e4m3_f16}


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _widen_e2m1(word: int, scale: float) -> tuple[int, ...]:
    pairs = []
    for pair in PLACES:
        codes = (sum((word >> at & 1) << i for i, at in enumerate(places)) for places in pair)
        low, high = (_E2M1[code & 7] * 2.0**-126 * (-scale if code >> 3 else scale) for code in codes)
        pairs.append(i32(_bf16(high) << 16 | _bf16(low)))
    return tuple(pairs)


WIDEN_E2M1_BF16 = (
    lambda word, powers: _widen_e2m1(word, float(low_bf16(powers))),
    lambda word, powers: _widen_e2m1(word, float(high_bf16(powers))),
)


def powers_bf16(word: int, selector: int) -> int:
    bytes_ = (word & 0xFFFFFFFF).to_bytes(4, "little") + bytes(4)
    chosen = (bytes_[selector >> at & 7] for at in (0, 4, 8, 12))
    return i32(int.from_bytes(bytes(chosen), "little") << 7)


def _single(value: Any) -> Any:
    return value if value.__class__ is f32 else f32(value)


def _flushed(value: Any) -> Any:
    return value if abs(value) >= _TINY or value != value else f32(0)


def exp2(x: Any) -> Any:
    return _flushed(np.exp2(_single(x)))


def log2(x: Any) -> Any:
    return np.log2(_single(x))


def reciprocal(x: Any) -> Any:
    return _ONE / _single(x)


def rsqrt(x: Any) -> Any:
    return _ONE / np.sqrt(_single(x))


def maximum(a: Any, b: Any) -> Any:
    a, b = _single(a), _single(b)
    return a if a >= b or b != b else b


def minimum(a: Any, b: Any) -> Any:
    a, b = _single(a), _single(b)
    return a if a <= b or b != b else b


def fused(a: Any, b: Any, c: Any) -> Any:
    return _ONE * (float(a) * float(b) + float(c))


def product(a: Any, b: Any) -> Any:
    return _single(a) * _single(b)


def quotient(a: int, b: int) -> int:
    return i32((a & 0xFFFFFFFF) // (b & 0xFFFFFFFF))


def popcount(bits: int) -> int:
    return (bits & 0xFFFFFFFF).bit_count()
