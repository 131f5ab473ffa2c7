"""Arithmetic of the emulator: conversions, special functions, and the tensor cores' product, in numpy.

Source: PTX ISA 9.0: cvt, ex2, lg2, rcp, rsqrt, and the fragment layouts of mma.m16n8k16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eagle3core.kernels.emulator.machine import EmulationError

f32 = np.float32


def i32(value: Any) -> int:
    """`value` as an int32; a value that does not fit is an error here, where a GPU would wrap."""
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


_ROW, _COL = np.arange(32) >> 2, np.arange(32) & 3  # lane -> row group and position in it


def products(widen: Callable[[Any], Any]) -> Callable[[Sequence[Any], Any], list[Any]]:
    """What mma.m16n8k16 does with the 32 lanes' operands, widened from sixteen bits by `widen`."""

    def act(operands: Sequence[Any], warp: Any) -> list[Any]:
        a = widen(halves([o[0:4] for o in operands]))  # [32, 4, 2]
        b = widen(halves([o[4:6] for o in operands]))
        c = np.array([o[6:10] for o in operands], f32)
        left, right, total = np.zeros((16, 16), f32), np.zeros((16, 8), f32), np.zeros((16, 8), f32)
        for half in range(2):
            column = 2 * _COL + half
            left[_ROW, column], left[_ROW + 8, column] = a[:, 0, half], a[:, 1, half]
            left[_ROW, column + 8], left[_ROW + 8, column + 8] = a[:, 2, half], a[:, 3, half]
            right[column, _ROW], right[column + 8, _ROW] = b[:, 0, half], b[:, 1, half]
            total[_ROW, column], total[_ROW + 8, column] = c[:, half], c[:, 2 + half]
        with np.errstate(all="ignore"):
            for k in range(16):
                total = total + left[:, k, None] * right[None, k]
        d = np.stack([total[_ROW + 8 * (i >> 1), 2 * _COL + (i & 1)] for i in range(4)], -1)
        return [tuple(row) for row in d]

    return act


# ---- conversions and arithmetic


def _bf16(value: Any) -> int:
    bits = int(np.float32(value).view(np.uint32))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def _f16(value: Any) -> int:
    return int(np.float32(value).astype(np.float16).view(np.uint16))


def pack_bf16(high: Any, low: Any) -> int:
    return i32(_bf16(high) << 16 | _bf16(low))


def pack_f16(high: Any, low: Any) -> int:
    return i32(_f16(high) << 16 | _f16(low))


def low_bf16(bits: int) -> Any:
    return np.uint32((bits & 0xFFFF) << 16).view(f32)


def high_bf16(bits: int) -> Any:
    return np.uint32(bits & 0xFFFF0000).view(f32)


def low_f16(bits: int) -> Any:
    return f32(np.uint16(bits & 0xFFFF).view(np.float16))


def high_f16(bits: int) -> Any:
    return f32(np.uint16(bits >> 16 & 0xFFFF).view(np.float16))


def bits_of_f32(value: Any) -> int:
    return int(f32(value).view(np.int32))


def f32_of_bits(bits: int) -> Any:
    return np.uint32(bits & 0xFFFFFFFF).view(f32)


def _flushed(value: Any) -> Any:
    return value if abs(value) >= np.finfo(f32).tiny or value != value else f32(0)


def exp2(x: Any) -> Any:
    return _flushed(np.exp2(f32(x)))


def log2(x: Any) -> Any:
    return np.log2(f32(x))


def reciprocal(x: Any) -> Any:
    return f32(1) / f32(x)


def rsqrt(x: Any) -> Any:
    return f32(1) / np.sqrt(f32(x))


def maximum(a: Any, b: Any) -> Any:
    return np.fmax(f32(a), f32(b))


def minimum(a: Any, b: Any) -> Any:
    return np.fmin(f32(a), f32(b))


def fused(a: Any, b: Any, c: Any) -> Any:
    return f32(np.float64(a) * np.float64(b) + np.float64(c))


def product(a: Any, b: Any) -> Any:
    return f32(a) * f32(b)


def popcount(bits: int) -> int:
    return (bits & 0xFFFFFFFF).bit_count()
