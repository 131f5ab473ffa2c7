"""The weighted sums of the experts' outputs: y = r + sum over a row's experts, ascending, of share * part.

With them what the next map reads, as the GEMM's `residual` leaves it: y times the next gain, and sums of squares.
Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import DTYPES, PLAIN_TORCH, Launch, Variant, overlaps, parameters
from eagle3core.kernels.isa.by_row import make_unpack
from eagle3core.kernels.layer.embedding import PARTIAL, partials_pitch

_THREADS = 64  # so that a row is spread over several blocks


def make_total(isa: Any, *, dtype: str, width: int, n_chosen: int, overlap: bool) -> Any:
    """Grid (rows, pieces of a row), a thread 8 columns; two neighbouring ones hold the 16 of a partial sum."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    pack, low, high, zero = isa.PACK[dtype], isa.LOW[dtype], isa.HIGH[dtype], np.float32(0)
    unpack, vectors, pitch = make_unpack(isa, dtype), width // 8, partials_pitch(width)

    def total(parts: Any, shares: Any, residual: Any, gain: Any, y: Any, scaled: Any, sums: Any) -> None:
        tid, row = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        vector = i32(cuda.blockIdx.y * _THREADS + tid)
        if overlap:
            isa.let_next_start()
        gains = r = (i32(0), i32(0), i32(0), i32(0))
        if vector < vectors:
            gains = isa.load_u32x4_const(gain + vector * 16)
        if overlap:
            isa.wait_previous()
        totals, values = cuda.local.array(8, f32), cuda.local.array(8, f32)
        for i in range(8):
            totals[i] = zero
        if vector < vectors:
            r = isa.load_u32x4(residual + row * (width * 2) + vector * 16)
            for place in range(n_chosen):
                share = isa.load_f32(shares + (row * n_chosen + place) * 4)
                at = parts + ((row * n_chosen + place) * width + vector * 8) * 4
                a, b = isa.load_f32x4(at), isa.load_f32x4(at + 16)
                for i in range(4):
                    totals[i] = isa.fused(share, a[i], totals[i])
                    totals[4 + i] = isa.fused(share, b[i], totals[4 + i])
        unpack(r, values, 0)
        squares = zero
        words, scaled_words = cuda.local.array(4, i32), cuda.local.array(4, i32)
        for i in range(4):
            words[i] = pack(values[2 * i + 1] + totals[2 * i + 1], values[2 * i] + totals[2 * i])
            # Of y as stored.
            h0, h1 = low(words[i]), high(words[i])
            squares = isa.fused(h1, h1, isa.fused(h0, h0, squares))
            scaled_words[i] = pack(h1 * high(gains[i]), h0 * low(gains[i]))
        # All lanes take part, also those past the row's end.
        squares = squares + isa.shuffle_xor_f32(squares, 1)
        if vector < vectors:
            at = row * (width * 2) + vector * 16
            isa.store_u32x4(y + at, words[0], words[1], words[2], words[3])
            isa.store_u32x4(scaled + at, scaled_words[0], scaled_words[1], scaled_words[2], scaled_words[3])
            if tid & 1 == 0:
                isa.store_f32(sums + (row * pitch + (vector >> 1)) * 4, squares)

    return total


def total_variant(arch: str, dtype: str, width: int, n_chosen: int) -> Variant:
    """The kernel for rows of `width` with `n_chosen` experts each."""
    return Variant(
        name=f"expert_sum_{dtype}_{width}_{n_chosen}", make=make_total,
        constants={"dtype": dtype, "width": width, "n_chosen": n_chosen, "overlap": overlaps(arch)},
        parameters=parameters("parts:in shares:in residual:in gain:const y:out scaled:out sums:out"),
        threads=_THREADS, blocks_per_sm=4, max_registers=96, dependent=overlaps(arch), rounds_itself=True,
    )  # fmt: skip


def expert_sum(
    arch: str, parts: Tensor, shares: Tensor, residual: Tensor, gain: Tensor, y: Tensor, scaled: Tensor, sums: Tensor
) -> list[Launch]:
    """What `feed.expert_sum_meaning` says, in one launch; columns past the last partial sum are left as they are.

    Raises:
        KernelLimit: a width that is no multiple of 16, or other than 16-bit rows.
    """
    n, n_chosen, width = parts.shape
    if width % PARTIAL or y.dtype not in DTYPES:
        raise KernelLimit(f"rows of {width} {y.dtype}", f"multiples of {PARTIAL}, bf16 or fp16", PLAIN_TORCH)
    grid = n, -(-width // (8 * _THREADS))
    return [
        total_variant(arch, DTYPES[y.dtype], width, n_chosen).launch(
            grid, parts=parts, shares=shares, residual=residual, gain=gain, y=y, scaled=scaled, sums=sums
        )
    ]
