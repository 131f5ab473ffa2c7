"""Sums and best-of over a warp or a block, in a fixed order, for the kernels of other files.

Every function takes the instruction set and gives an inlined one. A butterfly gives all lanes the same bits, since
fp32 addition is commutative; warps are then added in index order. Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def redux(arch: str) -> str:
    """Opcode of the warp-wide integer maximum and minimum in the machine code of `arch`."""
    return "CREDUX" if arch == "sm_100" else "REDUX"


def make_warp_sum(isa: Any) -> Any:
    """`warp_sum(v)`: the f32 sum over the warp, in every lane."""

    def warp_sum(v: Any) -> Any:
        for step in range(5):
            v = v + isa.shuffle_xor_f32(v, 1 << step)
        return v

    return isa.inlined(warp_sum)


def make_sum_each(isa: Any, n: int) -> Any:
    """`sum_each(values, lane)`: lane p gets the warp's sum of `values[p]`, p < n, a power of two; `values` is used up.

    The additions of n butterflies, so with their bits, but the first steps halve what a lane looks after.
    """
    steps = n.bit_length() - 1

    def sum_each(values: Any, lane: Any) -> Any:
        for step in range(steps):
            for p in range(n >> (step + 1)):
                kept, sent = values[2 * p], values[2 * p + 1]
                if lane & (1 << step):
                    kept, sent = sent, kept
                values[p] = kept + isa.shuffle_xor_f32(sent, 1 << step)
        total = values[0]
        for step in range(steps, 5):
            total = total + isa.shuffle_xor_f32(total, 1 << step)
        return total

    return isa.inlined(sum_each)


def make_block_sum(isa: Any, warps: int) -> Any:
    """`block_sum(v, scratch, tid)`: the f32 sum over the block, in every lane.

    `scratch` is the shared address of `warps` words that nothing else uses before the next barrier.
    """
    warp_sum, zero = make_warp_sum(isa), np.float32(0)

    def block_sum(v: Any, scratch: Any, tid: Any) -> Any:
        v = warp_sum(v)
        if (tid & 31) == 0:
            isa.shared_store_f32(scratch + (tid >> 5) * 4, v)
        isa.cuda.syncthreads()
        total = zero
        for warp in range(warps):
            total = total + isa.shared_load_f32(scratch + warp * 4)
        return total

    return isa.inlined(block_sum)


def make_block_sum_pair(isa: Any, warps: int) -> Any:
    """`block_sum_pair(a, b, scratch, tid)`: two f32 sums as `block_sum`'s, behind one barrier; 2 * `warps` words."""
    warp_sum, zero = make_warp_sum(isa), np.float32(0)

    def block_sum_pair(a: Any, b: Any, scratch: Any, tid: Any) -> Any:
        a, b = warp_sum(a), warp_sum(b)
        if (tid & 31) == 0:
            isa.shared_store_f32(scratch + (tid >> 5) * 4, a)
            isa.shared_store_f32(scratch + (warps + (tid >> 5)) * 4, b)
        isa.cuda.syncthreads()
        total_a, total_b = zero, zero
        for warp in range(warps):
            total_a = total_a + isa.shared_load_f32(scratch + warp * 4)
            total_b = total_b + isa.shared_load_f32(scratch + (warps + warp) * 4)
        return total_a, total_b

    return isa.inlined(block_sum_pair)


def make_block_sum_i32(isa: Any, warps: int) -> Any:
    """`block_sum(v, scratch, tid)`: the int32 sum over the block, in every lane; `scratch` as for f32."""
    i32 = isa.i32

    def block_sum(v: Any, scratch: Any, tid: Any) -> Any:
        for step in range(5):
            v = i32(v + isa.shuffle_xor_i32(v, 1 << step))
        if (tid & 31) == 0:
            isa.shared_store_u32(scratch + (tid >> 5) * 4, v)
        isa.cuda.syncthreads()
        total = i32(0)
        for warp in range(warps):
            total = i32(total + isa.shared_load_u32(scratch + warp * 4))
        return total

    return isa.inlined(block_sum)


def make_block_prefix_pair_i32(isa: Any, warps: int) -> Any:
    """`prefix_pair(a, b, scratch, tid)`: (sum of a, of b, over the threads before this one, sum of b over all).

    One barrier for both; `scratch` holds 2 * `warps` words.
    """
    i32 = isa.i32

    def prefix_pair(a: Any, b: Any, scratch: Any, tid: Any) -> Any:
        lane, warp, upto_a, upto_b = i32(tid & 31), i32(tid >> 5), a, b
        for step in range(5):
            lower = i32(max(lane - (1 << step), 0))
            lower_a, lower_b = isa.shuffle_i32(upto_a, lower), isa.shuffle_i32(upto_b, lower)
            if lane >= (1 << step):
                upto_a, upto_b = i32(upto_a + lower_a), i32(upto_b + lower_b)
        if lane == 31:
            isa.shared_store_u32(scratch + warp * 4, upto_a)
            isa.shared_store_u32(scratch + (warps + warp) * 4, upto_b)
        isa.cuda.syncthreads()
        before_a, before_b, total = i32(upto_a - a), i32(upto_b - b), i32(0)
        for other in range(warps):
            share_a = isa.shared_load_u32(scratch + other * 4)
            share_b = isa.shared_load_u32(scratch + (warps + other) * 4)
            total = i32(total + share_b)
            if other < warp:
                before_a, before_b = i32(before_a + share_a), i32(before_b + share_b)
        return before_a, before_b, total

    return isa.inlined(prefix_pair)


def make_block_min_i32(isa: Any, warps: int) -> Any:
    """`block_min(v, scratch, tid)`: the smallest int32 of the block, in every lane; `scratch` as for sums."""
    i32 = isa.i32

    def block_min(v: Any, scratch: Any, tid: Any) -> Any:
        v = isa.warp_min_i32(v)
        if (tid & 31) == 0:
            isa.shared_store_u32(scratch + (tid >> 5) * 4, v)
        isa.cuda.syncthreads()
        for warp in range(warps):
            v = min(v, isa.shared_load_u32(scratch + warp * 4))
        return i32(v)

    return isa.inlined(block_min)


def make_block_prefix_f32(isa: Any, warps: int) -> Any:
    """`block_prefix(v, scratch, tid)`: (f32 sum over the threads before this one, over those and this, over all)."""
    i32, zero = isa.i32, np.float32(0)

    def block_prefix(v: Any, scratch: Any, tid: Any) -> Any:
        lane, own = i32(tid & 31), v
        for step in range(5):
            lower = isa.f32_of_bits(isa.shuffle_i32(isa.bits_of_f32(v), max(lane - (1 << step), 0)))
            if lane >= (1 << step):
                v = v + lower
        if lane == 31:
            isa.shared_store_f32(scratch + (tid >> 5) * 4, v)
        isa.cuda.syncthreads()
        below, total = zero, zero
        for warp in range(warps):
            if warp == (tid >> 5):
                below = total
            total = total + isa.shared_load_f32(scratch + warp * 4)
        return below + (v - own), below + v, total

    return isa.inlined(block_prefix)


def make_warp_best(isa: Any) -> Any:
    """`warp_best(value, index)`: the largest f32 of the warp and its index, the lowest index of equal ones."""
    i32 = isa.i32

    def warp_best(value: Any, index: Any) -> Any:
        for step in range(5):
            other = isa.shuffle_xor_f32(value, 1 << step)
            other_index = isa.shuffle_xor_i32(index, 1 << step)
            if other > value or (other == value and other_index < index):
                value, index = other, i32(other_index)
        return value, index

    return isa.inlined(warp_best)


def make_block_best(isa: Any, warps: int) -> Any:
    """`block_best(value, index, scratch, tid)`: the same over the block; `scratch` holds 2 * `warps` words."""
    i32, warp_best = isa.i32, make_warp_best(isa)

    def block_best(value: Any, index: Any, scratch: Any, tid: Any) -> Any:
        value, index = warp_best(value, index)
        if (tid & 31) == 0:
            isa.shared_store_f32(scratch + (tid >> 5) * 4, value)
            isa.shared_store_u32(scratch + (warps + (tid >> 5)) * 4, index)
        isa.cuda.syncthreads()
        for warp in range(warps):
            other = isa.shared_load_f32(scratch + warp * 4)
            other_index = isa.shared_load_u32(scratch + (warps + warp) * 4)
            if other > value or (other == value and other_index < index):
                value, index = other, i32(other_index)
        return value, index

    return isa.inlined(block_best)


def make_sortable(isa: Any) -> Any:
    """`sortable(v)`: an int32 that orders as the f32 `v` does (-0 below +0; NaN outside); its own inverse on bits."""
    i32 = isa.i32

    def sortable(v: Any) -> Any:
        bits = isa.bits_of_f32(v)
        return i32(bits ^ ((bits >> 31) & 0x7FFFFFFF))

    return isa.inlined(sortable)


def make_log2(isa: Any) -> Any:
    """`log2(v)`: the binary logarithm of a normal positive f32, absolute error below 2e-7 plus a rounding.

    The approximate instruction is good to 2^-22.6 absolute only between 0.5 and 2, so it sees the mantissa alone.
    """
    i32, f32 = isa.i32, isa.f32

    def log2(v: Any) -> Any:
        bits = isa.bits_of_f32(v)
        exponent = i32((bits >> 23) - 127)
        return f32(exponent) + isa.log2(isa.f32_of_bits((bits & 0x7FFFFF) | 0x3F800000))

    return isa.inlined(log2)


def make_add_log(isa: Any) -> Any:
    """`add_log(base, v, less)`: base + ln(v) - less * ln 2, rounded once if `base` has sixteen bits and v is as above.

    The exponent's part is exact together with such a base: its factor is the nine upper bits of ln 2.
    """
    i32, f32 = isa.i32, isa.f32
    upper, ln_2 = np.float32(355 / 512), np.float32(np.log(2))
    lower = np.float32(np.log(2) - 355 / 512)

    def add_log(base: Any, v: Any, less: Any) -> Any:
        bits = isa.bits_of_f32(v)
        exponent = f32(i32((bits >> 23) - 127))
        part = isa.log2(isa.f32_of_bits((bits & 0x7FFFFF) | 0x3F800000)) - less
        return isa.fused(exponent, upper, base) + isa.fused(exponent, lower, isa.product(part, ln_2))

    return isa.inlined(add_log)
