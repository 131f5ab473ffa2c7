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


def make_warp_prefix_i32(isa: Any) -> Any:
    """`warp_prefix(v, lane)`: the int32 sum over this lane and those below it."""
    i32 = isa.i32

    def warp_prefix(v: Any, lane: Any) -> Any:
        for step in range(5):
            lower = isa.shuffle_i32(v, max(lane - (1 << step), 0))
            if lane >= (1 << step):
                v = i32(v + lower)
        return v

    return isa.inlined(warp_prefix)


def make_block_prefix_i32(isa: Any, warps: int) -> Any:
    """`block_prefix(v, scratch, tid)`: (sum over the threads before this one, sum over all); `scratch` as for sums."""
    i32, warp_prefix = isa.i32, make_warp_prefix_i32(isa)

    def block_prefix(v: Any, scratch: Any, tid: Any) -> Any:
        upto = warp_prefix(v, i32(tid & 31))
        if (tid & 31) == 31:
            isa.shared_store_u32(scratch + (tid >> 5) * 4, upto)
        isa.cuda.syncthreads()
        before, total = i32(upto - v), i32(0)
        for warp in range(warps):
            share = isa.shared_load_u32(scratch + warp * 4)
            total = i32(total + share)
            if warp < (tid >> 5):
                before = i32(before + share)
        return before, total

    return isa.inlined(block_prefix)


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


def make_log(isa: Any) -> Any:
    """`log(v)`: the natural logarithm of a normal positive f32, absolute error below 2e-7 plus a rounding.

    The approximate instruction is good to 2^-22.6 absolute only between 0.5 and 2, so it sees the mantissa alone.
    """
    i32, f32, ln_2 = isa.i32, isa.f32, np.float32(np.log(2))

    def log(v: Any) -> Any:
        bits = isa.bits_of_f32(v)
        exponent = i32((bits >> 23) - 127)
        mantissa = isa.f32_of_bits((bits & 0x7FFFFF) | 0x3F800000)
        return (f32(exponent) + isa.log2(mantissa)) * ln_2

    return isa.inlined(log)
