"""Kernel of the router's logits, and of the rows' 1 / rms: a block makes those of one expert for four rows.

A thread has the same columns of the expert's weights and of every row; eight of them upwards, then pieces of 1024, then
the lanes of a warp by a butterfly, then warps in order. No sum depends on other rows.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.card import Variant, overlaps, parameters
from eagle3core.kernels.gemm.epilogue import Epilogue, quads_of
from eagle3core.kernels.gemm.scale import make_row_scale
from eagle3core.kernels.isa.reductions import make_sum_each

ROWS, _WARPS = 4, 4
_HELD = 48  # registers of a thread for rows that are under way
_THREADS = 32 * _WARPS
_PARAMETERS = parameters("x:in sums:in w:const bias:const logits:out norms:out rows:i32 experts:i32 eps:f32")


def make_score(isa: Any, *, dtype: str, width: int, has_bias: bool, overlap: bool) -> Any:
    """The kernel; grid (experts, groups of `ROWS` rows)."""
    cuda, i32, i64, f32, zero = isa.cuda, isa.i32, isa.i64, isa.f32, np.float32(0)
    low, high, sum_each = isa.LOW[dtype], isa.HIGH[dtype], make_sum_each(isa, ROWS)
    share_of, scale_of = make_row_scale(isa, Epilogue("store", quads=quads_of(width)))
    vectors = width // 8
    pieces = -(-vectors // _THREADS)
    n_words = 4 * pieces
    ahead = ROWS if ROWS * n_words <= _HELD else 1  # rows that are asked for before anything is waited for
    n_held = ahead * n_words
    inv_width = np.float32(1 / width)

    def load(held: Any, first: Any, x: Any, row: Any, tid: Any) -> None:
        """A row's columns of this thread; past its end zeros, which change no sum."""
        for p in range(pieces):
            vector, v = i32(tid + p * _THREADS), (i32(0), i32(0), i32(0), i32(0))
            if vector < vectors:
                v = isa.load_u32x4(x + (i64(row) * width + vector * 8) * 2)
            for c in range(4):
                held[first + p * 4 + c] = v[c]

    def multiply(held: Any, first: Any, words: Any) -> Any:
        total = zero
        for i in range(n_words):
            v, w = held[first + i], words[i]
            total = isa.fused(low(v), low(w), total)
            total = isa.fused(high(v), high(w), total)
        return total

    load, multiply = isa.inlined(load), isa.inlined(multiply)

    def score(x: Any, sums: Any, w: Any, bias: Any, logits: Any, norms: Any, rows: Any, experts: Any, eps: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        expert, row0 = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y * ROWS)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        words, held, own_bias = cuda.local.array(n_words, i32), cuda.local.array(n_held, i32), i32(0)
        for p in range(pieces):
            vector, v = i32(tid + p * _THREADS), (i32(0), i32(0), i32(0), i32(0))
            if vector < vectors:
                v = isa.load_u32x4_const(w + (i64(expert) * width + vector * 8) * 2)
            for c in range(4):
                words[p * 4 + c] = v[c]
        if has_bias:
            own_bias = isa.load_u16(bias + i64(expert) * 2)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        for r in range(ahead):
            if row0 + r < rows:
                load(held, r * n_words, x, i32(row0 + r), tid)
        share = share_of(sums, i32(row0 + warp), rows, lane)
        totals = cuda.local.array(ROWS, f32)
        for r in range(ROWS):
            totals[r], first = zero, r * n_words if r < ahead else 0
            if row0 + r < rows:
                if r >= ahead:
                    load(held, first, x, i32(row0 + r), tid)
                totals[r] = multiply(held, first, words)
        total = sum_each(totals, lane)
        if lane < ROWS:
            isa.shared_store_f32(i32(base + (lane * _WARPS + warp) * 4), total)
        norm = scale_of(share, inv_width, eps)
        if lane == 0:
            isa.shared_store_f32(i32(base + (ROWS * _WARPS + warp) * 4), norm)
        cuda.syncthreads()
        if tid < ROWS and row0 + tid < rows:
            total = isa.shared_load_f32(i32(base + tid * (_WARPS * 4)))
            for other in range(1, _WARPS):
                total = total + isa.shared_load_f32(i32(base + (tid * _WARPS + other) * 4))
            norm = isa.shared_load_f32(i32(base + (ROWS * _WARPS + tid) * 4))
            logit = isa.product(total, norm)
            if has_bias:
                logit = logit + low(own_bias)
            isa.store_f32(logits + (i64(row0 + tid) * experts + expert) * 4, logit)
            if expert == 0:
                isa.store_f32(norms + i64(row0 + tid) * 4, norm)

    return score


def score_variant(arch: str, dtype: str, width: int, has_bias: bool) -> Variant:
    """The kernel for rows of `width`."""
    return Variant(
        name=f"route_score_{dtype}_{width}{'_b' if has_bias else ''}", make=make_score,
        constants={"dtype": dtype, "width": width, "has_bias": has_bias, "overlap": overlaps(arch)},
        parameters=_PARAMETERS, threads=_THREADS, shared_bytes=4 * (ROWS * _WARPS + _WARPS), blocks_per_sm=4,
        max_registers=96, dependent=overlaps(arch), rounds_itself=True,
    )  # fmt: skip
