"""The two kernels of `top_k`: the best of each piece of a row, then the best of all pieces.

Logits become integers that order as they do (`make_sortable`), so that a warp finds its best in one instruction.
Source: see `top_k`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.reductions import make_log, make_sortable, make_warp_sum

WARPS = 8
PIECE = WARPS * 256  # columns of a block of the first pass: 8 a lane
_LOWEST = -3e38  # below every finite logit, and finite: a piece of nothing but -inf has the sum 0, not NaN
_LOG2_E = 1.4426950408889634


def make_merge(isa: Any, k: int, lists: int) -> Any:
    """`merge(keys, columns, lane)`: the k best of `lists` sorted lists of k in shared memory, by one warp.

    Lane r gets the r-th best key and column. Each lane holds the heads of its lists; a round takes the best head.
    """
    i32 = isa.i32
    per_lane = -(-lists // 32)
    nothing = -(1 << 31)

    def merge(keys: Any, columns: Any, lane: Any) -> Any:
        taken = isa.cuda.local.array(per_lane, i32)
        head, place = isa.cuda.local.array(per_lane, i32), isa.cuda.local.array(per_lane, i32)
        for p in range(per_lane):
            taken[p], head[p], place[p] = i32(0), i32(nothing), i32(0x7FFFFFFF)
            if p * 32 + lane < lists:
                head[p] = isa.shared_load_u32(keys + (p * 32 + lane) * (4 * k))
                place[p] = isa.shared_load_u32(columns + (p * 32 + lane) * (4 * k))
        my_key, my_column = i32(nothing), i32(0x7FFFFFFF)
        for r in range(k):
            best, column = head[0], place[0]
            for p in range(1, per_lane):
                if head[p] > best or (head[p] == best and place[p] < column):
                    best, column = head[p], place[p]
            top = isa.warp_max_i32(best)
            if best < top:
                column = i32(0x7FFFFFFF)
            winner = isa.warp_min_i32(column)
            if lane == r:
                my_key, my_column = i32(top), i32(winner)
            for p in range(per_lane):
                if place[p] == winner and head[p] == top:
                    taken[p] = i32(taken[p] + 1)
                    head[p], place[p] = i32(nothing), i32(0x7FFFFFFF)
                    if taken[p] < k:
                        head[p] = isa.shared_load_u32(keys + ((p * 32 + lane) * k + taken[p]) * 4)
                        place[p] = isa.shared_load_u32(columns + ((p * 32 + lane) * k + taken[p]) * 4)
        return my_key, my_column

    return isa.inlined(merge)


def make_warp_top(isa: Any, k: int) -> Any:
    """`warp_top(keys, first, lane)`: the k best of 8 keys a lane, columns first..first+7; lane r gets the r-th.

    The keys taken are destroyed.
    """
    i32 = isa.i32
    nothing = -(1 << 31)

    def warp_top(keys: Any, first: Any, lane: Any) -> Any:
        my_key, my_column = i32(nothing), i32(0x7FFFFFFF)
        for r in range(k):
            best, slot = keys[0], i32(0)
            for i in range(1, 8):
                if keys[i] > best:
                    best, slot = keys[i], i32(i)
            top = isa.warp_max_i32(best)
            column = i32(0x7FFFFFFF)
            if best == top:
                column = i32(first + slot)
            winner = isa.warp_min_i32(column)
            for i in range(8):
                if first + i == winner:
                    keys[i] = i32(nothing)
            if lane == r:
                my_key, my_column = i32(top), i32(winner)
        return my_key, my_column

    return isa.inlined(warp_top)


def make_top_k_pieces(isa: Any, *, dtype: str, k: int, overlap: bool) -> Any:
    """Grid (pieces, rows): the k best of 2048 columns as sortable integers, and their (maximum, sum of exp)."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    low, high, sortable, warp_sum = isa.LOW[dtype], isa.HIGH[dtype], make_sortable(isa), make_warp_sum(isa)
    warp_top, merge = make_warp_top(isa, k), make_merge(isa, k, WARPS)
    lists, stat_words = WARPS * k, 2 * WARPS
    zero, lowest, log2_e, minus_infinity = np.float32(0), np.float32(_LOWEST), np.float32(_LOG2_E), np.float32(-np.inf)

    def kernel(logits: Any, keys: Any, columns: Any, stats: Any, n_columns: Any, pieces: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        piece, row = i32(cuda.blockIdx.x), i64(cuda.blockIdx.y)
        values, own = cuda.local.array(8, f32), cuda.local.array(8, i32)
        key_list = isa.shared_address(cuda.shared.array(lists, i32))
        column_list = isa.shared_address(cuda.shared.array(lists, i32))
        stat_list = isa.shared_address(cuda.shared.array(stat_words, f32))
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        first = i32(piece * PIECE + tid * 8)
        for i in range(8):
            values[i] = minus_infinity
        if first < n_columns:
            words = isa.load_u32x4(logits + (row * n_columns + first) * 2)
            for i in range(4):
                values[2 * i] = low(words[i]) + zero  # -0 becomes +0, which is its equal
                values[2 * i + 1] = high(words[i]) + zero
        for i in range(8):
            own[i] = sortable(values[i])
        my_key, my_column = warp_top(own, first, lane)
        if lane < k:
            isa.shared_store_u32(key_list + (warp * k + lane) * 4, my_key)
            isa.shared_store_u32(column_list + (warp * k + lane) * 4, my_column)
        top = isa.shuffle_i32(my_key, 0)
        largest = isa.maximum(isa.f32_of_bits(top ^ ((top >> 31) & 0x7FFFFFFF)), lowest)
        total = zero
        for i in range(8):
            total = total + isa.exp2((values[i] - largest) * log2_e)
        total = warp_sum(total)
        if lane == 0:
            isa.shared_store_f32(stat_list + warp * 8, largest)
            isa.shared_store_f32(stat_list + warp * 8 + 4, total)
        cuda.syncthreads()
        if warp == 0:
            my_key, my_column = merge(key_list, column_list, lane)
            if lane < k:
                isa.store_u32(keys + ((row * pieces + piece) * k + lane) * 4, my_key)
                isa.store_u32(columns + ((row * pieces + piece) * k + lane) * 4, my_column)
        if tid == 32:
            largest, total = lowest, zero
            for w in range(WARPS):
                largest = isa.maximum(largest, isa.shared_load_f32(stat_list + w * 8))
            for w in range(WARPS):
                share = isa.exp2((isa.shared_load_f32(stat_list + w * 8) - largest) * log2_e)
                total = total + share * isa.shared_load_f32(stat_list + w * 8 + 4)
            isa.store_f32x2(stats + (row * pieces + piece) * 8, largest, total)

    return kernel


def make_top_k_join(isa: Any, *, k: int, pieces: int, overlap: bool) -> Any:
    """A block of four warps a row: all fetch the pieces' lists, the first merges them and finishes the row."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    merge, warp_sum, log = make_merge(isa, k, pieces), make_warp_sum(isa), make_log(isa)
    words, loads, per_lane = pieces * k, -(-pieces * k // 128), -(-pieces // 32)
    zero, lowest, log2_e = np.float32(0), np.float32(_LOWEST), np.float32(_LOG2_E)

    def kernel(keys: Any, columns: Any, stats: Any, log_probs: Any, ids: Any, lse: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        row = i64(cuda.blockIdx.x)
        key_list = isa.shared_address(cuda.shared.array(words, i32))
        column_list = isa.shared_address(cuda.shared.array(words, i32))
        largest_of, total_of = cuda.local.array(per_lane, f32), cuda.local.array(per_lane, f32)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        for p in range(per_lane):
            largest_of[p], total_of[p] = lowest, zero
            if tid + p * 32 < pieces and tid < 32:
                largest_of[p], total_of[p] = isa.load_f32x2(stats + (row * pieces + tid + p * 32) * 8)
        for p in range(loads):
            at = i32(p * 128 + tid)
            if at < words:
                isa.shared_store_u32(key_list + at * 4, isa.load_u32(keys + (row * words + at) * 4))
                isa.shared_store_u32(column_list + at * 4, isa.load_u32(columns + (row * words + at) * 4))
        cuda.syncthreads()
        if tid < 32:
            my_key, my_column = merge(key_list, column_list, tid)
            top = isa.shuffle_i32(my_key, 0)
            largest = isa.maximum(isa.f32_of_bits(top ^ ((top >> 31) & 0x7FFFFFFF)), lowest)
            total = zero
            for p in range(per_lane):
                total = total + total_of[p] * isa.exp2((largest_of[p] - largest) * log2_e)
            normaliser = largest + log(warp_sum(total))
            if tid < k:
                value = isa.f32_of_bits(my_key ^ ((my_key >> 31) & 0x7FFFFFFF))
                isa.store_f32(log_probs + (row * k + tid) * 4, isa.minimum(value - normaliser, zero))
                isa.store_u32(ids + (row * k + tid) * 4, my_column)
            if tid == 0:
                isa.store_f32(lse + row * 4, normaliser)

    return kernel
