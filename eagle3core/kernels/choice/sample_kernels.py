"""The three kernels of `sample`: sums of pieces of a row, the mass each piece keeps, the draw.

A piece is 4096 columns, 16 a thread; sums over it, and over pieces, are made in one fixed order. Logits are scaled to
base 2, in which the exponential is one instruction; a cold row keeps only its largest and needs no scale.
Source: see `sample`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.isa.reductions import (
    make_block_min_i32,
    make_block_prefix_f32,
    make_block_sum,
    make_block_sum_pair,
    make_log2,
    make_warp_sum,
)

WARPS = 8
THREADS = 32 * WARPS
COLUMNS = 16  # of a thread
PIECE = THREADS * COLUMNS  # columns of a block
COLDEST = 1e-6  # below it the draw is the argmax
_LOWEST, _LOG2_E, _NONE = -3e38, 1.4426950408889634, 0x7FFFFFFF


def make_read(isa: Any, dtype: str) -> Any:
    """`read(row_start, first, n_columns, factor, values)`: a thread's logits times `factor`, -inf past the end."""
    i32, low, high = isa.i32, isa.LOW[dtype], isa.HIGH[dtype]
    nothing, n_words, loads = {"bf16": -0x7F0080, "f16": -0x3FF0400}[dtype], COLUMNS // 2, COLUMNS // 8  # -inf twice

    def read(row_start: Any, first: Any, n_columns: Any, factor: Any, values: Any) -> None:
        words = isa.cuda.local.array(n_words, i32)
        for p in range(loads):
            for i in range(4):
                words[4 * p + i] = i32(nothing)
            if first + p * 8 < n_columns:
                loaded = isa.load_u32x4(row_start + first * 2 + p * 16)
                for i in range(4):
                    words[4 * p + i] = loaded[i]
        for i in range(n_words):
            # Rounded products, so that all three kernels see the same values.
            values[2 * i] = isa.product(low(words[i]), factor)
            values[2 * i + 1] = isa.product(high(words[i]), factor)

    return isa.inlined(read)


def make_factor(isa: Any) -> Any:
    """`factor(temperature)`: what makes a logit a binary logarithm, 1 for a cold row."""
    coldest, one, log2_e = np.float32(COLDEST), np.float32(1), np.float32(_LOG2_E)

    def factor(temperature: Any) -> Any:
        if temperature < coldest:
            return one
        return isa.reciprocal(temperature) * log2_e

    return isa.inlined(factor)


def make_sample_sums(isa: Any, *, dtype: str, overlap: bool) -> Any:
    """Grid (pieces, rows): the maximum m of a piece, sum 2^(x - m), sum (x - m) 2^(x - m), and the row's epsilon.

    Epsilon travels with them because the next pass would wait for memory to have it, and this one need not.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    read, factor, block_sum_pair = make_read(isa, dtype), make_factor(isa), make_block_sum_pair(isa, WARPS)
    zero, lowest, pair_words = np.float32(0), np.float32(_LOWEST), 2 * WARPS

    def kernel(logits: Any, temperature: Any, epsilon: Any, sums: Any, n_columns: Any, pieces: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        piece, row = i32(cuda.blockIdx.x), i64(cuda.blockIdx.y)
        values = cuda.local.array(COLUMNS, f32)
        tops = isa.shared_address(cuda.shared.array(WARPS, f32))
        scratch = isa.shared_address(cuda.shared.array(pair_words, f32))
        if overlap:
            isa.wait_previous()
            isa.let_next_start()  # only now: see `tree.grow_tree_kernel`
        heat, eps = isa.load_f32(temperature + row * 4), isa.load_f32(epsilon + row * 4)
        read(logits + row * n_columns * 2, i32(piece * PIECE + tid * COLUMNS), n_columns, factor(heat), values)
        # The maximum is the same in any order; every thread adds up against the block's, so that shares fit each other.
        top = lowest
        for i in range(COLUMNS):
            top = isa.maximum(top, values[i])
        for step in range(5):
            top = isa.maximum(top, isa.shuffle_xor_f32(top, 1 << step))
        if (tid & 31) == 0:
            isa.shared_store_f32(tops + (tid >> 5) * 4, top)
        cuda.syncthreads()
        for w in range(WARPS):
            top = isa.maximum(top, isa.shared_load_f32(tops + w * 4))
        total, weighted = zero, zero
        for i in range(COLUMNS):
            below = isa.maximum(values[i] - top, lowest)  # finite, so that 0 * below is 0
            share = isa.exp2(below)
            total = total + share
            weighted = weighted + share * below
        # 16 columns of a thread upwards, a butterfly, warps in order: the order of both sums.
        total, weighted = block_sum_pair(total, weighted, scratch, tid)
        if tid == 0:
            isa.store_f32x4(sums + (row * pieces + piece) * 16, top, total, weighted, eps)

    return kernel


def make_sample_masses(isa: Any, *, dtype: str, pieces: int, overlap: bool) -> Any:
    """Grid (pieces, rows): every warp joins the row's sums for itself; then the mass that a piece keeps.

    The row's uniform number goes into `limits`, beside what else the last pass needs: it then waits for one load.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    read, factor, log2 = make_read(isa, dtype), make_factor(isa), make_log2(isa)
    block_sum, warp_sum, per_lane = make_block_sum(isa, WARPS), make_warp_sum(isa), -(-pieces // 32)
    zero, half, lowest, coldest = np.float32(0), np.float32(0.5), np.float32(_LOWEST), np.float32(COLDEST)

    def kernel(
        logits: Any, temperature: Any, uniform: Any, sums: Any, masses: Any, limits: Any, n_columns: Any
    ) -> None:
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        piece, row = i32(cuda.blockIdx.x), i64(cuda.blockIdx.y)
        values = cuda.local.array(COLUMNS, f32)
        tops, totals, weights = (
            cuda.local.array(per_lane, f32), cuda.local.array(per_lane, f32), cuda.local.array(per_lane, f32),
        )  # fmt: skip
        scratch = isa.shared_address(cuda.shared.array(WARPS, f32))
        if overlap:
            isa.wait_previous()
            isa.let_next_start()  # only now: see `tree.grow_tree_kernel`
        heat, eps = isa.load_f32(temperature + row * 4), isa.load_f32(sums + (row * pieces + piece) * 16 + 12)
        number = zero
        if piece == 0 and tid == 0:
            number = isa.load_f32(uniform + row * 4)
        read(logits + row * n_columns * 2, i32(piece * PIECE + tid * COLUMNS), n_columns, factor(heat), values)
        top = lowest
        # Every warp of every block does this for itself, in one order, and gets the same bits.
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
            # A piece's sums, made against its own maximum, as the row's: sum (x - m) 2^(x - m) moves by the shift of m
            # too.
            below = isa.maximum(tops[p] - top, lowest)
            scale = isa.exp2(below)
            total = total + scale * totals[p]
            weighted = weighted + scale * (weights[p] + totals[p] * below)
        total, weighted = warp_sum(total), warp_sum(weighted)
        limit = lowest
        if heat < coldest:
            limit = zero
        elif eps > zero:
            log_eps, log_total = log2(eps), log2(total)
            # In bits: -sum p log2 p. The limit is that of log2 p, and stands against x - top by adding log2 of the
            # total.
            entropy = log_total - weighted * isa.reciprocal(total)
            limit = isa.minimum(log_eps, log_eps * half - entropy) + log_total
        kept = zero
        for i in range(COLUMNS):
            below = values[i] - top
            if below >= limit:
                kept = kept + isa.exp2(below)
        kept = block_sum(kept, scratch, tid)
        if tid == 0:
            isa.store_f32(masses + (row * pieces + piece) * 4, kept)
            if piece == 0:
                isa.store_f32x4(limits + row * 16, top, limit, number, heat)

    return kernel


def make_sample_draw(isa: Any, *, dtype: str, pieces: int, overlap: bool) -> Any:
    """A block a row: the piece in which the cumulative mass passes the target, then the column in it.

    Rounding may leave the target a hair above the last sum; the last column kept is the answer then.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    read, factor = make_read(isa, dtype), make_factor(isa)
    block_prefix, block_min = make_block_prefix_f32(isa, WARPS), make_block_min_i32(isa, WARPS)
    zero, coldest = np.float32(0), np.float32(COLDEST)

    def kernel(logits: Any, masses: Any, limits: Any, ids: Any, n_columns: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        row = i64(cuda.blockIdx.x)
        values = cuda.local.array(COLUMNS, f32)
        # Scratch of its own for each of six exchanges: no barrier is needed to use one again.
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
            isa.wait_previous()
            isa.let_next_start()  # only now: see `tree.grow_tree_kernel`
        top, limit, number, heat = isa.load_f32x4(limits + row * 16)
        if heat < coldest:
            number = zero
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
        # One thread per piece: this one knows the mass before its own.
        if tid == piece:
            isa.shared_store_f32(start, before)
        cuda.syncthreads()
        rest = target - isa.shared_load_f32(start)
        column = i32(piece * PIECE + tid * COLUMNS)
        read(logits + row * n_columns * 2, column, n_columns, factor(heat), values)
        mass = zero
        for i in range(COLUMNS):
            if values[i] - top >= limit:
                mass = mass + isa.exp2(values[i] - top)
        before, upto, total = block_prefix(mass, fourth, tid)
        hit, last = i32(_NONE), i32(_NONE)
        for i in range(COLUMNS):
            if values[i] - top >= limit:
                share = isa.exp2(values[i] - top)
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
