"""Kernel of the experts' maps: blocks walk over tiles of the experts that some row has chosen, and read each once.

What there is to do is known on the device alone: groups of rows of an expert, in ascending order, as `lists` leaves
them. All tiles of all groups are shared out evenly, each block a run of neighbours by its seat (`seats`), so the
matrices stream by in one piece and the rows of a group stay in the first-level cache. The four warps of a block divide
k. Each has a ring of stages that one bulk copy fills, and that runs on into the block's next tile while sums of this
one meet: memory never waits for a tile to end. x goes straight into registers, one step ahead.

With two places for sums no warp waits for the others where a tile ends: it leaves its sums, says so, and finishes the
tile after its products of the next one, when the others have long left theirs; streams are of unequal length. What that
tile needs beside its sums, and x of the next one's first step, is under way meanwhile.

The order of sums: k is cut into pieces of `form.piece_units`, stream s has the pieces from s n / 4 on, ascending, two
products of 16 k a unit; then ((s0 + s1) + s2) + s3. A column of a product is one row of x, so a row's bits are its own.
With scales of blocks a stream sums each block from zero and adds it scaled (`gemm.fp8.blocks`).

Source: derived here, after `gemm.ring.bulk`; fragment layouts from the PTX ISA.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.errors import KernelLimit
from eagle3core.kernels.experts.maps.finish import make_fetch_own, make_finish, make_look_up_row
from eagle3core.kernels.experts.maps.form import STREAMS, THREADS
from eagle3core.kernels.experts.maps.order import FP8, FP8_BLOCKS, UNIT_BYTES
from eagle3core.kernels.experts.maps.steps import make_copies, make_steps, make_stream
from eagle3core.kernels.experts.maps.sums import make_sums
from eagle3core.kernels.experts.routing.lone import Choice, make_groups
from eagle3core.kernels.experts.routing.pick import words_of
from eagle3core.kernels.experts.seats import make_take_seat
from eagle3core.kernels.gemm.fp8.blocks import make_block_walk


def make_walk(
    isa: Any, *, dtype: str, form: str, gate: str, has_bias: bool, piece: int, x_tiles: int, w_tiles: int, step: int,
    stage_steps: int, stages: int, first: int, buffers: int, early: bool, overlap: bool, choice: Choice | None,
) -> Any:  # fmt: skip
    """The kernel; any grid of one dimension, blocks of `THREADS`.

    Args:
        form: of the matrices, see `order`. gate: of gate and up, "silu" or "clamped"; "": y has the sums, fp32.
        piece, x_tiles .. buffers: see `form`.
        early: which tiles there are was known before the kernel before began, so their bytes are asked for at once.
        choice: blocks choose the one row's experts by the logits (`routing.lone`); None: lists are given.

    Raises:
        KernelLimit: a step that does not divide the pieces of k, of which streams have whole steps; more stages asked
            for at first than there are.
    """
    if piece % step:
        raise KernelLimit(
            f"a step of {step} units in pieces of {piece}", f"a divisor of {piece}", "pass a setting with such a step"
        )
    if not 0 < first <= stages:
        raise KernelLimit(f"{first} stages at first of {stages}", f"1 to {stages}", "pass a setting with as many")
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    unit_bytes, zero = UNIT_BYTES[form], np.float32(0)
    stage_bytes = w_tiles * stage_steps * step * unit_bytes
    ring_bytes = stages * stage_bytes
    sums_at = STREAMS * (ring_bytes + 8 * stages)
    block_sums, x_rows = 128 * x_tiles * w_tiles, 8 * x_tiles
    other_sums = (buffers - 1) * STREAMS * block_sums * 4
    met_at = sums_at + buffers * STREAMS * block_sums * 4
    find, group_of, place_of, leave_choice = make_groups(isa, choice, hurries=not early)
    n_logits = words_of(choice.experts) if choice is not None else 1
    n_accumulators, n_operands = 4 * x_tiles * w_tiles, 8 * step * x_tiles
    n_items = 64 * x_tiles * w_tiles
    items, tile_shift = -(-n_items // THREADS), (64 * x_tiles).bit_length() - 1
    n_pairs, late = 2 * items, buffers > 1  # a tile is finished after the products of the next one
    assert not late or items == 1, "two places are for the sums of few rows"
    meets = late or (early and choice is not None)
    holds = items <= 2  # what an item needs beside its sums is asked for before they are made
    bounds_of, following = make_stream(isa, piece=piece, step=step)
    begin_copies, refill = make_copies(
        isa,
        unit_bytes=unit_bytes,
        w_tiles=w_tiles,
        step=step,
        stage_steps=stage_steps,
        stages=stages,
        bulk=overlap,
        bounds_of=bounds_of,
        following=following,
        group_of=group_of,
    )  # compute capability 8 has neither bulk copies nor dependent launch
    blocks_scaled = form == FP8_BLOCKS
    begin_blocks, add_step, take_blocks = make_block_walk(
        isa, blocks=blocks_scaled, units=step, x_tiles=x_tiles, w_tiles=w_tiles
    )
    n_totals, n_block_scales = n_accumulators if blocks_scaled else 1, 2 * w_tiles
    wait = isa.mbarrier_wait if overlap else isa.mbarrier_poll
    lane_places, load_first, multiply_tile = make_steps(
        isa, dtype=dtype, form=form, x_tiles=x_tiles, w_tiles=w_tiles, step=step, stage_steps=stage_steps,
        stages=stages, first_stages=first, refill=refill, wait=wait, add_step=add_step,
    )  # fmt: skip
    look_up_row, fetch_own = make_look_up_row(isa, gate, place_of), make_fetch_own(isa, has_bias, form == FP8)
    finish = make_finish(isa, dtype, gate, form == FP8)
    take_seat = make_take_seat(isa)
    leave_sums, sum_of = make_sums(isa, x_tiles=x_tiles, w_tiles=w_tiles)

    def load_places(own_places: Any, info: Any, places: Any, g: Any) -> None:
        for m in range(x_tiles):
            own_places[m] = i32(-1)
            if m * 8 + g < info[2]:
                own_places[m] = i32(place_of(places, i32(info[1] + m * 8 + g)))

    def find_rows(sources: Any, own_places: Any, x: Any, chosen: Any, units: Any, t: Any) -> None:
        for m in range(x_tiles):
            sources[m] = i64(0)
            if own_places[m] >= 0:
                sources[m] = x + i64(isa.quotient(own_places[m], chosen)) * (i64(units) * 64) + t * 16

    def fetch_items(
        held_place: Any, held_factor: Any, held_scales: Any, held_bias: Any, is_new: Any, tid: Any, tile0: Any,
        tiles: Any, info: Any, places: Any, norms: Any, chosen: Any, scales: Any, bias: Any,
    ) -> None:  # fmt: skip
        """What the items of a tile need beside their sums; of its row, which a group's tiles share, where `is_new`."""
        for j in range(items):
            item = i32(tid + j * THREADS)
            if is_new != 0:
                held_place[j], held_factor[j] = look_up_row(
                    item < n_items, i32((item >> 3) & (x_rows - 1)), info, places, norms, chosen
                )
            own = (i64(info[0]) * tiles + i32(tile0 + (item >> tile_shift))) * 16 + (item & 7)
            s0, s1, b0, b1 = fetch_own(held_place[j], own, scales, bias)
            held_scales[2 * j], held_scales[2 * j + 1], held_bias[2 * j], held_bias[2 * j + 1] = s0, s1, b0, b1

    def finish_items(
        buffer: Any, held_place: Any, held_factor: Any, held_scales: Any, held_bias: Any, tid: Any, tile0: Any,
        width: Any, y: Any,
    ) -> None:  # fmt: skip
        for j in range(items):
            item = i32(tid + j * THREADS)
            if held_place[j] >= 0:
                v0, v1 = sum_of(buffer, item)
                finish(
                    v0, v1, held_place[j], held_factor[j], held_scales[2 * j], held_scales[2 * j + 1],
                    held_bias[2 * j], held_bias[2 * j + 1], i32(tile0 + (item >> tile_shift)), i32(item & 7), width, y,
                )  # fmt: skip

    load_places, find_rows = isa.inlined(load_places), isa.inlined(find_rows)
    fetch_items, finish_items = isa.inlined(fetch_items), isa.inlined(finish_items)

    def finish_last(
        met: Any, met_parity: Any, buffer: Any, last_place: Any, last_factor: Any, last_scales: Any, last_bias: Any,
        tid: Any, last_tile: Any, width: Any, y: Any,
    ) -> Any:  # fmt: skip
        wait(met, met_parity)  # all streams have left their sums
        finish_items(buffer, last_place, last_factor, last_scales, last_bias, tid, last_tile, width, y)
        return i32(met_parity ^ 1)

    finish_last = isa.inlined(finish_last)

    def expert_map(
        x: Any, w: Any, bias: Any, scales: Any, norms: Any, given: Any, places: Any, logits: Any, ids: Any,
        shares: Any, y: Any, seats: Any, units: Any, tiles: Any, chosen: Any, width: Any, processors: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), isa.shuffle_i32(i32(tid >> 5), 0)  # one number for all lanes, as far as is known
        g, t = i32(lane >> 2), i32(lane & 3)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        ring, full = i32(base + warp * ring_bytes), i32(base + STREAMS * ring_bytes + warp * (8 * stages))
        pieces, stream = i32(units // piece), warp  # of the first tile
        first_unit, n_steps = bounds_of(stream, pieces)
        if lane < stages:
            isa.mbarrier_init(i32(full + lane * 8), i32(1 if overlap else 32))
            if overlap:
                isa.mbarrier_fence_init()
        met = i32(base + met_at)
        if late and tid == 0:
            isa.mbarrier_init(met, i32(STREAMS * isa.ARRIVING_LANES))
            if overlap:
                isa.mbarrier_fence_init()
        cuda.syncwarp()
        columns = i32(tiles // w_tiles)
        blocks, run = i32(cuda.gridDim.x), take_seat(seats, processors, i32(base + sums_at), tid)
        if overlap:
            # The next kernel may read the lists of work before it waits; here they are waited for before it starts.
            if not early:
                isa.wait_previous()
            isa.let_next_start()
        values = cuda.local.array(n_logits, f32)
        n_groups, work, taken, top = find(given, values, logits, i32(base + sums_at), warp, lane)
        total = i32(n_groups * columns)
        begin = isa.quotient(i32(run * total), blocks)
        left = i32(isa.quotient(i32((run + 1) * total), blocks) - begin)
        group = isa.quotient(begin, columns)
        column = i32(begin - group * columns)
        # The first group's rows are asked for before copies of its expert begin, and found when those are under way.
        info, own_places = (i32(0), i32(0), i32(0), i32(0)), cuda.local.array(x_tiles, i32)
        if left > 0:
            info = group_of(work, group)  # expert, first place, rows
        load_places(own_places, info, places, g)
        # The cursor of copies: tiles left, group, column, steps left of the stream, where the next ones lie, stream.
        cursor = begin_copies(w, left, group, info[0], column, columns, units, pieces, stream)
        for slot in range(first):
            cursor = refill(ring, full, i32(slot), cursor, w, work, columns, units, pieces, lane)
        ask, behind = i32(first % stages), i32(stages - first)
        if gate != "" and cuda.blockIdx.x == 0 and warp == 0:
            leave_choice(values, taken, top, ids, shares, lane)
        sources = cuda.local.array(x_tiles, i64)
        find_rows(sources, own_places, x, chosen, units, t)
        if meets:
            cuda.syncthreads()  # nobody leaves sums before all know their groups, or arrives at a barrier not yet there
        if overlap and early:
            isa.wait_previous()

        accumulators, operands = cuda.local.array(n_accumulators, f32), cuda.local.array(n_operands, i32)
        totals, block_scales = cuda.local.array(n_totals, f32), cuda.local.array(n_block_scales, f32)
        block_walk = cuda.local.array(4, i64)
        held_place, held_factor = cuda.local.array(items, i32), cuda.local.array(items, f32)
        held_scales, held_bias = cuda.local.array(n_pairs, f32), cuda.local.array(n_pairs, i32)
        last_place, last_factor = cuda.local.array(items, i32), cuda.local.array(items, f32)
        last_scales, last_bias = cuda.local.array(n_pairs, f32), cuda.local.array(n_pairs, i32)
        for i in range(n_operands):
            operands[i] = i32(0)
        own = lane_places(lane)
        slot, parity, here, there = i32(0), i32(0), i32(base + sums_at), i32(base + sums_at + other_sums)
        is_new, waits, met_parity, last_tile = i32(1), i32(0), i32(0), i32(0)
        while left > 0:
            tile0 = i32(column * w_tiles)
            begin_blocks(totals, block_scales, block_walk, scales, i64(info[0]) * tiles + tile0, units, first_unit)
            load_first(operands, sources, first_unit, n_steps)
            if holds:
                fetch_items(
                    held_place, held_factor, held_scales, held_bias, is_new, tid, tile0, tiles, info, places, norms,
                    chosen, scales, bias,
                )  # fmt: skip
            for i in range(n_accumulators):
                accumulators[i] = zero
            slot, parity, ask, behind, cursor = multiply_tile(
                accumulators, operands, sources, info[2], ring, full, slot, parity, ask, behind, cursor, w, work,
                columns, units, pieces, first_unit, n_steps, lane, own, totals, block_scales, block_walk,
            )  # fmt: skip
            take_blocks(accumulators, totals)
            if late:
                if waits != 0:
                    met_parity = finish_last(
                        met, met_parity, there, last_place, last_factor, last_scales, last_bias, tid, last_tile, width,
                        y,
                    )  # fmt: skip
                # Who comes here has seen all warps finish the tile before the last, whose sums lay where these go.
                leave_sums(accumulators, here, stream, g, t)
                cuda.syncwarp()
                if lane < isa.ARRIVING_LANES:
                    isa.mbarrier_arrive(met)
                here, there, waits, last_tile = there, here, i32(1), tile0
                # Not sooner: what has been asked for would be waited for where it changes its register.
                for j in range(items):
                    last_place[j], last_factor[j] = held_place[j], held_factor[j]
                for j in range(n_pairs):
                    last_scales[j], last_bias[j] = held_scales[j], held_bias[j]
            else:
                leave_sums(accumulators, here, stream, g, t)
                cuda.syncthreads()
                if not holds:
                    fetch_items(
                        held_place, held_factor, held_scales, held_bias, i32(1), tid, tile0, tiles, info, places,
                        norms, chosen, scales, bias,
                    )  # fmt: skip
                finish_items(here, held_place, held_factor, held_scales, held_bias, tid, tile0, width, y)
                cuda.syncthreads()
            stream = following(stream, pieces)
            first_unit, n_steps = bounds_of(stream, pieces)
            left, column, is_new = i32(left - 1), i32(column + 1), i32(0)
            if column == columns and left > 0:
                group, column, is_new = i32(group + 1), i32(0), i32(1)
                info = group_of(work, group)
                load_places(own_places, info, places, g)
                find_rows(sources, own_places, x, chosen, units, t)
        if late and waits != 0:
            met_parity = finish_last(
                met, met_parity, there, last_place, last_factor, last_scales, last_bias, tid, last_tile, width, y
            )

    return expert_map
