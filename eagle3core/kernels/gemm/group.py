"""GEMM kernel for sm_90a and more than a few rows of x: some warps fetch, warpgroups multiply.

A block owns 64 `groups` rows of W and 8 `x_tiles` rows of x. A ring of stages lies between those who fetch and those
who multiply, with two barriers a stage: `full`, which the copied bytes complete, and `empty`, where every multiplying
warp says that it has read. Nobody waits for anybody else, so the whole ring is under way while the tensor cores work.

One warp fetches W, by copies of whole units; packed W lies in the order in which lanes read their operands. Another
fetches x, which `pack` has laid out as the tensor cores read it from shared memory by themselves, so that a stage
is one copy: [unit][product][8 rows][k half of a product][row of 8][16 bytes].

Bits equal those of `gemm_ring`: one product of a warpgroup sums the same 16 k as one of its mma, in the same order of
products; the streams over K come one after the other, or with `split` 4 to one block each.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.blocks import make_block_walk
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS, UNIT, make_group_multiply
from eagle3core.kernels.gemm.scale import make_put_scales
from eagle3core.kernels.gemm.stages import (
    FETCHING_WARPS,
    make_fetch_w,
    make_fetch_x,
    make_first_place,
    make_following,
    make_leave_stage,
    make_steps_of,
)
from eagle3core.kernels.gemm.sums import make_hand_over, make_leave, make_walk, sums_bytes

FETCHING = 32 * FETCHING_WARPS  # threads that fetch


def group_totals_in_shared(x_tiles: int, w_tiles: int, split: int, blocks: bool = False) -> bool:
    """Whether the totals over streams leave the registers: 16 sums, as many totals and the rest fit a thread.

    `blocks`: there the sums of a block and those of its stream are two.
    """
    return split == 1 and (x_tiles > 4 or blocks)


def group_shared_bytes(
    x_tiles: int, w_tiles: int, units: int, stages: int, split: int, fp8: bool = False, blocks: bool = False
) -> int:
    """Dynamic shared memory of a block, bytes: ring and totals, reused for sums; row scales; a flag; barriers."""
    ring = stages * units * ((1 if fp8 else 2) * w_tiles + x_tiles) * FRAGMENT
    totals = 512 * x_tiles * w_tiles if group_totals_in_shared(x_tiles, w_tiles, split, blocks) else 0
    return max(ring + totals, sums_bytes(x_tiles, w_tiles) if split == 1 else 0) + 32 * x_tiles + 16 + 16 * stages


def make_gemm_group(
    isa: Any,
    *,
    dtype: str,
    epilogue: Epilogue,
    x_tiles: int,
    w_tiles: int,
    units: int,
    stages: int,
    split: int,
    together: bool,
    overlap: bool,
    fp8: bool = False,
    blocks: bool = False,
    cluster: int = 1,
) -> Any:
    """The kernel; grid (split, blocks of x rows, blocks of W tiles). W and x are packed.

    Blocks that share K follow each other, so that one that waits does so for blocks which started before it or start
    next.

    Args:
        x_tiles: at most 32. w_tiles: a multiple of 4, at most 32; a multiplying warp each.
        units: units of 32 k of a stage, at most those of K; where a stream has none left, zeros are multiplied.
        stages: depth of the ring. split, overlap: as in `gemm_tile`.
        together: as in `sums.make_hand_over`.
        fp8, blocks: as in `gemm_ring`; with `blocks` streams are whole blocks, and x_tiles at most 12.
        cluster: blocks of x rows that share tiles of W: each brings its part of a stage into the shared memory of all.
            A stage is free when the warps of all of them have left it, so they go through K side by side.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    zero = np.float32(0)

    # A warp owns a tile of 16 rows of W by all rows of x: 4 sums a thread for each 8 of them, and as many totals up to
    # 32 rows of x; above, the totals lie in shared memory.
    n_warps, threads, n_sums = w_tiles, 32 * w_tiles, 4 * x_tiles
    spilled = group_totals_in_shared(x_tiles, w_tiles, split, blocks)
    n_totals = n_sums if split == 1 and not spilled else 1
    n_operands = 8 * units  # W of a stage: 16 rows x 32 k a unit, 8 registers a lane
    unit_bytes_w = FRAGMENT if fp8 else 2 * FRAGMENT
    w_stage, x_unit_bytes = w_tiles * units * unit_bytes_w, x_tiles * FRAGMENT
    stage_bytes = w_stage + units * x_unit_bytes
    totals_at = stages * stage_bytes
    barriers_at = group_shared_bytes(x_tiles, w_tiles, units, stages, split, fp8, blocks) - 16 * stages
    flag_at = barriers_at - 16
    x_rows, stream_bytes = 8 * x_tiles, 512 * x_tiles * w_tiles
    scale_at = flag_at - 4 * x_rows
    put_scales = make_put_scales(isa, epilogue, x_rows=x_rows, n_warps=n_warps, scale_at=scale_at)
    steps_of, following, first_place = make_steps_of(isa, units), make_following(isa, units), make_first_place(isa)
    fetch_w = make_fetch_w(
        isa, w_tiles=w_tiles, units=units, stages=stages, stage_bytes=stage_bytes, cluster=cluster, fp8=fp8
    )
    fetch_x = make_fetch_x(isa, x_tiles=x_tiles, units=units, stages=stages, stage_bytes=stage_bytes)
    leave_stage = make_leave_stage(isa, cluster)
    leave, hand_over = make_leave(isa, x_tiles, split), make_hand_over(isa, split, threads, together=together)
    walk = make_walk(
        isa, dtype=dtype, epilogue=epilogue, x_tiles=x_tiles, w_tiles=w_tiles, threads=threads, split=split,
        scale_at=scale_at, together=together, scales_rows=fp8 and not blocks,
    )  # fmt: skip
    multiply_stage = make_group_multiply(isa, dtype=dtype, x_tiles=x_tiles, units=units, w_stage=w_stage, fp8=fp8)
    begin_blocks, add_stage, take_blocks = make_block_walk(isa, blocks=blocks, units=units, x_tiles=x_tiles, w_tiles=1)
    n_block_sums = n_sums if blocks else 1

    def gemm_group(
        x: Any, w: Any, sums: Any, bias: Any, gain: Any, residual: Any, positions: Any, slots: Any, table: Any,
        workspace: Any, counters: Any, y: Any, second: Any, third: Any, ordered: Any, rows: Any, n: Any, k: Any,
        tiles: Any, q_heads: Any, kv_heads: Any, inv_width: Any, eps: Any, scales: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        row0, tile0 = i32(cuda.blockIdx.y * x_rows), i32(cuda.blockIdx.z * w_tiles)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        full = i32(base + barriers_at)
        empty = i32(full + 8 * stages)
        n_units = i32((k + (UNIT - 1)) >> 5)
        first, last = i32(0), i32(STREAMS - 1)
        if split > 1:
            first = i32(cuda.blockIdx.x)
            last = first
        # `full` completes when both who fetch have announced their bytes and the bytes are there; `empty` when every
        # multiplying warp has arrived.
        if tid < stages:
            isa.mbarrier_init(i32(full + tid * 8), i32(2))
            isa.mbarrier_init(i32(empty + tid * 8), i32(cluster * n_warps * isa.ARRIVING_LANES))
            isa.mbarrier_fence_init()
        cuda.syncthreads()  # nobody waits at a barrier that is not there yet; the only one that all warps meet at
        if cluster > 1:  # nor copies to another block before it has barriers
            isa.cluster.arrive()
            isa.cluster.wait()
        if overlap:
            isa.let_next_start()

        if warp == n_warps:
            begin, end = i32((first * n_units) >> 2), i32(((first + 1) * n_units) >> 2)
            unit, stop, stream = following(i32(begin - units), end, first, last, n_units)
            fetch_w(base, full, empty, w, tile0, tiles, unit, stop, stream, last, n_units, lane, first_place(base))
            # This warp waits last, and does wait: a block that never did would end before the kernel before, and let
            # the next one start too early.
            if overlap:
                isa.wait_previous()  # only weights, which no kernel writes, were read before
        elif warp > n_warps:
            if overlap:
                isa.wait_previous()
            steps = steps_of(i32(STREAMS - 1), n_units)
            packed = x + i64(cuda.blockIdx.y) * (STREAMS * i64(steps) * (units * x_unit_bytes))
            fetch_x(
                i32(base + w_stage), full, empty, packed, n_units, first, last, lane, first_place(i32(base + w_stage))
            )
        else:
            if overlap:
                isa.wait_previous()
            put_scales(base, sums, row0, rows, warp, lane, inv_width, eps)

            accumulators = cuda.local.array(n_sums, f32)
            totals = cuda.local.array(n_totals, f32)
            for i in range(n_totals):
                totals[i] = zero
            operands = cuda.local.array(n_operands, i32)
            own_totals = i32(base + totals_at + tid * 4)
            own_w = i32(base + warp * (units * unit_bytes_w) + lane * 16)
            reading, barrier, parity, stream = i32(0), i32(0), i32(0), first
            # A warp past the last tile multiplies that one again, and so takes its scales.
            own_tile = min(i32(tile0 + warp), i32(tiles - 1))
            stream_sums = cuda.local.array(n_block_sums, f32)
            held, block_walk = cuda.local.array(2, f32), cuda.local.array(4, i64)
            begin_blocks(stream_sums, held, block_walk, scales, own_tile, n_units, i32((first * n_units) >> 2))
            while stream <= last:
                for i in range(n_sums):
                    accumulators[i] = zero
                for _ in range(steps_of(stream, n_units)):
                    # The barrier's phases alternate: `parity` is that of the round through the ring.
                    isa.mbarrier_wait(i32(full + barrier), parity)
                    multiply_stage(accumulators, operands, own_w, base, reading)
                    cuda.syncwarp()
                    leave_stage(i32(empty + barrier), lane)
                    reading, barrier = i32(reading + stage_bytes), i32(barrier + 8)
                    if barrier == 8 * stages:
                        reading, barrier, parity = i32(0), i32(0), i32(parity ^ 1)
                    add_stage(accumulators, stream_sums, held, block_walk, False)
                take_blocks(accumulators, stream_sums)
                if split == 1:
                    if spilled:
                        # ((s0 + s1) + s2) + s3, the total on the left. A thread's totals are its own: no barrier.
                        if stream > 0:
                            for i in range(n_sums):
                                total = isa.shared_load_f32(i32(own_totals + i * (4 * threads)))
                                accumulators[i] = total + accumulators[i]
                        if stream < last:
                            for i in range(n_sums):
                                isa.shared_store_f32(i32(own_totals + i * (4 * threads)), accumulators[i])
                    else:
                        for i in range(n_sums):
                            totals[i] = totals[i] + accumulators[i]
                stream = i32(stream + 1)
            if split == 1 and not spilled:
                for i in range(n_sums):
                    accumulators[i] = totals[i]
            if cluster > 1:
                isa.cluster.arrive()
            # Of the multiplying warps alone: those who fetch have gone. The sums overwrite the ring.
            isa.named_barrier(1, threads)  # everything that was fetched has been read

            block = i64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
            block_sums = workspace + block * (STREAMS * stream_bytes)
            own_sums = block_sums + first * stream_bytes
            for m in range(x_tiles):
                leave(
                    base, own_sums, warp, i32(m), i32(lane >> 2), i32(lane & 3),
                    accumulators[m * 4], accumulators[m * 4 + 1], accumulators[m * 4 + 2], accumulators[m * 4 + 3],
                )  # fmt: skip
            if hand_over(base, flag_at, counters + block * 4, tid) != 0:
                part = i32(0)
                if together:
                    part = first
                walk(
                    base, block_sums, part, tid, row0, tile0, tiles, rows, n, bias, gain, residual, positions, slots,
                    table, q_heads, kv_heads, y, second, third, ordered, scales,
                )  # fmt: skip
            if cluster > 1:
                isa.cluster.wait()  # the others have arrived at this block's barriers for the last time

    return gemm_group
