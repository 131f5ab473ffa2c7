"""W by bulk copies, for `gemm_ring`: what a warp needs of packed W for a stage is one run of bytes, so one copy.

Every warp has a ring and its barriers, one a stage, which the copied bytes complete. A stage is refilled by the warp
that has read it, once its lanes have met; nobody else is waited for. x goes straight into registers, two stages ahead:
the lane that loads 16 bytes of it is the one that multiplies them. With 16 rows of x a stage has half the units, so
that x takes as many registers, and each piece of W that is read from shared memory serves both tiles of x.

Source: derived here; bulk copies and mbarriers from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.gemm.fp8.blocks import make_block_walk
from eagle3core.kernels.gemm.fp8.operands import make_load_widened
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS

_UNIT_BYTES = 64  # of a row of x
# The most tiles of x, and pieces of 16 bytes of x a lane holds of a stage: two stages of 8 are 64 registers.
_MOST_TILES, _MOST_PIECES = 2, 8


def holds_x(x_tiles: int, units: int) -> bool:
    """Whether a lane's registers hold what it needs of x: up to 16 rows, and 8 units a stage of 8 rows, 4 of 16."""
    return x_tiles <= _MOST_TILES and x_tiles * units <= _MOST_PIECES


def make_bulk_ring(
    isa: Any, *, dtype: str, x_tiles: int, w_tiles: int, units: int, stages: int, fp8: bool = False,
    blocks: bool = False, paced: int = 0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Inlined `start_w`, `start_paced`, `start_x` and `multiply_all`; a block has 8 or 16 rows of x.

    `fp8`: W is in e4m3.

    In all but the second, of one warp each, `ring` and `full` are the shared addresses of the warp's stages and
    barriers, `source` and `source_x` the addresses of its first unit of W and of this lane's first 16 bytes of x,
    `pitch` and `pitch_x` the bytes from a tile of W or x to the next, `has_row` and `has_far` whether this lane's row
    of the first and of the second tile of x is there, `operands` a register array of 8 `units` `x_tiles` int32.
    `totals`, `held` and `walk` are those of `make_block_walk`.

    `start_paced(base, warp, full, w, tile0, n_units, unit_bytes, lane)`, in place of `start_w` where `paced`, is called
    by all warps and one more, which alone asks for W of all rings as they begin: a stage of one every `paced` cycles,
    and what is left at once when somebody arrives at the mbarrier whose address it gives. What is asked for all at once
    makes whoever else reads wait until it has come; asked for as fast as it comes, it leaves them their turn.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    unit_shift = units.bit_length() - 1
    piece, x_bytes = units * (FRAGMENT if fp8 else 2 * FRAGMENT), units * _UNIT_BYTES
    stage_bytes = w_tiles * piece
    ring_bytes = stages * stage_bytes
    load_even, multiply_even = make_half(isa, dtype, x_tiles, w_tiles, units, 0, fp8)
    load_odd, multiply_odd = make_half(isa, dtype, x_tiles, w_tiles, units, 4 * units * x_tiles, fp8)

    _, add_stage, _ = make_block_walk(isa, blocks=blocks, units=units, x_tiles=x_tiles, w_tiles=w_tiles)

    copy_stage, begin_barriers = make_stage_copies(isa, w_tiles=w_tiles, piece=piece, stages=stages)

    def start_w(ring: Any, full: Any, source: Any, pitch: Any, n_steps: Any, lane: Any) -> None:
        begin_barriers(full, lane)
        cuda.syncwarp()
        for stage in range(stages):
            if stage < n_steps:
                at = source + stage * piece
                copy_stage(i32(ring + stage * stage_bytes), at, pitch, i32(full + stage * 8), lane)

    def start_paced(
        base: Any, warp: Any, full: Any, w: Any, tile0: Any, n_units: Any, unit_bytes: Any, lane: Any
    ) -> Any:
        fulls = i32(base + STREAMS * ring_bytes)
        go = i32(fulls + STREAMS * stages * 8)
        if warp < STREAMS:
            begin_barriers(full, lane)
        elif lane == 0:
            isa.mbarrier_init(go, i32(1))
            isa.mbarrier_fence_init()
        cuda.syncthreads()
        if warp == STREAMS:
            pitch, due, stage = i64(n_units) * unit_bytes, isa.clock(), i32(0)
            while stage < stages:
                for stream in range(STREAMS):
                    first = i32((stream * n_units) >> 2)
                    if stage < i32(((((stream + 1) * n_units) >> 2) - first) >> unit_shift):
                        while i32(isa.clock() - due) < 0 and isa.mbarrier_is_over(go, i32(0)) == 0:
                            pass
                        due = i32(due + paced)
                        at = w + (i64(tile0) * n_units + first) * unit_bytes + i64(stage) * piece
                        target = i32(base + stream * ring_bytes + stage * stage_bytes)
                        copy_stage(target, at, pitch, i32(fulls + (stream * stages + stage) * 8), lane)
                stage = i32(stage + 1)
        return go

    def start_x(operands: Any, source_x: Any, pitch_x: Any, has_row: Any, has_far: Any, n_steps: Any) -> None:
        # Two stages of x, even and odd, in registers: 4 int32 a unit and tile of x each.
        for i in range(8 * units * x_tiles):
            operands[i] = i32(0)  # and so they stay where there is no row
        if n_steps > 0:
            load_even(operands, source_x, pitch_x, has_row, has_far)
        if n_steps > 1:
            load_odd(operands, source_x + x_bytes, pitch_x, has_row, has_far)

    following = make_next_stage(isa, stage_bytes=stage_bytes, ring_bytes=ring_bytes)

    def multiply_all(
        accumulators: Any, operands: Any, ring: Any, full: Any, source: Any, pitch: Any, source_x: Any, pitch_x: Any,
        has_row: Any, has_far: Any, n_steps: Any, lane: Any, totals: Any, held: Any, walk: Any,
    ) -> None:  # fmt: skip
        own = i32(ring + lane * 16)
        reading, barrier, parity, left = i32(0), i32(0), i32(0), n_steps
        at, at_x = source + stages * piece, source_x + 2 * x_bytes
        # Two stages a turn, so that which half of `operands` is meant is known when the kernel is compiled: an index
        # found at run time would move the array to memory.
        while left > 0:
            isa.mbarrier_wait(i32(full + barrier), parity)
            multiply_even(accumulators, operands, i32(own + reading))
            add_stage(accumulators, totals, held, walk, left == 1)
            # Other lanes may still be reading this stage: they meet before it is filled again.
            if left > stages:
                cuda.syncwarp()
                copy_stage(i32(ring + reading), at, pitch, i32(full + barrier), lane)
            # The half just multiplied takes x of two stages on, which then has a whole stage's time to arrive.
            if left > 2:
                load_even(operands, at_x, pitch_x, has_row, has_far)
            reading, barrier, parity = following(reading, barrier, parity)
            if left > 1:
                isa.mbarrier_wait(i32(full + barrier), parity)
                multiply_odd(accumulators, operands, i32(own + reading))
                add_stage(accumulators, totals, held, walk, left == 2)
                if left > stages + 1:
                    cuda.syncwarp()
                    copy_stage(i32(ring + reading), at + piece, pitch, i32(full + barrier), lane)
                if left > 3:
                    load_odd(operands, at_x + x_bytes, pitch_x, has_row, has_far)
                reading, barrier, parity = following(reading, barrier, parity)
            left = i32(left - 2)
            at += 2 * piece
            at_x += 2 * x_bytes

    return isa.inlined(start_w), isa.inlined(start_paced), isa.inlined(start_x), isa.inlined(multiply_all)


def make_stage_copies(isa: Any, *, w_tiles: int, piece: int, stages: int) -> tuple[Any, Any]:
    """Inlined `copy_stage(target, source, pitch, barrier, lane)`, a warp's stage of W of `piece` bytes a tile, `pitch`
    apart, and `begin_barriers(full, lane)`, those of its ring."""
    i32, stage_bytes = isa.i32, w_tiles * piece

    def copy_stage(target: Any, source: Any, pitch: Any, barrier: Any, lane: Any) -> None:
        if lane == 0:
            isa.mbarrier_expect(barrier, i32(stage_bytes))
        for r in range(w_tiles):
            isa.warp_bulk_copy(i32(target + r * piece), source + r * pitch, i32(piece), barrier)

    def begin_barriers(full: Any, lane: Any) -> None:
        # One arrival, that of the lane which announces the bytes; the bytes do the rest.
        if lane < stages:
            isa.mbarrier_init(i32(full + lane * 8), i32(1))
            isa.mbarrier_fence_init()

    return isa.inlined(copy_stage), isa.inlined(begin_barriers)


def make_next_stage(isa: Any, *, stage_bytes: int, ring_bytes: int) -> Any:
    """Inlined `following(reading, barrier, parity)`: the ring's next stage; a round later its barrier has the other
    parity."""
    i32 = isa.i32

    def following(reading: Any, barrier: Any, parity: Any) -> Any:
        reading, barrier = i32(reading + stage_bytes), i32(barrier + 8)
        if reading == ring_bytes:
            reading, barrier, parity = i32(0), i32(0), i32(parity ^ 1)
        return reading, barrier, parity

    return isa.inlined(following)


def make_half(isa: Any, dtype: str, x_tiles: int, w_tiles: int, units: int, first: int, fp8: bool) -> tuple[Any, Any]:
    """Inlined `load(operands, at, pitch_x, has_row, has_far)` and `multiply(accumulators, operands, at)` of a stage.

    It has 1, 2, 4 or 8 units; its x lies in `operands` from `first` on, [unit][tile of x][4].
    """
    i32, mma = isa.i32, isa.MMA[dtype]
    unit_bytes, part = FRAGMENT if fp8 else 2 * FRAGMENT, max(1, units // 4)
    tile_bytes = units * unit_bytes
    load_widened = make_load_widened(isa, dtype)

    def load_part(operands: Any, at: Any, unit: Any, m: Any) -> None:
        for u in range(part):
            v = isa.load_u32x4(at + (unit + u) * _UNIT_BYTES)
            for c in range(4):
                operands[first + ((unit + u) * x_tiles + m) * 4 + c] = v[c]

    def multiply_part(accumulators: Any, operands: Any, at: Any, unit: Any) -> None:
        for u in range(part):
            for r in range(w_tiles):
                place = i32(at + (r * tile_bytes + (unit + u) * unit_bytes))
                if fp8:
                    a, b = load_widened(place)
                else:
                    a, b = isa.shared_load_u32x4(place), isa.shared_load_u32x4(i32(place + FRAGMENT))
                for m in range(x_tiles):
                    q, o = (r * x_tiles + m) * 4, first + ((unit + u) * x_tiles + m) * 4
                    d = mma(
                        a[0], b[0], a[1], b[1], operands[o], operands[o + 1],
                        accumulators[q], accumulators[q + 1], accumulators[q + 2], accumulators[q + 3],
                    )  # fmt: skip
                    d = mma(a[2], b[2], a[3], b[3], operands[o + 2], operands[o + 3], d[0], d[1], d[2], d[3])
                    for c in range(4):
                        accumulators[q + c] = d[c]

    load_part, multiply_part = isa.inlined(load_part), isa.inlined(multiply_part)

    # Part by part in so many words: the compiler leaves a loop over large bodies rolled.
    def load(operands: Any, at: Any, pitch_x: Any, has_row: Any, has_far: Any) -> None:
        if has_row:
            load_part(operands, at, 0, 0)
            if units > 1:
                load_part(operands, at, part, 0)
            if units > 2:
                load_part(operands, at, 2 * part, 0)
                load_part(operands, at, 3 * part, 0)
        if x_tiles > 1 and has_far:
            load_part(operands, at + pitch_x, 0, 1)
            if units > 1:
                load_part(operands, at + pitch_x, part, 1)
            if units > 2:
                load_part(operands, at + pitch_x, 2 * part, 1)
                load_part(operands, at + pitch_x, 3 * part, 1)

    def multiply(accumulators: Any, operands: Any, at: Any) -> None:
        multiply_part(accumulators, operands, at, 0)
        if units > 1:
            multiply_part(accumulators, operands, at, part)
        if units > 2:
            multiply_part(accumulators, operands, at, 2 * part)
            multiply_part(accumulators, operands, at, 3 * part)

    return isa.inlined(load), isa.inlined(multiply)
