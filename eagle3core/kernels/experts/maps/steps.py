"""A warp's share of a tile: copies that run ahead of it through a ring, and products step by step.

Source: derived here, after `gemm.ring.bulk`.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.experts.maps.form import STREAMS
from eagle3core.kernels.experts.maps.operands import make_load_operands
from eagle3core.kernels.experts.maps.order import UNIT_BYTES


def make_stream(isa: Any, *, piece: int, step: int) -> tuple[Any, Any]:
    """Inlined `bounds_of(stream, pieces)`: (first unit, steps); `following(stream, pieces)`: that of the next tile.

    Where streams are of unequal length a warp takes another one each tile; not where one has nothing.
    """
    i32, steps_of_piece = isa.i32, piece // step

    def bounds_of(stream: Any, pieces: Any) -> Any:
        # Products of 32 bits: cut to that before anything else is done with them.
        first = i32(i32(stream * pieces) >> 2)
        return i32(first * piece), i32((i32(i32((stream + 1) * pieces) >> 2) - first) * steps_of_piece)

    def following(stream: Any, pieces: Any) -> Any:
        if pieces > STREAMS and pieces & (STREAMS - 1) != 0:
            stream = i32((stream + 1) & (STREAMS - 1))
        return stream

    return isa.inlined(bounds_of), isa.inlined(following)


def make_copies(
    isa: Any, *, unit_bytes: int, w_tiles: int, step: int, stage_steps: int, stages: int, bulk: bool, bounds_of: Any,
    following: Any, group_of: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Inlined `begin_copies(...)`, which gives a cursor, and `refill(ring, full, slot, cursor, ...)`, the next one.

    A cursor is (tiles left, group, column, steps left of the stream, address of the stage that comes next, stream).
    `bulk`: one copy a tile of a stage, which one lane announces and asks for, else 16 bytes a lane, for which all lanes
    arrive. `bounds_of`, `following`: of `make_stream`. `group_of`: of `routing.lone.make_groups`.
    """
    i32, i64 = isa.i32, isa.i64
    step_bytes = step * unit_bytes
    tile_stage = stage_steps * step_bytes
    stage_bytes = w_tiles * tile_stage

    def source_of(w: Any, expert: Any, column: Any, columns: Any, units: Any, first_unit: Any) -> Any:
        tile = i64(expert) * columns + column
        return w + (tile * (w_tiles * i64(units)) + first_unit) * unit_bytes

    source_of = isa.inlined(source_of)

    def refill(
        ring: Any, full: Any, slot: Any, cursor: Any, w: Any, work: Any, columns: Any, units: Any, pieces: Any,
        lane: Any,
    ) -> Any:  # fmt: skip
        left, group, column, rest, source, stream = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4], cursor[5]
        if left > 0:
            steps = i32(stage_steps)
            if stage_steps > 1 and rest < steps:  # the last stage of a stream may be a shorter one
                steps = rest
            n_bytes, barrier, target = i32(steps * step_bytes), i32(full + slot * 8), i32(ring + slot * stage_bytes)
            if bulk:
                isa.warp_bulk_fill(target, source, n_bytes, barrier, i32(w_tiles * n_bytes))
                for r in range(1, w_tiles):
                    at = source + i64(i32(r * units * unit_bytes))
                    isa.warp_bulk_copy(i32(target + r * tile_stage), at, n_bytes, barrier)
            else:
                for r in range(w_tiles):
                    start, at = source + i64(i32(r * units * unit_bytes)), i32(lane * 16)
                    while at < n_bytes:
                        isa.copy16(i32(target + (r * tile_stage + at)), start + at)
                        at = i32(at + 512)
                isa.copies_arrive(barrier)
            rest, source = i32(rest - steps), source + n_bytes
            if rest == 0:
                # The next tile of an expert lies behind this one: no look at the list, and no product of 64 bits.
                first_unit, rest = bounds_of(stream, pieces)
                gone = i32(first_unit + rest * step)
                stream = following(stream, pieces)
                first_unit, rest = bounds_of(stream, pieces)
                source = source + i64(i32((w_tiles * units + first_unit - gone) * unit_bytes))
                left, column = i32(left - 1), i32(column + 1)
                if column == columns:
                    group, column = i32(group + 1), i32(0)
                    if left > 0:
                        expert = group_of(work, group)[0]
                        source = source_of(w, expert, column, columns, units, first_unit)
        return left, group, column, rest, source, stream

    refill = isa.inlined(refill)

    def begin_copies(
        w: Any, left: Any, group: Any, expert: Any, column: Any, columns: Any, units: Any, pieces: Any, stream: Any,
    ) -> Any:  # fmt: skip
        source = i64(0)
        first_unit, n_steps = bounds_of(stream, pieces)
        if n_steps == 0:
            left = i32(0)  # k is short, and this warp has none of it
        if left > 0:
            source = source_of(w, expert, column, columns, units, first_unit)
        return i32(left), i32(group), i32(column), n_steps, source, i32(stream)

    return isa.inlined(begin_copies), refill


def make_steps(
    isa: Any, *, dtype: str, form: str, x_tiles: int, w_tiles: int, step: int, stage_steps: int, stages: int,
    first_stages: int, refill: Any, wait: Any, add_step: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Inlined `lane_places(lane)`, `load_first(operands, sources, first_unit, n_steps)` and `multiply_tile(...)`.

    `add_step`: `add_stage` of `gemm.fp8.blocks`, for which `totals`, `scales` and `walk` are carried along.

    `operands` holds x of two steps, [even or odd][unit][tile of x][4] int32; `sources` the addresses of this lane's
    first 16 bytes of each row of x, 0 where it is not there: nothing is loaded then, and what the row's sums are nobody
    asks; `rows` of the group there are; `own` what `lane_places` gave. `ask` is the ring's slot that is filled next,
    where not all stages were asked for at first, and `behind` are left of those: each stage that lands brings one.
    """
    i32, mma = isa.i32, isa.MMA[dtype]
    unit_bytes = UNIT_BYTES[form]
    tile_stage = stage_steps * step * unit_bytes
    stage_bytes, x_bytes = w_tiles * tile_stage, 64 * step
    lane_places, load_operands = make_load_operands(isa, form, dtype)
    half, lags = 4 * step * x_tiles, first_stages < stages

    def load(operands: Any, sources: Any, at: Any, first: Any) -> None:
        for m in range(x_tiles):
            if sources[m] != 0:
                for u in range(step):
                    v = isa.load_u32x4(sources[m] + at + u * 64)
                    for c in range(4):
                        operands[first + (u * x_tiles + m) * 4 + c] = v[c]

    load = isa.inlined(load)

    def multiply(accumulators: Any, operands: Any, rows: Any, at: Any, first: Any, own: Any) -> None:
        for u in range(step):
            for r in range(w_tiles):
                a, b = load_operands(i32(at + (r * tile_stage + u * unit_bytes)), own)
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

    def load_first(operands: Any, sources: Any, first_unit: Any, n_steps: Any) -> None:
        if n_steps > 0:
            load(operands, sources, i32(first_unit * 64), 0)

    def after(slot: Any) -> Any:
        return i32(0) if slot == stages - 1 else i32(slot + 1)

    after = isa.inlined(after)

    def take_step(
        accumulators: Any, operands: Any, sources: Any, rows: Any, ring: Any, full: Any, slot: Any, parity: Any,
        ask: Any, behind: Any, within: Any, left: Any, at_x: Any, first: Any, second: Any, cursor: Any, w: Any,
        work: Any, columns: Any, units: Any, pieces: Any, lane: Any, own: Any, totals: Any, scales: Any, walk: Any,
    ) -> Any:  # fmt: skip
        if within == 0:
            wait(i32(full + slot * 8), parity)
            if lags and behind > 0:
                cursor = refill(ring, full, ask, cursor, w, work, columns, units, pieces, lane)
                ask, behind = after(ask), i32(behind - 1)
        # x of the step after this one has this one's time to arrive.
        if left > 1:
            load(operands, sources, i32(at_x + x_bytes), second)
        at = i32(ring + slot * stage_bytes + within * (step * unit_bytes))
        multiply(accumulators, operands, rows, at, first, own)
        add_step(accumulators, totals, scales, walk, left == 1)
        within = i32(within + 1)
        if within == stage_steps or left == 1:
            isa.cuda.syncwarp()  # other lanes may still be reading the stage, which is filled again
            if not lags:
                ask = slot
            cursor = refill(ring, full, ask, cursor, w, work, columns, units, pieces, lane)
            ask, slot, within = after(ask), after(slot), i32(0)
            if slot == 0:
                parity = i32(parity ^ 1)
        return slot, parity, ask, behind, within, cursor

    take_step = isa.inlined(take_step)

    def multiply_tile(
        accumulators: Any, operands: Any, sources: Any, rows: Any, ring: Any, full: Any, slot: Any, parity: Any,
        ask: Any, behind: Any, cursor: Any, w: Any, work: Any, columns: Any, units: Any, pieces: Any, first_unit: Any,
        n_steps: Any, lane: Any, own: Any, totals: Any, scales: Any, walk: Any,
    ) -> Any:  # fmt: skip
        left, within, at_x = n_steps, i32(0), i32(first_unit * 64)
        # Two steps a turn, so that which half of `operands` is meant is known when the kernel is compiled.
        while left > 0:
            slot, parity, ask, behind, within, cursor = take_step(
                accumulators, operands, sources, rows, ring, full, slot, parity, ask, behind, within, left, at_x, 0,
                half, cursor, w, work, columns, units, pieces, lane, own, totals, scales, walk,
            )  # fmt: skip
            left, at_x = i32(left - 1), i32(at_x + x_bytes)
            if left > 0:
                slot, parity, ask, behind, within, cursor = take_step(
                    accumulators, operands, sources, rows, ring, full, slot, parity, ask, behind, within, left, at_x,
                    half, 0, cursor, w, work, columns, units, pieces, lane, own, totals, scales, walk,
                )  # fmt: skip
                left, at_x = i32(left - 1), i32(at_x + x_bytes)
        return slot, parity, ask, behind, cursor

    return lane_places, isa.inlined(load_first), isa.inlined(multiply_tile)
