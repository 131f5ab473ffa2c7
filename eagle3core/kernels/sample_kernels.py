"""The three kernels of `sample`: sums of pieces of a row, the mass each piece keeps, the draw.

A piece is 2048 columns, 8 a thread; sums over it, and over pieces, are made in one fixed order. Source: see `sample`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.reductions import (
    make_block_min_i32,
    make_block_prefix_f32,
    make_block_sum,
    make_log,
    make_warp_sum,
)

WARPS = 8
THREADS = 32 * WARPS
PIECE = THREADS * 8  # columns of a block, 8 a thread
COLDEST = 1e-6  # below it the draw is the argmax
_LOWEST, _LOG2_E, _NONE = -3e38, 1.4426950408889634, 0x7FFFFFFF


def make_read(isa: Any, dtype: str) -> Any:
    """`read(row_start, first, n_columns, inverse, values)`: 8 logits over the temperature, -inf past the end."""
    low, high, nothing = isa.LOW[dtype], isa.HIGH[dtype], np.float32(-np.inf)

    def read(row_start: Any, first: Any, n_columns: Any, inverse: Any, values: Any) -> None:
        for i in range(8):
            values[i] = nothing
        if first < n_columns:
            words = isa.load_u32x4(row_start + first * 2)
            for i in range(4):
                values[2 * i] = low(words[i]) * inverse
                values[2 * i + 1] = high(words[i]) * inverse

    return isa.inlined(read)


def make_inverse(isa: Any) -> Any:
    """`inverse(temperature)`: its reciprocal, 1 for a cold row."""
    coldest, one = np.float32(COLDEST), np.float32(1)

    def inverse(temperature: Any) -> Any:
        if temperature < coldest:
            return one
        return isa.reciprocal(temperature)

    return isa.inlined(inverse)


def make_sample_sums(isa: Any, *, dtype: str, overlap: bool) -> Any:
    """Grid (pieces, rows): the maximum m of a piece, sum e^(x - m), and sum (x - m) e^(x - m)."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    read, inverse, block_sum = make_read(isa, dtype), make_inverse(isa), make_block_sum(isa, WARPS)
    zero, lowest, log2_e = np.float32(0), np.float32(_LOWEST), np.float32(_LOG2_E)

    def kernel(logits: Any, temperature: Any, sums: Any, n_columns: Any, pieces: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        piece, row = i32(cuda.blockIdx.x), i64(cuda.blockIdx.y)
        values = cuda.local.array(8, f32)
        tops = isa.shared_address(cuda.shared.array(WARPS, f32))
        first, second = (
            isa.shared_address(cuda.shared.array(WARPS, f32)),
            isa.shared_address(cuda.shared.array(WARPS, f32)),
        )
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        factor = inverse(isa.load_f32(temperature + row * 4))
        read(logits + row * n_columns * 2, i32(piece * PIECE + tid * 8), n_columns, factor, values)
        top = lowest
        for i in range(8):
            top = isa.maximum(top, values[i])
        for step in range(5):
            top = isa.maximum(top, isa.shuffle_xor_f32(top, 1 << step))
        if (tid & 31) == 0:
            isa.shared_store_f32(tops + (tid >> 5) * 4, top)
        cuda.syncthreads()
        for w in range(WARPS):
            top = isa.maximum(top, isa.shared_load_f32(tops + w * 4))
        total, weighted = zero, zero
        for i in range(8):
            below = isa.maximum(values[i] - top, lowest)  # finite, so that 0 * below is 0
            share = isa.exp2(below * log2_e)
            total = total + share
            weighted = weighted + share * below
        total, weighted = block_sum(total, first, tid), block_sum(weighted, second, tid)
        if tid == 0:
            isa.store_f32x4(sums + (row * pieces + piece) * 16, top, total, weighted, zero)

    return kernel


def make_sample_masses(isa: Any, *, dtype: str, pieces: int, overlap: bool) -> Any:
    """Grid (pieces, rows): every warp joins the row's sums for itself; then the mass that a piece keeps."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    read, inverse, log = make_read(isa, dtype), make_inverse(isa), make_log(isa)
    block_sum, warp_sum, per_lane = make_block_sum(isa, WARPS), make_warp_sum(isa), -(-pieces // 32)
    zero, half, lowest, log2_e = np.float32(0), np.float32(0.5), np.float32(_LOWEST), np.float32(_LOG2_E)
    coldest = np.float32(COLDEST)

    def kernel(
        logits: Any, temperature: Any, epsilon: Any, sums: Any, masses: Any, limits: Any, n_columns: Any
    ) -> None:
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        piece, row = i32(cuda.blockIdx.x), i64(cuda.blockIdx.y)
        values = cuda.local.array(8, f32)
        tops, totals, weights = (
            cuda.local.array(per_lane, f32), cuda.local.array(per_lane, f32), cuda.local.array(per_lane, f32),
        )  # fmt: skip
        scratch = isa.shared_address(cuda.shared.array(WARPS, f32))
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        heat, eps = isa.load_f32(temperature + row * 4), isa.load_f32(epsilon + row * 4)
        read(logits + row * n_columns * 2, i32(piece * PIECE + tid * 8), n_columns, inverse(heat), values)
        top = lowest
        for p in range(per_lane):
            tops[p], totals[p], weights[p] = lowest, zero, zero
            if p * 32 + lane < pieces:
                found = isa.load_f32x4(sums + (row * pieces + p * 32 + lane) * 16)
                tops[p], totals[p], weights[p] = found[0], found[1], found[2]
            top = isa.maximum(top, tops[p])
        for step in range(5):
            top = isa.maximum(top, isa.shuffle_xor_f32(top, 1 << step))
        total, weighted = zero, zero
        for p in range(per_lane):
            below = isa.maximum(tops[p] - top, lowest)
            scale = isa.exp2(below * log2_e)
            total = total + scale * totals[p]
            weighted = weighted + scale * (weights[p] + totals[p] * below)
        total, weighted = warp_sum(total), warp_sum(weighted)
        limit = lowest
        if heat < coldest:
            limit = zero
        elif eps > zero:
            log_eps, log_total = log(eps), log(total)
            entropy = log_total - weighted * isa.reciprocal(total)
            limit = isa.minimum(log_eps, log_eps * half - entropy) + log_total
        kept = zero
        for i in range(8):
            below = values[i] - top
            if below >= limit:
                kept = kept + isa.exp2(below * log2_e)
        kept = block_sum(kept, scratch, tid)
        if tid == 0:
            isa.store_f32(masses + (row * pieces + piece) * 4, kept)
            if piece == 0:
                isa.store_f32x2(limits + row * 8, top, limit)

    return kernel


def make_sample_draw(isa: Any, *, dtype: str, pieces: int, overlap: bool) -> Any:
    """A block a row: the piece in which the cumulative mass passes the target, then the column in it.

    Rounding may leave the target a hair above the last sum; the last column kept is the answer then.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    read, inverse = make_read(isa, dtype), make_inverse(isa)
    block_prefix, block_min = make_block_prefix_f32(isa, WARPS), make_block_min_i32(isa, WARPS)
    zero, log2_e, coldest = np.float32(0), np.float32(_LOG2_E), np.float32(COLDEST)

    def kernel(logits: Any, temperature: Any, uniform: Any, masses: Any, limits: Any, ids: Any, n_columns: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        row = i64(cuda.blockIdx.x)
        values = cuda.local.array(8, f32)
        first, second, third, fourth, fifth, sixth = (
            isa.shared_address(cuda.shared.array(WARPS, f32)),
            isa.shared_address(cuda.shared.array(WARPS, f32)),
            isa.shared_address(cuda.shared.array(WARPS, f32)),
            isa.shared_address(cuda.shared.array(WARPS, f32)),
            isa.shared_address(cuda.shared.array(WARPS, f32)),
            isa.shared_address(cuda.shared.array(WARPS, f32)),
        )
        start = isa.shared_address(cuda.shared.array(1, f32))
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        heat, number = isa.load_f32(temperature + row * 4), isa.load_f32(uniform + row * 4)
        if heat < coldest:
            number = zero
        top, limit = isa.load_f32x2(limits + row * 8)
        mass = zero
        if tid < pieces:
            mass = isa.load_f32(masses + (row * pieces + tid) * 4)
        before, upto, total = block_prefix(mass, first, tid)
        target = number * total
        hit, last = i32(_NONE), i32(_NONE)
        if mass > zero:
            last = i32(-tid)
            if upto > target:
                hit = tid
        piece, last = block_min(hit, second, tid), block_min(last, third, tid)
        if piece == _NONE:
            piece = i32(-last)
        if tid == piece:
            isa.shared_store_f32(start, before)
        cuda.syncthreads()
        rest = target - isa.shared_load_f32(start)
        column = i32(piece * PIECE + tid * 8)
        read(logits + row * n_columns * 2, column, n_columns, inverse(heat), values)
        mass = zero
        for i in range(8):
            if values[i] - top >= limit:
                mass = mass + isa.exp2((values[i] - top) * log2_e)
        before, upto, total = block_prefix(mass, fourth, tid)
        hit, last = i32(_NONE), i32(_NONE)
        for i in range(8):
            if values[i] - top >= limit:
                share = isa.exp2((values[i] - top) * log2_e)
                before = before + share
                if share > zero:
                    last = i32(-(column + i))
                    if before > rest and hit == _NONE:
                        hit = i32(column + i)
        hit, last = block_min(hit, fifth, tid), block_min(last, sixth, tid)
        if hit == _NONE:
            hit = i32(-last)
        if tid == 0:
            isa.store_u32(ids + row * 4, hit)

    return kernel
