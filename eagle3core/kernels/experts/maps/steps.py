"""A warp's share of a tile: copies that run ahead of it through a ring, and products step by step.

Source: derived here, after `gemm.bulk`.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.experts.maps.operands import make_load_operands
from eagle3core.kernels.experts.maps.order import UNIT_BYTES


def make_copies(
    isa: Any, *, unit_bytes: int, w_tiles: int, step: int, stage_steps: int, stages: int, bulk: bool, hops: bool
) -> tuple[Any, Any]:  # fmt: skip
    """Inlined `start_copies(...)`, which gives a cursor, and `refill(ring, full, slot, cursor, ...)`, the next one.

    A cursor is (tiles left, group, column, steps done of the tile's stream, address of the stage that comes next).
    `bulk`: one copy a tile of a stage, else 16 bytes a lane, for which all lanes arrive.
    `hops`: as `form.Cut` says; then steps left stand in the place of steps done.
    """
    i32, i64 = isa.i32, isa.i64
    step_bytes = step * unit_bytes
    tile_stage = stage_steps * step_bytes
    stage_bytes = w_tiles * tile_stage

    def source_of(w: Any, work: Any, group: Any, column: Any, columns: Any, units: Any, first_unit: Any) -> Any:
        expert = isa.load_u32(work + 16 + i64(group) * 16)
        tile = i64(expert) * columns + column
        return w + (tile * (w_tiles * i64(units)) + first_unit) * unit_bytes

    source_of = isa.inlined(source_of)

    def refill(
        ring: Any, full: Any, slot: Any, cursor: Any, w: Any, work: Any, columns: Any, units: Any, first_unit: Any,
        n_steps: Any, lane: Any,
    ) -> Any:  # fmt: skip
        left, group, column, done, source = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4]
        if left > 0:
            steps = i32(min(n_steps - done, stage_steps))  # the last stage of a stream may be a shorter one
            n_bytes, barrier = i32(steps * step_bytes), i32(full + slot * 8)
            if bulk:
                # The bytes are announced before a copy of this warp can complete them.
                if lane == 0:
                    isa.mbarrier_expect(barrier, i32(w_tiles * n_bytes))
                isa.cuda.syncwarp()
            for r in range(w_tiles):
                target, start = i32(ring + slot * stage_bytes + r * tile_stage), source + r * i64(units) * unit_bytes
                if bulk:
                    isa.warp_bulk_copy(target, start, n_bytes, barrier)
                else:
                    at = i32(lane * 16)
                    while at < n_bytes:
                        isa.copy16(i32(target + at), start + at)
                        at = i32(at + 512)
            if not bulk:
                isa.copies_arrive(barrier)
            done, source = i32(done + steps), source + n_bytes
            if done == n_steps:
                left, column, done = i32(left - 1), i32(column + 1), i32(0)
                if column == columns:
                    group, column = i32(group + 1), i32(0)
                if left > 0:
                    source = source_of(w, work, group, column, columns, units, first_unit)
        return left, group, column, done, source

    def refill_by_hops(
        ring: Any, full: Any, slot: Any, cursor: Any, w: Any, work: Any, columns: Any, units: Any, first_unit: Any,
        n_steps: Any, lane: Any,
    ) -> Any:  # fmt: skip
        left, group, column, rest, source = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4]
        if left > 0:
            steps = i32(stage_steps)
            if rest < steps:
                steps = rest
            n_bytes, barrier, target = i32(steps * step_bytes), i32(full + slot * 8), i32(ring + slot * stage_bytes)
            isa.warp_bulk_fill(target, source, n_bytes, barrier, i32(w_tiles * n_bytes))
            for r in range(1, w_tiles):
                at = source + i64(i32(r * units * unit_bytes))
                isa.warp_bulk_copy(i32(target + r * tile_stage), at, n_bytes, barrier)
            rest, source = i32(rest - steps), source + n_bytes
            if rest == 0:
                # The next tile of an expert lies behind this one: no look at the list, and no product of 64 bits.
                source = source + i64(i32((w_tiles * units - n_steps * step) * unit_bytes))
                left, column, rest = i32(left - 1), i32(column + 1), n_steps
                if column == columns:
                    group, column = i32(group + 1), i32(0)
                    if left > 0:
                        source = source_of(w, work, group, column, columns, units, first_unit)
        return left, group, column, rest, source

    by_hops = hops and bulk  # without bulk copies the lanes' own loops are what takes time
    refill = isa.inlined(refill_by_hops if by_hops else refill)

    def start_copies(
        ring: Any, full: Any, w: Any, work: Any, left: Any, group: Any, column: Any, columns: Any, units: Any,
        first_unit: Any, n_steps: Any, lane: Any,
    ) -> Any:  # fmt: skip
        source = i64(0)
        if n_steps == 0:
            left = i32(0)  # k is short, and this warp has none of it
        if left > 0:
            source = source_of(w, work, group, column, columns, units, first_unit)
        cursor = (i32(left), i32(group), i32(column), i32(n_steps if by_hops else 0), source)
        for slot in range(stages):
            cursor = refill(ring, full, i32(slot), cursor, w, work, columns, units, first_unit, n_steps, lane)
        return cursor

    return isa.inlined(start_copies), refill


def make_steps(
    isa: Any, *, dtype: str, form: str, x_tiles: int, w_tiles: int, step: int, stage_steps: int, stages: int,
    refill: Any, wait: Any, add_step: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Inlined `load_first(operands, sources, n_steps)` and `multiply_tile(...)`, all of a stream of one tile.

    `add_step`: `add_stage` of `gemm.fp8.blocks`, for which `totals`, `scales` and `walk` are carried along.

    `operands` holds x of two steps, [even or odd][unit][tile of x][4] int32; `sources` the addresses of this lane's
    first 16 bytes of each tile of x, 0 where its row is not there; `rows` of the group there are.
    """
    i32, mma = isa.i32, isa.MMA[dtype]
    unit_bytes = UNIT_BYTES[form]
    tile_stage = stage_steps * step * unit_bytes
    stage_bytes, x_bytes = w_tiles * tile_stage, 64 * step
    load_operands = make_load_operands(isa, form, dtype)
    half = 4 * step * x_tiles

    def load(operands: Any, sources: Any, at: Any, first: Any) -> None:
        for m in range(x_tiles):
            if sources[m] != 0:
                for u in range(step):
                    v = isa.load_u32x4(sources[m] + at + u * 64)
                    for c in range(4):
                        operands[first + (u * x_tiles + m) * 4 + c] = v[c]

    load = isa.inlined(load)

    def multiply(accumulators: Any, operands: Any, rows: Any, at: Any, first: Any, lane: Any) -> None:
        for u in range(step):
            for r in range(w_tiles):
                a, b = load_operands(i32(at + (r * tile_stage + u * unit_bytes)), lane)
                for m in range(x_tiles):
                    if m == 0 or m * 8 < rows:  # of all lanes alike
                        q, o = (r * x_tiles + m) * 4, first + (u * x_tiles + m) * 4
                        d = mma(
                            a[0], b[0], a[1], b[1], operands[o], operands[o + 1],
                            accumulators[q], accumulators[q + 1], accumulators[q + 2], accumulators[q + 3],
                        )  # fmt: skip
                        d = mma(a[2], b[2], a[3], b[3], operands[o + 2], operands[o + 3], d[0], d[1], d[2], d[3])
                        for c in range(4):
                            accumulators[q + c] = d[c]

    multiply = isa.inlined(multiply)

    def load_first(operands: Any, sources: Any, n_steps: Any) -> None:
        for i in range(2 * half):
            operands[i] = i32(0)
        if n_steps > 0:
            load(operands, sources, 0, 0)

    def take_step(
        accumulators: Any, operands: Any, sources: Any, rows: Any, ring: Any, full: Any, slot: Any, parity: Any,
        within: Any, left: Any, at_x: Any, first: Any, second: Any, cursor: Any, w: Any, work: Any, columns: Any,
        units: Any, first_unit: Any, n_steps: Any, lane: Any, totals: Any, scales: Any, walk: Any,
    ) -> Any:  # fmt: skip
        if within == 0:
            wait(i32(full + slot * 8), parity)
        # x of the step after this one has this one's time to arrive.
        if left > 1:
            load(operands, sources, i32(at_x + x_bytes), second)
        at = i32(ring + slot * stage_bytes + within * (step * unit_bytes))
        multiply(accumulators, operands, rows, at, first, lane)
        add_step(accumulators, totals, scales, walk, left == 1)
        within = i32(within + 1)
        if within == stage_steps or left == 1:
            isa.cuda.syncwarp()  # other lanes may still be reading the stage, which is filled again
            cursor = refill(ring, full, slot, cursor, w, work, columns, units, first_unit, n_steps, lane)
            slot, within = i32(slot + 1), i32(0)
            if slot == stages:
                slot, parity = i32(0), i32(parity ^ 1)
        return slot, parity, within, cursor

    take_step = isa.inlined(take_step)

    def multiply_tile(
        accumulators: Any, operands: Any, sources: Any, rows: Any, ring: Any, full: Any, slot: Any, parity: Any,
        cursor: Any, w: Any, work: Any, columns: Any, units: Any, first_unit: Any, n_steps: Any, lane: Any,
        totals: Any, scales: Any, walk: Any,
    ) -> Any:  # fmt: skip
        left, within, at_x = n_steps, i32(0), i32(0)
        # Two steps a turn, so that which half of `operands` is meant is known when the kernel is compiled.
        while left > 0:
            slot, parity, within, cursor = take_step(
                accumulators, operands, sources, rows, ring, full, slot, parity, within, left, at_x, 0, half, cursor, w,
                work, columns, units, first_unit, n_steps, lane, totals, scales, walk,
            )  # fmt: skip
            left, at_x = i32(left - 1), i32(at_x + x_bytes)
            if left > 0:
                slot, parity, within, cursor = take_step(
                    accumulators, operands, sources, rows, ring, full, slot, parity, within, left, at_x, half, 0,
                    cursor, w, work, columns, units, first_unit, n_steps, lane, totals, scales, walk,
                )  # fmt: skip
                left, at_x = i32(left - 1), i32(at_x + x_bytes)
        return slot, parity, cursor

    return isa.inlined(load_first), isa.inlined(multiply_tile)
