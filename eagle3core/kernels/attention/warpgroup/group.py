"""Attention kernel for sm_90a and 64 query rows a key head or more: warpgroups multiply, another warp fetches.

A block owns one (sequence, key head), up to 16 `row_warps` rows and `run` splits, as in `attention_rows`; so it is with
`groups`, sets of units, totals and turns, and the bits are the same. But four warps multiply together (`wgmma`): each
key and value is read from shared memory once for 64 rows, and by the tensor cores themselves. A set lies in a stage of
a ring (`stages`), with two barriers: `full`, which the copied bytes complete, and `empty`, where the multiplying warps
arrive.

Sets lie along streams (`along`) or, in sessions so short that no stream has a second unit, across those of a split
(`across`). A block that walks all splits of its rows may leave their output as well (`whole`); of the others one that
has no keys ends before anything else, but for trees.

Every wait is met: fetching and multiplying warps go through the same sets, a stage is waited for once by each and
arrived at once by each, and turns are passed on whether a stream has units or not.

Source: derived here; warps with roles after FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from typing import Any

from eagle3core.kernels.attention.layout import (
    TILE_EXECUTED,
    TILE_MASK_EMPTY,
    TILE_SPAN_EMPTY,
    TILE_TOTAL,
    Shape,
    make_span,
    make_walk,
)
from eagle3core.kernels.attention.paths import make_paths
from eagle3core.kernels.attention.pieces import make_pinned
from eagle3core.kernels.attention.ring import make_load_tile, make_ring
from eagle3core.kernels.attention.rows import TILE_ROWS
from eagle3core.kernels.attention.tile import make_steps
from eagle3core.kernels.attention.warpgroup.across import has_short_walk, make_is_short, make_short_walk
from eagle3core.kernels.attention.warpgroup.along import make_long_walk
from eagle3core.kernels.attention.warpgroup.shared import group_offsets
from eagle3core.kernels.attention.warpgroup.stages import make_fetch_sets
from eagle3core.kernels.attention.warpgroup.sums import holds_sums, make_split_sums, sums_bytes
from eagle3core.kernels.attention.warpgroup.whole import make_whole_end
from eagle3core.kernels.gemm.stages import make_leave_stage

FETCHING_WARPS = 4  # of a block: a warpgroup, which can give registers to the others; one for each unit of the sets
MULTIPLYING_WARPS = 8  # at most; with those that fetch a processor has 168 registers for each lane
# Of a lane. Fetching takes addresses alone; multiplying 144 for sums, queries, scores and weights. Together they are
# those of the launch, else the wait for more would never end.
_FETCHING_REGISTERS, _MULTIPLYING_REGISTERS = 24, 240
# Named barriers: that of a tree's nodes, those of `group_any` for two warpgroups, and of values past the end, by ring.
_NODES_BARRIER, _ANY_BARRIER, _CLEARED_BARRIER = 1, 2, 4


def make_attention_group(
    isa: Any, *, shape: Shape, row_warps: int, groups: int, units: int, stages: int, joined: bool, counting: bool,
    overlap: bool, words: int = 0, windowed: bool = False, tail: int = 0, short: bool = False, whole: bool = False,
    cluster: int = 1,
) -> Any:  # fmt: skip
    """The kernel; grid (row blocks * blocks of `run` splits, key heads, sequences).

    Args:
        row_warps: warps that multiply what a ring holds, 16 rows each: 4 or 8.
        groups: streams walked side by side, each with a ring: 1 or 2; all warps that multiply are 8 at most.
        units: of a set: 4, or 2 with two groups.
        stages: sets in a ring, at least 2.
        joined, counting, overlap, words, windowed, tail: as in `attention_rows`.
        short: sessions of one unit a stream or fewer have a walk of their own; only where `has_short_walk`.
        whole: a block walks all splits of its rows, and leaves their output as well.
        cluster: blocks that walk the same splits for other rows and fetch for each other, 1 or 2; it divides those of
            all rows. A stage is free when the warps of both have left it, so they go through the sets side by side.
    """
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    first_of, _ = make_walk(isa, shape)
    assert groups * units == FETCHING_WARPS, "a warp fetches each unit of every ring's sets"
    paths, pieces = tail > 0, shape.pieces
    n_warps, wait_all = row_warps * groups, isa.COPY_WAIT[0]
    moves_registers = n_warps == MULTIPLYING_WARPS  # fewer warps have enough
    span = make_span(isa, earlier=words > 0, paths=paths, windowed=windowed)
    load_tile = make_load_tile(isa, shape, held=pieces)
    owns_tail, load_tail, add_paths = make_paths(
        isa, shape, threads=32 * n_warps, held=pieces, tail=tail, tiles=1, windowed=windowed
    )
    follow, _, _ = make_ring(isa, shape, row_warps=units, groups=groups, units=units)
    holds = holds_sums(groups)
    assert not whole or (joined and holds and not paths), "rows of which other blocks have sums too"
    assert not short or (has_short_walk(shape, groups, units) and not paths), "sets across streams reach beyond a split"
    fetch_sets = make_fetch_sets(
        isa, shape, groups=groups, units=units, stages=stages, overlap=overlap, short=short, cluster=cluster
    )
    leave_set = make_leave_stage(isa, cluster)
    steps = make_steps(isa, shape, tiles=1, half=False, held=pieces, units=units, words=words, windowed=windowed)
    split_sums = make_split_sums(isa, shape, groups=groups, joined=joined, whole=whole)
    leave_empty, end_whole = split_sums.leave_empty, make_whole_end(isa, shape)
    walk_long = make_long_walk(
        isa, shape, row_warps=row_warps, groups=groups, units=units, stages=stages, counting=counting, words=words,
        paths=paths, windowed=windowed, steps=steps, split_sums=split_sums, add_paths=add_paths,
        leave_set=leave_set, any_barrier=_ANY_BARRIER, cleared_barrier=_CLEARED_BARRIER,
    )  # fmt: skip
    is_short_session = make_is_short(isa, shape)
    walk_short = make_short_walk(
        isa, shape, row_warps=row_warps, units=units, stages=stages, counting=counting, words=words,
        at_once=joined,  # others spill registers then
        steps=steps, split_sums=split_sums, leave_set=leave_set, named_barrier=_CLEARED_BARRIER,
    )  # fmt: skip
    fewer_registers = isa.fewer_registers(_FETCHING_REGISTERS)
    more_registers = isa.more_registers(_MULTIPLYING_REGISTERS)

    group, splits, streams = shape.group, shape.splits, shape.streams
    set_bytes, step = units * shape.unit_bytes, units * splits * streams
    ring_bytes, own_totals = stages * set_bytes, sums_bytes(shape, groups)
    totals_offset, tail_offset, turns_offset, full_offset, empty_offset = group_offsets(
        shape, row_warps, groups, units, stages, tail
    )
    row_shift, stream_shift, units_shift = (n.bit_length() - 1 for n in (row_warps, streams, units))
    n_queries = 8 * pieces
    pinned = make_pinned(isa)
    uniform = isa.warp_max_i32  # of equal values: tells the assembler that one register serves the whole warp

    def finish(
        executed: Any, mask_empty: Any, b: Any, n_kv: Any, first_stream: Any, stop: Any, last_stream: Any, row0: Any,
        rows: Any, lane: Any, part: Any, own_group: Any, n_units: Any, first_unit: Any, table_width: Any, tokens: Any,
        partial: Any, tops_sums: Any, counters: Any, sinks: Any, out: Any, ordered: Any, x_tiles: Any, scale: Any,
    ) -> None:  # fmt: skip
        """What a warp leaves after its walk: output, or that splits have no keys; its counts. The last it does."""
        if whole:
            # Asked for again: held through the walk, they would cost registers.
            kv_head, here, own_warp = i32(cuda.blockIdx.y), isa.lane_number(), pinned(i32(cuda.threadIdx.x)) >> 5
            at = i32(isa.shared_address(cuda.shared.array(0, f32, alignment=1024)) + totals_offset + here * 16)
            at, own_row = i32(at + own_warp * own_totals), i32((cuda.blockIdx.x * row_warps + own_warp) * TILE_ROWS)
            first_row, n_live = i32(i32(i32(b * n_kv + kv_head) * splits) * rows), i32(stop >> stream_shift)
            end_whole(
                at, own_row, rows, first_row, n_live, kv_head, n_kv, b, tokens, here, partial, sinks, out, ordered,
                x_tiles, scale,
            )  # fmt: skip
        elif holds:
            head = i32(b * n_kv + i32(cuda.blockIdx.y))
            leave_empty(
                i32(max(stop, first_stream) >> stream_shift), i32(last_stream >> stream_shift), row0, rows,
                i32(i32(head * splits) * rows), lane, tops_sums,
            )  # fmt: skip
        if counting and lane == 0 and row0 < rows:
            isa.atomic_add_i32(counters + 4 * TILE_EXECUTED, executed)
            isa.atomic_add_i32(counters + 4 * TILE_MASK_EMPTY, mask_empty)
            if part == 0 and own_group == 0:
                held_units = i32(max(n_units - first_unit, 0))
                isa.atomic_add_i32(counters + 4 * TILE_TOTAL, i32(table_width * 4))
                isa.atomic_add_i32(counters + 4 * TILE_SPAN_EMPTY, i32(table_width * 4 - held_units))
        if cluster > 1:  # the other block has copied here, and arrived at the barriers here, for the last time
            isa.cluster.arrive()
            isa.cluster.wait()

    finish = isa.inlined(finish)

    def attention_group(
        q: Any, k: Any, v: Any, tables: Any, prefix: Any, masks: Any, all_positions: Any, partial: Any, tops_sums: Any,
        counters: Any, tokens: Any, table_width: Any, run: Any, window: Any, scale: Any, k_map: Any, v_map: Any,
        sinks: Any, out: Any, ordered: Any, x_tiles: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), uniform(i32(tid >> 5))
        kv_head, n_kv = uniform(cuda.blockIdx.y), i32(cuda.gridDim.y)
        # The last first: of a prompt's spans that is the one of most keys, and no long block is left over at the end.
        b = uniform(i32(cuda.gridDim.z - 1) - i32(cuda.blockIdx.z))
        rows = i32(tokens * group)
        row_blocks = i32((rows + (TILE_ROWS * row_warps - 1)) >> (4 + row_shift))
        part = uniform(cuda.blockIdx.x // row_blocks)
        ctx = uniform(isa.load_u32(prefix + b * 4))
        end, n_units, first_unit, seen_by_all = span(ctx, tokens, window)
        table = tables + i64(b) * table_width * 4
        first_stream = i32(part * run * streams)
        last_stream = i32(min((part + 1) * run, splits) * streams)
        stop = last_stream
        if holds and first_unit == 0:  # splits past the last unit have no keys
            stop = i32(min(last_stream, i32(n_units + (streams - 1)) & -streams))
        row_warp, own_group = i32(warp & (row_warps - 1)), i32(warp >> row_shift)
        row0 = i32(((cuda.blockIdx.x - part * row_blocks) * row_warps + row_warp) * TILE_ROWS)
        if holds and not (whole or paths or counting) and stop <= first_stream:
            if overlap:
                isa.let_next_start()
                isa.wait_previous()
            if warp < n_warps:
                head = i32(b * n_kv + kv_head)
                leave_empty(
                    i32(first_stream >> stream_shift), i32(last_stream >> stream_shift), row0, rows,
                    i32(i32(head * splits) * rows), lane, tops_sums,
                )  # fmt: skip
            return
        # A kilobyte is eight rows, by whose place there columns are exchanged.
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=1024))
        if tid < groups * stages:
            isa.mbarrier_init(i32(base + full_offset + tid * 8), i32(1))
            isa.mbarrier_init(i32(base + empty_offset + tid * 8), i32(cluster * row_warps * isa.ARRIVING_LANES))
            isa.mbarrier_fence_init()
        if tid < groups * row_warps:
            isa.mbarrier_init(i32(base + turns_offset + tid * 8), i32(isa.ARRIVING_LANES))
        cuda.syncthreads()
        if cluster > 1:  # nobody copies to another block before it has barriers
            isa.cluster.arrive()
            isa.cluster.wait()
        is_short = i32(0)
        if short:
            is_short = is_short_session(first_unit, n_units)
        if overlap:
            isa.let_next_start()

        if warp >= n_warps:
            if moves_registers:
                fewer_registers()
            own_group, part = i32(i32(warp - n_warps) >> units_shift), i32(i32(warp - n_warps) & (units - 1))
            first = i32(first_of(i32(first_stream + own_group), first_unit) - step)
            first = follow(first, last_stream, first_unit, n_units)
            if short and is_short != 0:
                first = i32(-1)
                if first_stream < n_units:
                    first = first_stream
            fetch_sets(
                i32(base + own_group * ring_bytes), i32(base + full_offset + own_group * (8 * stages)),
                i32(base + empty_offset + own_group * (8 * stages)), k_map, v_map, table, first, last_stream, ctx,
                first_unit, n_units, kv_head, n_kv, lane, part, is_short,
            )  # fmt: skip
            # A block that never waited would end before the kernel before, and let the next one start too early.
            if overlap:
                isa.wait_previous()
            if cluster > 1:
                isa.cluster.arrive()
                isa.cluster.wait()
        else:
            if moves_registers:
                more_registers()
            ring = i32(base + own_group * ring_bytes)
            totals = i32(base + totals_offset + row_warp * own_totals)
            turns = i32(base + turns_offset + row_warp * (8 * groups))
            full = i32(base + full_offset + own_group * (8 * stages))
            empty = i32(base + empty_offset + own_group * (8 * stages))
            if overlap:
                isa.wait_previous()
            has_tail = i32(0)
            if paths:
                has_tail = owns_tail(ctx, n_units, first_stream, last_stream)
                if has_tail != 0:
                    mask = masks + i64(i32(b * tokens) * ((tokens + 31) >> 5)) * 4
                    load_tail(i32(base + tail_offset), k, v, table, mask, tokens, ctx, kv_head, n_kv, tid)
            queries, spare = cuda.local.array(n_queries, i32), cuda.local.array(8, i32)
            load_tile(0, q, queries, spare, i32(0), b, kv_head, n_kv, tokens, row0, lane)
            if paths and has_tail != 0:
                wait_all()
                isa.named_barrier(_NODES_BARRIER, 32 * n_warps)  # every warp reads what all have brought
            if short and is_short != 0:
                executed, mask_empty = walk_short(
                    ring, full, empty, totals, first_stream, stop, n_units, queries, scale, masks, all_positions, b,
                    n_kv, row0, rows, tokens, ctx, end, window, seen_by_all, row_warp, own_group, partial, tops_sums,
                )  # fmt: skip
                finish(
                    executed, mask_empty, b, n_kv, first_stream, stop, last_stream, row0, rows, lane, part, own_group,
                    n_units, first_unit, table_width, tokens, partial, tops_sums, counters, sinks, out, ordered,
                    x_tiles, scale,
                )  # fmt: skip
                return  # with a way on to the other walk both kept more in registers than there are
            executed, mask_empty = walk_long(
                ring, full, empty, turns, totals, i32(base + tail_offset), first_stream, last_stream, stop, first_unit,
                n_units, queries, scale, masks, all_positions, b, n_kv, row0, rows, tokens, ctx, end, window,
                seen_by_all, lane, warp, row_warp, own_group, partial, tops_sums,
            )  # fmt: skip
            finish(
                executed, mask_empty, b, n_kv, first_stream, stop, last_stream, row0, rows, lane, part, own_group,
                n_units, first_unit, table_width, tokens, partial, tops_sums, counters, sinks, out, ordered,
                    x_tiles, scale,
            )  # fmt: skip

    return attention_group
