"""GEMM kernel for sm_90a and many rows of x: warpgroups that hold all totals, in blocks that stay for several tiles.

It differs from `gemm_group` in what follows, and in no bit. The totals over streams stay in registers, of which a
warpgroup that fetches gives up most of its own: the ring has the shared memory that totals took, and a stream's end
costs no turn through it. A warp finishes its own sums where they are (`fragments`), with no meeting of the block. So
the ring is never given up to sums, and a block that stays has the next block's stages under way while it finishes one:
warpgroups drift apart by as much as the ring is deep, and one multiplies while another finishes. The rows' scales are
put meanwhile by the two warps of the fetching warpgroup that fetch nothing, a block ahead at most. With two units a
stage the tensor cores always have products of a warpgroup while it waits for, or loads, what the next ones read.

Source: derived here; the hand-over of registers from the PTX ISA, setmaxnreg.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fragments.walk import make_finish_fragments
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS, UNIT, make_group_multiply, make_group_multiply_ahead
from eagle3core.kernels.gemm.scale import make_put_scales
from eagle3core.kernels.gemm.stages import (
    make_fetch_w,
    make_fetch_x,
    make_first_place,
    make_following,
    make_leave_stage,
    make_steps_of,
)

_WARPGROUP = 4  # warps, which give up or take registers together
_SCALING_WARPS = 2  # of the warpgroup that fetches, those who fetch neither W nor x
_PROCESSOR_REGISTERS = 65536
_MOST_REGISTERS = 240  # of a lane: what it can name is 255, and what it is given a multiple of 8
_NOT_AHEAD = (23,)  # tiles of x with which the assembler (CUDA 13.0) spills if products are under way between stages
_FETCHING_REGISTERS = 48  # of a lane that fetches or scales: with fewer it spills


def held_threads(w_tiles: int) -> int:
    """Threads of a block: a multiplying warp a tile of W, and a warpgroup, of which two warps fetch and two scale."""
    return 32 * (w_tiles + _WARPGROUP)


def launched_registers(w_tiles: int) -> int:
    """Registers of every lane as a block starts, one a processor: all that the block has to share out."""
    return min(_MOST_REGISTERS, _PROCESSOR_REGISTERS // held_threads(w_tiles) // 8 * 8)


def held_registers(w_tiles: int) -> int:
    """Registers that a multiplying lane can have: a multiple of 8.

    Out of those of the launch alone: what rounding left over there, of 65536, never comes to the block, and who asked
    for it would wait for ever.
    """
    left = launched_registers(w_tiles) * (w_tiles + _WARPGROUP) - _FETCHING_REGISTERS * _WARPGROUP
    return min(_MOST_REGISTERS, left // w_tiles // 8 * 8)


def holds_totals(x_tiles: int, w_tiles: int, units: int) -> bool:
    """Whether sums, totals, W of a stage and the rest fit the registers of a multiplying lane."""
    return w_tiles % _WARPGROUP == 0 and 8 * x_tiles + 8 * units + 16 <= held_registers(w_tiles)


def held_shared_bytes(x_tiles: int, w_tiles: int, units: int, stages: int) -> int:
    """Dynamic shared memory of a block, bytes: the ring; row scales of this block and the next; barriers."""
    return stages * units * (2 * w_tiles + x_tiles) * FRAGMENT + 64 * x_tiles + 32 + 16 * stages


def make_gemm_held(
    isa: Any, *, dtype: str, epilogue: Epilogue, x_tiles: int, w_tiles: int, units: int, stages: int, overlap: bool,
    cluster: int = 1,
) -> Any:  # fmt: skip
    """The kernel; a grid of any number of whole clusters, of which each takes every so many-th. W and x are packed.

    Args:
        x_tiles, w_tiles, units: of which `holds_totals` holds.
        stages: depth of the ring, which may be more than the stages of a block.
        overlap: as in `gemm_tile`.
        cluster: as in `gemm_group`; it divides the blocks of x rows, so that all of a cluster have the same tiles of W.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    zero = np.float32(0)
    n_warps, n_sums, n_operands = w_tiles, 4 * x_tiles, 8 * units
    unit_bytes_w, x_unit_bytes, x_rows = 2 * FRAGMENT, x_tiles * FRAGMENT, 8 * x_tiles
    w_stage = w_tiles * units * unit_bytes_w
    stage_bytes = w_stage + units * x_unit_bytes
    scale_at = stages * stage_bytes
    full_at = scale_at + 8 * x_rows
    empty_at = full_at + 8 * stages
    scaled_at = empty_at + 8 * stages
    unscaled_at = scaled_at + 16
    scaled = epilogue.quads > 0
    put_scales = make_put_scales(
        isa, epilogue, x_rows=x_rows, n_warps=_SCALING_WARPS, scale_at=scale_at, together=4
    )  # fmt: skip
    steps_of, following, first_place = make_steps_of(isa, units), make_following(isa, units), make_first_place(isa)
    sizes = {"units": units, "stages": stages, "stage_bytes": stage_bytes}
    fetch_w = make_fetch_w(isa, w_tiles=w_tiles, cluster=cluster, fp8=False, **sizes)
    fetch_x = make_fetch_x(isa, x_tiles=x_tiles, **sizes)
    leave_stage = make_leave_stage(isa, cluster)
    of_stage: dict[str, Any] = {"dtype": dtype, "x_tiles": x_tiles, "units": units, "w_stage": w_stage}
    multiply_stage = make_group_multiply(isa, **of_stage)
    # With one unit a stage there is no second set of operands; blocks of a cluster tell each other of a stage.
    ahead = units > 1 and cluster == 1 and x_tiles not in _NOT_AHEAD
    if ahead:
        multiply_ahead, settle = make_group_multiply_ahead(isa, **of_stage)
    finish_fragments = make_finish_fragments(isa, epilogue, dtype, x_tiles)
    fewer_registers = isa.fewer_registers(_FETCHING_REGISTERS)
    more_registers = isa.more_registers(held_registers(w_tiles))

    def gemm_held(
        x: Any, w: Any, sums: Any, bias: Any, gain: Any, residual: Any, positions: Any, slots: Any, table: Any,
        workspace: Any, counters: Any, y: Any, second: Any, third: Any, ordered: Any, rows: Any, n: Any, k: Any,
        tiles: Any, q_heads: Any, kv_heads: Any, inv_width: Any, eps: Any, scales: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        full, empty = i32(base + full_at), i32(base + empty_at)
        has_scales, has_none = i32(base + scaled_at), i32(base + unscaled_at)
        n_units, last = i32((k + (UNIT - 1)) >> 5), i32(STREAMS - 1)
        blocks_x = i32((rows + (x_rows - 1)) // x_rows)
        n_blocks, stride = i32(blocks_x * ((tiles + (w_tiles - 1)) // w_tiles)), i32(cuda.gridDim.x)
        # `full` completes when both who fetch have announced their bytes and the bytes are there; `empty` when every
        # multiplying warp has arrived. Scales of this block and the next are such a ring too: `has_scales` completes
        # when both warps have put theirs, `has_none` when every multiplying warp has read them.
        if tid < stages:
            isa.mbarrier_init(i32(full + tid * 8), i32(2))
            isa.mbarrier_init(i32(empty + tid * 8), i32(cluster * n_warps * isa.ARRIVING_LANES))
        if tid < 2:
            isa.mbarrier_init(i32(has_scales + tid * 8), i32(_SCALING_WARPS * isa.ARRIVING_LANES))
            isa.mbarrier_init(i32(has_none + tid * 8), i32(n_warps * isa.ARRIVING_LANES))
        isa.mbarrier_fence_init()
        cuda.syncthreads()  # nobody waits at a barrier that is not there yet; the only one that all warps meet at
        if cluster > 1:  # nor copies to another block before it has barriers
            isa.cluster.arrive()
            isa.cluster.wait()
        if overlap:
            isa.let_next_start()

        block = i32(cuda.blockIdx.x)
        if warp >= n_warps:
            fewer_registers()  # by the whole warpgroup
            if warp == n_warps:
                place = first_place(base)
                while block < n_blocks:
                    tile0 = i32((block // blocks_x) * w_tiles)
                    unit, stop, stream = following(i32(-units), i32(n_units >> 2), i32(0), last, n_units)
                    place = fetch_w(
                        base, full, empty, w, tile0, tiles, unit, stop, stream, last, n_units, lane, place
                    )  # fmt: skip
                    block = i32(block + stride)
                # Only weights, which no kernel writes, were read before. It waits all the same: a block that never did
                # would end before the kernel before, and let the next one start too early.
                if overlap:
                    isa.wait_previous()
            else:
                if overlap:
                    isa.wait_previous()
                if warp == n_warps + 1:
                    steps, place = steps_of(last, n_units), first_place(i32(base + w_stage))
                    while block < n_blocks:
                        packed = x + i64(block % blocks_x) * (STREAMS * i64(steps) * (units * x_unit_bytes))
                        place = fetch_x(
                            i32(base + w_stage), full, empty, packed, n_units, i32(0), last, lane, place
                        )  # fmt: skip
                        block = i32(block + stride)
                elif scaled:
                    turn = i32(0)
                    while block < n_blocks:
                        own_scales, row0 = i32(base + (turn & 1) * (4 * x_rows)), i32((block % blocks_x) * x_rows)
                        isa.mbarrier_wait(i32(has_none + (turn & 1) * 8), i32(((turn >> 1) & 1) ^ 1))
                        put_scales(own_scales, sums, row0, rows, i32(warp - (n_warps + 2)), lane, inv_width, eps)
                        cuda.syncwarp()
                        if lane < isa.ARRIVING_LANES:
                            isa.mbarrier_arrive(i32(has_scales + (turn & 1) * 8))
                        block, turn = i32(block + stride), i32(turn + 1)
        else:
            more_registers()
            if overlap:
                isa.wait_previous()
            accumulators, totals = cuda.local.array(n_sums, f32), cuda.local.array(n_sums, f32)
            operands = cuda.local.array(n_operands, i32)
            own_w = i32(base + warp * (units * unit_bytes_w) + lane * 16)
            reading, barrier, parity, turn = i32(0), i32(0), i32(0), i32(0)
            while block < n_blocks:
                row0, tile = i32((block % blocks_x) * x_rows), i32((block // blocks_x) * w_tiles + warp)
                for i in range(n_sums):
                    totals[i] = zero
                for stream in range(STREAMS):
                    for i in range(n_sums):
                        accumulators[i] = zero
                    before, arriving = i32(empty), i32(0)
                    for _ in range(steps_of(i32(stream), n_units)):
                        # The barrier's phases alternate: `parity` is that of the round through the ring.
                        isa.mbarrier_wait(i32(full + barrier), parity)
                        if ahead:
                            multiply_ahead(accumulators, operands, own_w, base, reading, before, lane, arriving)
                            before, arriving = i32(empty + barrier), i32(isa.ARRIVING_LANES)
                        else:
                            multiply_stage(accumulators, operands, own_w, base, reading)
                            cuda.syncwarp()
                            leave_stage(i32(empty + barrier), lane)
                        reading, barrier = i32(reading + stage_bytes), i32(barrier + 8)
                        if barrier == 8 * stages:
                            reading, barrier, parity = i32(0), i32(0), i32(parity ^ 1)
                    if ahead:
                        settle(accumulators, before, lane, arriving)
                    # ((s0 + s1) + s2) + s3.
                    for i in range(n_sums):
                        totals[i] = totals[i] + accumulators[i]
                if scaled:
                    isa.mbarrier_wait(i32(has_scales + (turn & 1) * 8), i32((turn >> 1) & 1))
                # A warp past the last tile has multiplied that one again; of it no row is finished.
                own_rows = rows
                if tile >= tiles:
                    tile, own_rows = i32(tiles - 1), i32(0)
                own_scales = i32(base + scale_at + (turn & 1) * (4 * x_rows))
                # The lane's number anew: what is computed from it would else take registers from the products.
                finish_fragments(
                    totals, own_scales, isa.lane_number(), row0, tile, own_rows, n, bias, gain, residual, positions,
                    slots, table, q_heads, kv_heads, y, second, third, ordered,
                )  # fmt: skip
                if scaled:
                    cuda.syncwarp()
                    if lane < isa.ARRIVING_LANES:
                        isa.mbarrier_arrive(i32(has_none + (turn & 1) * 8))
                block, turn = i32(block + stride), i32(turn + 1)
            if cluster > 1:  # the others have arrived at this block's barriers for the last time
                isa.cluster.arrive()
                isa.cluster.wait()

    return gemm_held
