"""GEMM kernel for more than a few rows of x: a block's warps share the stages they copy together.

A block owns 16 `w_tiles` rows of W and 8 `x_tiles` rows of x, so x is read once per 16 `w_tiles` weight rows instead of
once per 16 or 32, and each warp multiplies its part of the block. Bits equal those of `gemm_ring`: the same permuted
operands, the same streams over K, walked one after the other, each stream's sum added to the total when it ends. With
`split` 4, four blocks take one stream each.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.gemm.epilogue import Epilogue, make_pairing
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS, UNIT, make_multiply
from eagle3core.kernels.gemm.scale import make_put_scales
from eagle3core.kernels.gemm.sums import make_hand_over, make_leave, make_walk, sums_bytes


def totals_in_shared(x_tiles: int, w_tiles: int, warps: int, split: int) -> bool:
    """Whether the totals over streams leave the registers: a thread cannot hold 128 sums twice."""
    return split == 1 and 4 * x_tiles * w_tiles // warps > 64


def tile_shared_bytes(
    x_tiles: int, w_tiles: int, units: int, stages: int, warps: int, split: int, fp8: bool = False
) -> int:
    """Dynamic shared memory of a block, bytes: ring and totals, reused for the block's sums; row scales; a flag."""
    ring = stages * ((1 if fp8 else 2) * w_tiles + x_tiles) * units * FRAGMENT
    totals = 512 * x_tiles * w_tiles if totals_in_shared(x_tiles, w_tiles, warps, split) else 0
    return max(ring + totals, sums_bytes(x_tiles, w_tiles) if split == 1 else 0) + 32 * x_tiles + 16


def make_gemm_tile(
    isa: Any,
    *,
    dtype: str,
    epilogue: Epilogue,
    x_tiles: int,
    w_tiles: int,
    warps_x: int,
    warps_w: int,
    units: int,
    stages: int,
    split: int,
    packed: bool,
    ragged: bool,
    overlap: bool,
    fp8: bool = False,
) -> Any:
    """The kernel; grid (blocks of x rows, blocks of W tiles, split).

    Args:
        warps_x, warps_w: how the warps divide the block; they must divide x_tiles and w_tiles, and their product the
            fragments of W, 2 w_tiles, of e4m3 w_tiles.
        split: 1, or 4 blocks with one stream each.
        units, stages, packed, ragged, overlap, fp8: as in `gemm_ring`.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    wait_stage, wait_all = isa.COPY_WAIT[stages - 2], isa.COPY_WAIT[0]
    first_row, distance = make_pairing(isa, epilogue)

    zero = np.float32(0)
    n_warps = warps_x * warps_w
    threads = 32 * n_warps
    own_w, own_x = w_tiles // warps_w, x_tiles // warps_x
    spilled = totals_in_shared(x_tiles, w_tiles, n_warps, split)
    n_accumulators = 4 * own_w * own_x
    # Sums of the running stream and totals over streams, 4 f32 a pair of tiles each: the largest part of a thread's
    # registers. (4: an array of none cannot be declared.)
    n_totals = n_accumulators if split == 1 and not spilled else 4
    n_operands = 4 * own_x
    pieces = 1 if fp8 else 2  # fragments of a unit of a tile of W
    tile_bytes_w = pieces * FRAGMENT
    w_copies, x_copies = pieces * w_tiles // n_warps, (x_tiles + n_warps - 1) // n_warps
    even_x = x_tiles % n_warps == 0
    unit_stage = (pieces * w_tiles + x_tiles) * FRAGMENT
    x_offset, stage_bytes = w_tiles * tile_bytes_w, unit_stage * units
    ring_bytes, ahead = stages * stage_bytes, stages - 1
    w_unit_bytes = tile_bytes_w if packed else 2 * UNIT
    unit_shift = units.bit_length() - 1
    x_rows, stream_bytes = 8 * x_tiles, 512 * x_tiles * w_tiles
    # At the end of shared memory, past what is reused: the row scales, then the flag of `hand_over`.
    flag_at = tile_shared_bytes(x_tiles, w_tiles, units, stages, n_warps, split, fp8) - 16
    scale_at = flag_at - 4 * x_rows
    multiply = make_multiply(
        isa, dtype=dtype, x_tiles=own_x, w_tiles=own_w, units=units,
        pitches=(FRAGMENT, tile_bytes_w), steps=(unit_stage, unit_stage), fp8=fp8,
    )  # fmt: skip
    put_scales = make_put_scales(isa, epilogue, x_rows=x_rows, n_warps=n_warps, scale_at=scale_at)
    leave, hand_over = make_leave(isa, x_tiles, split), make_hand_over(isa, split)
    walk = make_walk(
        isa, dtype=dtype, epilogue=epilogue, x_tiles=x_tiles, w_tiles=w_tiles, threads=threads, split=split,
        scale_at=scale_at, scales_rows=fp8,
    )  # fmt: skip

    def gemm_tile(
        x: Any, w: Any, sums: Any, bias: Any, gain: Any, residual: Any, positions: Any, slots: Any, table: Any,
        workspace: Any, counters: Any, y: Any, second: Any, third: Any, ordered: Any, rows: Any, n: Any, k: Any,
        tiles: Any, q_heads: Any, kv_heads: Any, inv_width: Any, eps: Any, scales: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        g, t = i32(lane >> 2), i32(lane & 3)
        row0, tile0 = i32(cuda.blockIdx.x * x_rows), i32(cuda.blockIdx.y * w_tiles)
        part = i32(cuda.blockIdx.z)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring = i32(base + lane * 16)
        n_units = i32((k + (UNIT - 1)) >> 5)
        # All four streams, one after the other; or with `split` the one of this block.
        unit, end = i32(0), n_units
        if split > 1:
            unit, end = i32((part * n_units) >> 2), i32(((part + 1) * n_units) >> 2)
        n_steps = i32((end - unit) >> unit_shift)
        row_bytes = i64(k) * 2

        # The fragments of W this warp copies: 8 rows of a tile each; a tile past the last is filled with zeros.
        sources, targets = cuda.local.array(w_copies, i64), cuda.local.array(w_copies, i32)
        sizes = cuda.local.array(w_copies, i32)
        for c in range(w_copies):
            fragment = i32(warp + c * n_warps)
            tile, far = i32(tile0 + (fragment >> 1)), i32(fragment & 1)
            if fp8:
                tile, far = i32(tile0 + fragment), i32(0)
            targets[c] = i32(ring + fragment * FRAGMENT)
            sizes[c] = i32(16)
            if tile >= tiles:
                sizes[c] = i32(0)
            if packed:
                sources[c] = w + (i64(tile) * n_units + unit) * tile_bytes_w + far * FRAGMENT + lane * 16
            else:
                row = i64(first_row(tile) + g) + i64(distance(n)) * far
                sources[c] = w + row * row_bytes + unit * (2 * UNIT) + t * 16
        offset = i64(0)

        if overlap:
            isa.let_next_start()
        loading = unit
        for stage in range(ahead):
            if stage < n_steps:
                for u in range(units):
                    for c in range(w_copies):
                        size = sizes[c]
                        if ragged and not packed and loading + u == n_units - 1 and t >= 2:
                            size = i32(0)
                        at = i32(targets[c] + stage * stage_bytes + u * unit_stage)
                        isa.copy16_fill(at, sources[c] + offset + u * w_unit_bytes, size)
                offset += units * w_unit_bytes
                loading = i32(loading + units)
        if overlap:
            isa.wait_previous()  # only weights, which no kernel writes, were read before

        x_sizes = cuda.local.array(x_copies, i32)
        for c in range(x_copies):
            x_sizes[c] = i32(16)
            if row0 + (warp + c * n_warps) * 8 + g >= rows:
                x_sizes[c] = i32(0)
        source_x = x + i64(row0 + warp * 8 + g) * row_bytes + unit * (2 * UNIT) + t * 16
        target_x = i32(ring + x_offset + warp * FRAGMENT)
        loading = unit
        for stage in range(ahead):
            if stage < n_steps:
                for u in range(units):
                    for c in range(x_copies):
                        size = x_sizes[c]
                        if ragged and loading + u == n_units - 1 and t >= 2:
                            size = i32(0)
                        if even_x or warp + c * n_warps < x_tiles:
                            at = i32(target_x + stage * stage_bytes + u * unit_stage + c * (n_warps * FRAGMENT))
                            isa.copy16_fill(at, source_x + c * n_warps * 8 * row_bytes + u * (2 * UNIT), size)
                source_x += units * (2 * UNIT)
                loading = i32(loading + units)
            # A group a stage even where there is nothing to copy: the waits below count groups.
            isa.copy_commit()

        # While the first copies are under way; the barriers of the loop, or the one after it, make the scales visible.
        put_scales(base, sums, row0, rows, warp, lane, inv_width, eps)

        accumulators = cuda.local.array(n_accumulators, f32)
        totals = cuda.local.array(n_totals, f32)
        for i in range(n_accumulators):
            accumulators[i] = zero
        for i in range(n_totals):
            totals[i] = zero
        part_w, part_x = i32(warp // warps_x), i32(warp % warps_x)
        operands_w = i32(ring + part_w * (own_w * tile_bytes_w))
        operands_x = i32(ring + x_offset + part_x * (own_x * FRAGMENT))
        stream, stream_end, has_totals = i32(0), i32(0), i32(0)
        own_totals = i32(base + ring_bytes + tid * 4)
        reading, writing = i32(0), i32(ahead * stage_bytes)
        for step in range(n_steps):
            # First this thread's copies of the stage, then the barrier: now everybody's have landed, and everybody has
            # read the stage of the step before, which is the one that is filled next. One barrier a step does both.
            wait_stage()
            cuda.syncthreads()
            if step + ahead < n_steps:
                for u in range(units):
                    for c in range(w_copies):
                        size = sizes[c]
                        if ragged and not packed and loading + u == n_units - 1 and t >= 2:
                            size = i32(0)
                        at = i32(targets[c] + writing + u * unit_stage)
                        isa.copy16_fill(at, sources[c] + offset + u * w_unit_bytes, size)
                    for c in range(x_copies):
                        size = x_sizes[c]
                        if ragged and loading + u == n_units - 1 and t >= 2:
                            size = i32(0)
                        if even_x or warp + c * n_warps < x_tiles:
                            at = i32(target_x + writing + u * unit_stage + c * (n_warps * FRAGMENT))
                            isa.copy16_fill(at, source_x + c * n_warps * 8 * row_bytes + u * (2 * UNIT), size)
                offset += units * w_unit_bytes
                source_x += units * (2 * UNIT)
                loading = i32(loading + units)
            isa.copy_commit()
            # Units upwards, two products each, as in `gemm_ring`.
            multiply(accumulators, operands_x, operands_w, reading)
            unit = i32(unit + units)
            if split == 1:
                while stream_end < unit:  # the end of the stream this unit belongs to; a stream may be empty
                    stream = i32(stream + 1)
                    stream_end = i32((stream * n_units) >> 2)
                if unit == stream_end:
                    if spilled:
                        # Nested loops of few rounds each: the compiler unrolls them, and the sums stay in registers.
                        # A thread's totals are its own, a word of each row of `threads`: no barrier, no bank shared.
                        if has_totals != 0:
                            for r in range(own_w):
                                for c in range(n_operands):
                                    i = r * n_operands + c
                                    total = isa.shared_load_f32(i32(own_totals + i * (4 * threads)))
                                    accumulators[i] = total + accumulators[i]
                        if unit < end:
                            for r in range(own_w):
                                for c in range(n_operands):
                                    i = r * n_operands + c
                                    isa.shared_store_f32(i32(own_totals + i * (4 * threads)), accumulators[i])
                                    accumulators[i] = zero
                        has_totals = i32(1)
                    else:
                        # (s0 + s1) + s2 ...: the total stands left, as in `gemm_ring`; the first is 0 + s0, which is
                        # s0.
                        for i in range(n_accumulators):
                            totals[i] = totals[i] + accumulators[i]
                            accumulators[i] = zero
            reading = i32(reading + stage_bytes)
            if reading == ring_bytes:
                reading = i32(0)
            writing = i32(writing + stage_bytes)
            if writing == ring_bytes:
                writing = i32(0)
        wait_all()
        if split == 1 and not spilled:
            for i in range(n_accumulators):
                accumulators[i] = totals[i]
        # The last stages have been read: the block's sums go to the same place.
        cuda.syncthreads()

        block = i64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
        block_sums = workspace + block * (STREAMS * stream_bytes)
        own_sums = block_sums + part * stream_bytes
        for r in range(own_w):
            for m in range(own_x):
                q = (r * own_x + m) * 4
                leave(
                    base, own_sums, i32(part_w * own_w + r), i32(part_x * own_x + m), g, t,
                    accumulators[q], accumulators[q + 1], accumulators[q + 2], accumulators[q + 3],
                )  # fmt: skip
        if hand_over(base, flag_at, counters + block * 4, tid) != 0:
            walk(
                base, block_sums, i32(0), tid, row0, tile0, tiles, rows, n, bias, gain, residual, positions, slots,
                table, q_heads, kv_heads, y, second, third, ordered, scales,
            )  # fmt: skip

    return gemm_tile
