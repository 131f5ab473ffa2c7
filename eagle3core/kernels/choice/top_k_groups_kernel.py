"""The first kernel of `top_k`: warps give the best value of each 256 columns, and their sum. Source: see `top_k`."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.choice.top_k_keys import GROUP, LOG2_E, LOWEST, SEEKERS, make_key_value, make_value_key
from eagle3core.kernels.isa.early import make_early
from eagle3core.kernels.isa.reductions import make_sum_each


def make_top_k_groups(isa: Any, *, dtype: str, loads: int, warps: int, held: int, overlap: bool) -> Any:
    """Grid (groups / loads / warps, rows): the best of every group of columns, and its sum.

    The sum is of 2^(x * LOG2_E - r), r = best * LOG2_E rounded: an instruction an exponent; the second pass knows r.
    A warp has `loads` groups under way. `held` groups lie in a lane of the second pass; results stand where its warps
    read them side by side.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    low, high, sum_each = isa.LOW[dtype], isa.HIGH[dtype], make_sum_each(isa, loads)
    value_key = make_value_key(isa, dtype)
    key_value, n_words, stride = make_key_value(isa, dtype), 4 * loads, 32 * held
    lowest, log2_e, early = np.float32(LOWEST), np.float32(LOG2_E), make_early(isa, 32 * warps)
    nothing = {"bf16": -0x7F0080, "f16": -0x3FF0400}[dtype]  # a pair of -inf

    def kernel(logits: Any, tops: Any, n_columns: Any, groups: Any) -> None:
        tid, row = i32(cuda.threadIdx.x), i64(cuda.blockIdx.y)
        lane, first = i32(tid & 31), i32((cuda.blockIdx.x * warps + (tid >> 5)) * loads)
        words = cuda.local.array(n_words, i32)
        tops_of, totals = cuda.local.array(loads, isa.f32), cuda.local.array(loads, isa.f32)
        column = i32(first * GROUP + lane * 8)
        start = logits + (row * n_columns + column) * 2
        early(start ^ i64(n_columns))
        if overlap:
            isa.wait_previous()
            isa.let_next_start()  # only now: blocks of kernels further on would crowd this one's multiprocessors
        for p in range(loads):
            for i in range(4):
                words[4 * p + i] = i32(nothing)
            if i32(column + p * GROUP) < n_columns:
                loaded = isa.load_u32x4(start + p * (2 * GROUP))
                for i in range(4):
                    words[4 * p + i] = loaded[i]
        for p in range(loads):
            best = isa.maximum(low(words[4 * p]), high(words[4 * p]))
            for i in range(1, 4):
                best = isa.maximum(best, isa.maximum(low(words[4 * p + i]), high(words[4 * p + i])))
            # The warp's maximum by one integer instruction: sixteen-bit values order as their keys.
            tops_of[p] = key_value(isa.warp_max_i32(value_key(best)))
            # r of the docstring, rounded once and the same in all lanes; a group of nothing but -inf has the sum 0.
            offset = isa.product(isa.maximum(tops_of[p], lowest), -log2_e)
            totals[p] = isa.exp2(isa.fused(low(words[4 * p]), log2_e, offset))
            totals[p] = totals[p] + isa.exp2(isa.fused(high(words[4 * p]), log2_e, offset))
            for i in range(1, 4):
                totals[p] = totals[p] + isa.exp2(isa.fused(low(words[4 * p + i]), log2_e, offset))
                totals[p] = totals[p] + isa.exp2(isa.fused(high(words[4 * p + i]), log2_e, offset))
        # The sum of a group: 8 columns of a lane upwards, then a butterfly, whatever `loads` is.
        own_total, own_top = sum_each(totals, lane), tops_of[0]
        for p in range(1, loads):
            if lane == p:
                own_top = tops_of[p]
        group = i32(first + lane)
        if lane < loads and group < groups:
            # Group n goes to warp n mod 16 of the second pass, which reads its own side by side.
            slot = i32((group & (SEEKERS - 1)) * stride + (group >> 4))
            isa.store_f32x2(tops + (row * (SEEKERS * stride) + slot) * 8, own_top, own_total)

    return kernel
