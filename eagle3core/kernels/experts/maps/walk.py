"""Kernel of the experts' maps: blocks walk over tiles of the experts that some row has chosen, and read each once.

What there is to do is known on the device alone: groups of rows of an expert, in ascending order, as `lists` leaves
them. All tiles of all groups are shared out evenly, each block a run of neighbours, so the matrices stream by in one
piece and the rows of a group stay in the first-level cache. The four warps of a block divide k. Each has a ring of
stages that one bulk copy fills, and that runs on into the block's next tile while sums of this one meet: memory never
waits for a tile to end. x goes straight into registers, one step ahead.

The order of sums: k is cut into pieces of `form.piece_units`, stream s has the pieces from s n / 4 on, ascending, two
products of 16 k a unit; then ((s0 + s1) + s2) + s3. A column of a product is one row of x, so a row's bits are its own.
With scales of blocks a stream sums each block from zero and adds it scaled (`gemm.fp8.blocks`).

Source: derived here, after `gemm.bulk`; fragment layouts from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.errors import KernelLimit
from eagle3core.kernels.experts.maps.finish import make_fetch_in_parts, make_fetch_of_row, make_finish
from eagle3core.kernels.experts.maps.form import STREAMS, THREADS
from eagle3core.kernels.experts.maps.order import FP8, FP8_BLOCKS, UNIT_BYTES
from eagle3core.kernels.experts.maps.steps import make_copies, make_steps
from eagle3core.kernels.gemm.fp8.blocks import make_block_walk


def make_walk(
    isa: Any, *, dtype: str, form: str, gate: str, has_bias: bool, piece: int, x_tiles: int, w_tiles: int, step: int,
    stage_steps: int, stages: int, buffers: int, early: bool, overlap: bool, keeps: bool = False, hops: bool = False,
) -> Any:  # fmt: skip
    """The kernel; any grid of one dimension, blocks of `THREADS`.

    Args:
        form: of the matrices, see `order`. gate: of gate and up, "silu" or "clamped"; "": y has the sums, fp32.
        piece, x_tiles .. buffers, keeps, hops: see `form`.
        early: which tiles there are was known before the kernel before began, so their bytes are asked for at once.

    Raises:
        KernelLimit: a step that does not divide the pieces of k, of which streams have whole steps.
    """
    if piece % step:
        raise KernelLimit(
            f"a step of {step} units in pieces of {piece}", f"a divisor of {piece}", "pass a setting with such a step"
        )
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unit_bytes, zero = UNIT_BYTES[form], np.float32(0)
    stage_bytes = w_tiles * stage_steps * step * unit_bytes
    ring_bytes = stages * stage_bytes
    sums_at = STREAMS * (ring_bytes + 8 * stages)
    block_sums, x_rows = 128 * x_tiles * w_tiles, 8 * x_tiles
    n_accumulators, n_operands = 4 * x_tiles * w_tiles, 8 * step * x_tiles
    n_items = 64 * x_tiles * w_tiles
    items, tile_shift = -(-n_items // THREADS), (64 * x_tiles).bit_length() - 1
    n_held = 4 * items
    holds = items <= 2  # what an item needs beside its sums is asked for before they are made
    start_copies, refill = make_copies(
        isa,
        unit_bytes=unit_bytes,
        w_tiles=w_tiles,
        step=step,
        stage_steps=stage_steps,
        stages=stages,
        bulk=overlap,
        hops=hops,
    )  # compute capability 8 has neither bulk copies nor dependent launch
    blocks_scaled = form == FP8_BLOCKS
    begin_blocks, add_step, take_blocks = make_block_walk(
        isa, blocks=blocks_scaled, units=step, x_tiles=x_tiles, w_tiles=w_tiles
    )
    n_totals, n_block_scales = n_accumulators if blocks_scaled else 1, 2 * w_tiles
    load_first, multiply_tile = make_steps(
        isa, dtype=dtype, form=form, x_tiles=x_tiles, w_tiles=w_tiles, step=step, stage_steps=stage_steps,
        stages=stages, refill=refill, wait=isa.mbarrier_wait if overlap else isa.mbarrier_poll, add_step=add_step,
    )  # fmt: skip
    fetch = make_fetch_of_row(isa, dtype, gate, has_bias, form == FP8)
    fetch_row, fetch_rest = make_fetch_in_parts(isa, dtype, gate, has_bias, form == FP8)
    finish = make_finish(isa, dtype, gate, form == FP8)
    steps_shift = piece // step

    def expert_map(
        x: Any, w: Any, bias: Any, scales: Any, norms: Any, work: Any, places: Any, y: Any, units: Any, tiles: Any,
        chosen: Any, width: Any, processors: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), isa.shuffle_i32(i32(tid >> 5), 0)  # one number for all lanes, as far as is known
        g, t = i32(lane >> 2), i32(lane & 3)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring, full = i32(base + warp * ring_bytes), i32(base + STREAMS * ring_bytes + warp * (8 * stages))
        # The stream of this warp: its first unit, and its steps.
        pieces = i32(units // piece)
        first_unit = i32(((warp * pieces) >> 2) * piece)
        n_steps = i32(((((warp + 1) * pieces) >> 2) - ((warp * pieces) >> 2)) * steps_shift)
        if lane < stages:
            isa.mbarrier_init(i32(full + lane * 8), i32(1 if overlap else 32))
            if overlap:
                isa.mbarrier_fence_init()
        cuda.syncwarp()
        if overlap:
            # The next kernel may read the lists of work before it waits; here they are waited for before it starts.
            if not early:
                isa.wait_previous()
            isa.let_next_start()
        columns = i32(tiles // w_tiles)
        total = i32(isa.load_u32(work) * columns)
        # Blocks come to processors in turn; those of one get neighbouring runs, so that their lengths even out.
        blocks, turn = i32(cuda.gridDim.x), i32(cuda.blockIdx.x // processors)
        block = i32((cuda.blockIdx.x - turn * processors) * i32(blocks // processors) + turn)
        begin = i32(i32(block * total) // blocks)
        left = i32(i32(i32((block + 1) * total) // blocks) - begin)
        group = i32(begin // columns)
        column = i32(begin - group * columns)
        # The cursor of copies: tiles left, group, column, steps done of the stream, and the address of what comes next.
        cursor = start_copies(ring, full, w, work, left, group, column, columns, units, first_unit, n_steps, lane)
        if overlap and early:
            isa.wait_previous()

        accumulators, operands = cuda.local.array(n_accumulators, f32), cuda.local.array(n_operands, i32)
        sources, held = cuda.local.array(x_tiles, i64), cuda.local.array(n_held, f32)
        held_place, held_factor = cuda.local.array(items, i32), cuda.local.array(items, f32)
        totals, block_scales = cuda.local.array(n_totals, f32), cuda.local.array(n_block_scales, f32)
        block_walk = cuda.local.array(4, i64)
        slot, parity, buffer = i32(0), i32(0), i32(base + sums_at)
        known, info = i32(-1), (i32(0), i32(0), i32(0), i32(0))
        while left > 0:
            tile0 = i32(column * w_tiles)
            if not keeps or group != known:
                info = isa.load_u32x4(work + 16 + i64(group) * 16)  # expert, first place, rows
                known = group
                for m in range(x_tiles):
                    sources[m] = i64(0)
                    if m * 8 + g < info[2]:
                        place = isa.load_u32(places + i64(info[1] + m * 8 + g) * 4)
                        sources[m] = x + (i64(i32(place // chosen)) * units + first_unit) * 64 + t * 16
                if keeps and holds:
                    for j in range(items):
                        item = i32(tid + j * THREADS)
                        local_row = i32((item >> 3) & (x_rows - 1))
                        held_place[j], held_factor[j] = fetch_row(
                            item < n_items and local_row < info[2], local_row, info, places, norms, chosen
                        )
            begin_blocks(totals, block_scales, block_walk, scales, i64(info[0]) * tiles + tile0, units, first_unit)
            load_first(operands, sources, n_steps)
            if keeps and holds:
                for j in range(items):
                    item = i32(tid + j * THREADS)
                    own = (i64(info[0]) * tiles + i32(tile0 + (item >> tile_shift))) * 16 + (item & 7)
                    held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3] = fetch_rest(
                        held_place[j], held_factor[j], own, scales, bias
                    )
            elif holds:
                for j in range(items):
                    item = i32(tid + j * THREADS)
                    held_place[j], held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3] = fetch(
                        item, i32((item >> 3) & (x_rows - 1)), i32(tile0 + (item >> tile_shift)), n_items, info, places,
                        norms, scales, bias, chosen, tiles,
                    )  # fmt: skip
            for i in range(n_accumulators):
                accumulators[i] = zero
            slot, parity, cursor = multiply_tile(
                accumulators, operands, sources, info[2], ring, full, slot, parity, cursor, w, work, columns, units,
                first_unit, n_steps, lane, totals, block_scales, block_walk,
            )  # fmt: skip
            take_blocks(accumulators, totals)
            # The sums meet, [stream][tile][x row][16 rows of W], the lower rows of pairs first.
            for r in range(w_tiles):
                for m in range(x_tiles):
                    q = (r * x_tiles + m) * 4
                    at = i32(buffer + (warp * block_sums + r * (128 * x_tiles) + (m * 8 + t * 2) * 16 + g) * 4)
                    isa.shared_store_f32(at, accumulators[q])
                    isa.shared_store_f32(i32(at + 64), accumulators[q + 1])
                    isa.shared_store_f32(i32(at + 32), accumulators[q + 2])
                    isa.shared_store_f32(i32(at + 96), accumulators[q + 3])
            # One meeting a tile: those who read this tile's sums meet again before anybody writes here the next time.
            cuda.syncthreads()
            for j in range(items):
                item = i32(tid + j * THREADS)
                tile = i32(tile0 + (item >> tile_shift))
                if holds:
                    place, f0, f1 = held_place[j], held[4 * j], held[4 * j + 1]
                    b0, b1 = held[4 * j + 2], held[4 * j + 3]
                else:
                    place, f0, f1, b0, b1 = fetch(
                        item, i32((item >> 3) & (x_rows - 1)), tile, n_items, info, places, norms, scales, bias, chosen,
                        tiles,
                    )  # fmt: skip
                if place >= 0:
                    at = i32(buffer + ((item >> 3) * 16 + (item & 7)) * 4)
                    v0, v1 = isa.shared_load_f32(at), isa.shared_load_f32(i32(at + 32))
                    for s in range(1, STREAMS):
                        v0 = v0 + isa.shared_load_f32(i32(at + s * (block_sums * 4)))
                        v1 = v1 + isa.shared_load_f32(i32(at + s * (block_sums * 4) + 32))
                    finish(v0, v1, f0, f1, b0, b1, tile, i32(item & 7), place, width, y)
            if buffers > 1:
                buffer = i32(2 * (base + sums_at) + STREAMS * block_sums * 4 - buffer)
            else:
                cuda.syncthreads()
            left, column = i32(left - 1), i32(column + 1)
            if column == columns:
                group, column = i32(group + 1), i32(0)

    return expert_map
