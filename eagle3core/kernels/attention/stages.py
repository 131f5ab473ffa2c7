"""Sets of units in the order in which the tensor cores read them from shared memory, and who brings them there.

A stage holds a set: the keys of all its units, then their values, in pieces of 8 keys by 16 bytes, 128 bytes each.
Keys [half of 8][product][k half of a product][key][16 bytes], where product c of a piece of 32 elements takes elements
8t + 4c .. + 3 of every lane t of the other kernels, in their order: equal bits. Values [half of 8][8 columns][key][16
bytes], read transposed.

A fetching warp brings the same units of every set. Keys wait in its registers, since no copy could put them in that
order: those of the next set are asked for before those of this one are handed over. A fence before others may multiply
waits for copies under way (docs/log.md), so values are asked for when their stage is free, and waited for.

Source: derived here; matrix descriptors from the PTX ISA, the order of their fields with a transposed operand from
github.com/NVIDIA/cutlass, include/cute/atom/mma_traits_sm90_gmma.hpp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle3core.kernels.attention.layout import BLOCK_SHIFT, UNIT, Shape
from eagle3core.kernels.attention.ring import make_ring

_PIECE = 128  # bytes of 8 x 16; a product reads pieces, and names how far apart they are in sixteenths


class Products(NamedTuple):
    """What a warpgroup multiplies: 64 rows by a set.

    Attributes:
        score: `(scores, queries, at)`: 8 scores a lane and unit, of the stage at `at`.
        add: `(u, weights, accumulators, at)`: values of unit u by weights 4u .. 4u + 3.
        add_alone: `(weights, accumulators, at)`: values of the unit whose values lie at `at`.
    """

    score: Any
    add: Any
    add_alone: Any


def make_products(isa: Any, shape: Shape, *, units: int) -> Products:
    """Products of a set, between `group_fence` and `group_commit`."""
    i32, i64 = isa.i32, isa.i64
    n_products, half_of_8 = shape.dim // 16, 16 * shape.dim  # bytes of 8 keys, or of their values
    first_product = isa.group_mma(shape.dtype, UNIT * units, True)
    further_product = isa.group_mma(shape.dtype, UNIT * units)
    value_product = isa.group_mma(shape.dtype, shape.dim, False, True)
    keys_apart = (_PIECE >> 4) << 16 | (half_of_8 >> 4) << 32  # a k half, then 8 keys
    values_apart = (half_of_8 >> 4) << 16 | (_PIECE >> 4) << 32  # 8 keys, then 8 columns

    def named(at: Any, apart: Any) -> Any:
        return i64((at & 0x3FFFF) >> 4) + apart

    named = isa.inlined(named)

    def score(scores: Any, queries: Any, at: Any) -> None:
        there = named(at, keys_apart)
        first_product(scores, queries[0], queries[1], queries[2], queries[3], there)
        for p in range(n_products - 1):
            o = (p + 1) * 4
            further_product(
                scores, queries[o], queries[o + 1], queries[o + 2], queries[o + 3], there + (p + 1) * (2 * _PIECE >> 4)
            )

    def add_alone(weights: Any, accumulators: Any, at: Any) -> None:
        value_product(accumulators, weights[0], weights[1], weights[2], weights[3], named(at, values_apart))

    def add(u: Any, weights: Any, accumulators: Any, at: Any) -> None:
        there = named(i32(at + (units + u) * (2 * half_of_8)), values_apart)
        o = u * 4
        value_product(accumulators, weights[o], weights[o + 1], weights[o + 2], weights[o + 3], there)

    return Products(isa.inlined(score), isa.inlined(add), isa.inlined(add_alone))


def make_fetch_sets(
    isa: Any, shape: Shape, *, groups: int, units: int, stages: int, fetchers: int, overlap: bool
) -> Any:
    """`fetch_sets(ring, full, empty, part, own_group, ...)`: one fetching warp's units of all sets of its group's walk.

    Barriers `full` and `empty` of the group, 8 bytes a stage: a stage is full when all fetching warps have arrived, and
    empty when the multiplying ones have.

    Args:
        fetchers: warps that fetch for a group, each `units / fetchers` units of a set.
        groups, units, stages, overlap: as in `attention_group`.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    pieces, half_bytes, row_bytes = shape.pieces, shape.half_bytes, 2 * shape.dim
    head_bytes, interleave = row_bytes << BLOCK_SHIFT, shape.splits * shape.streams
    set_bytes, step, own = units * shape.unit_bytes, units * interleave, units // fetchers
    n_held = own * 8 * pieces  # registers of keys: of 16 keys a lane holds four pieces of 16 bytes or eight
    follow, _, _ = make_ring(isa, shape, row_warps=units, groups=groups, units=units)  # a warp of it copies one unit
    wait_all = isa.COPY_WAIT[0]

    def look_up(table: Any, unit: Any, n_units: Any, part: Any, lane: Any, blocks: Any) -> None:
        """Cache blocks of the warp's units of the set at `unit`; 0 where the stream has ended before."""
        for u in range(own):
            mine = i32(unit + (part * own + u) * interleave)
            blocks[u] = i32(0)
            if unit >= 0 and mine < n_units:
                # The popcount adds zero; were the address visibly uniform, the entry would be waited for at once.
                blocks[u] = isa.load_u32(table + i32((mine >> 2) + (isa.popcount(lane) >> 6)) * 4)

    def ask_keys(
        k: Any, unit: Any, blocks: Any, held: Any, end: Any, kv_head: Any, n_kv: Any, part: Any, lane: Any
    ) -> None:
        for u in range(own):
            first = i32((unit + (part * own + u) * interleave) * UNIT)
            head = i64(i32(blocks[u] * n_kv + kv_head)) * head_bytes
            for h in range(2):
                key = i32(h * 8 + (lane >> 2))
                source = k + head + i32(((first & 63) + key) * row_bytes + (lane & 3) * 16)
                for j in range(pieces):
                    o = ((u * 2 + h) * pieces + j) * 4
                    for w in range(4):
                        held[o + w] = i32(0)  # keys past the end: nobody reads their scores, but a set is scored whole
                    if i32(first + key) < end:
                        x = isa.load_u32x4_l2(source + j * 64)
                        for w in range(4):
                            held[o + w] = x[w]

    def put_keys(at: Any, held: Any, part: Any, lane: Any) -> None:
        place = i32(at + (lane >> 2) * 16 + (lane & 3) * 4)
        for u in range(own):
            for h in range(2):
                start = i32(place + (part * own + u) * half_bytes + h * (half_bytes >> 1))
                for j in range(pieces):
                    # Two products, two k halves each; a lane's four words go to the same place of each piece.
                    for w in range(4):
                        value = held[((u * 2 + h) * pieces + j) * 4 + w]
                        isa.shared_store_u32(i32(start + (j * 4 + w) * _PIECE), value)

    def copy_values(
        at: Any, v: Any, unit: Any, blocks: Any, end: Any, kv_head: Any, n_kv: Any, part: Any, lane: Any
    ) -> None:
        # Eight lanes copy the same column of eight keys: 128 bytes without bank conflicts.
        key, column = i32(lane & 7), i32(lane >> 3)
        for u in range(own):
            first = i32((unit + (part * own + u) * interleave) * UNIT)
            head = i64(i32(blocks[u] * n_kv + kv_head)) * head_bytes
            for h in range(2):
                size = i32(0)  # values past the end become zeros: 0 * NaN would spoil the sums
                if i32(first + (h * 8 + key)) < end:
                    size = i32(16)
                source = v + head + i32(((first & 63) + (h * 8 + key)) * row_bytes + column * 16)
                target = i32(at + (units + part * own + u) * half_bytes + h * (half_bytes >> 1))
                target = i32(target + column * _PIECE + key * 16)
                for j in range(pieces):
                    isa.copy16_fill(i32(target + j * (4 * _PIECE)), source + j * 64, size)

    def prefetch(k: Any, v: Any, unit: Any, blocks: Any, n_units: Any, kv_head: Any, n_kv: Any, part: Any) -> None:
        for u in range(own):
            mine = i32(unit + (part * own + u) * interleave)
            if unit >= 0 and mine < n_units:
                start = i64(i32(blocks[u] * n_kv + kv_head)) * head_bytes + i32((i32(mine * UNIT) & 63) * row_bytes)
                isa.bulk_prefetch(k + start, i32(half_bytes))
                isa.bulk_prefetch(v + start, i32(half_bytes))

    prefetch = isa.inlined(prefetch)
    look_up, ask_keys = isa.inlined(look_up), isa.inlined(ask_keys)
    put_keys, copy_values = isa.inlined(put_keys), isa.inlined(copy_values)

    def await_keys(unit: Any, ctx: Any) -> None:
        if overlap and (unit + (step - interleave)) * UNIT + UNIT > ctx:
            isa.wait_previous()  # keys of this step; older ones were there before

    await_keys = isa.inlined(await_keys)

    def fetch_sets(
        ring: Any, full: Any, empty: Any, part: Any, k: Any, v: Any, table: Any, unit: Any, last_stream: Any, ctx: Any,
        end: Any, first_unit: Any, n_units: Any, kv_head: Any, n_kv: Any, lane: Any,
    ) -> None:  # fmt: skip
        held = cuda.local.array(n_held, i32)
        # Of this set, the next one, whose keys are asked for, and the one after, which the L2 cache is told of.
        blocks, later_blocks, last_blocks = (
            cuda.local.array(own, i32), cuda.local.array(own, i32), cuda.local.array(own, i32),
        )  # fmt: skip
        later, last, slot, parity = (
            i32(-1),
            i32(-1),
            i32(0),
            i32(1),
        )  # the first round through the ring waits for nobody
        look_up(table, unit, n_units, part, lane, blocks)
        if unit >= 0:
            later = follow(unit, last_stream, first_unit, n_units)
            look_up(table, later, n_units, part, lane, later_blocks)
            await_keys(unit, ctx)
            ask_keys(k, unit, blocks, held, end, kv_head, n_kv, part, lane)
        if later >= 0:
            last = follow(later, last_stream, first_unit, n_units)
        look_up(table, last, n_units, part, lane, last_blocks)
        while unit >= 0:
            if lane == 0:
                prefetch(k, v, last, last_blocks, n_units, kv_head, n_kv, part)
            at = i32(ring + slot * set_bytes)
            isa.mbarrier_wait(i32(empty + slot * 8), parity)
            copy_values(at, v, unit, blocks, end, kv_head, n_kv, part, lane)
            isa.copy_commit()
            put_keys(at, held, part, lane)
            unit, later = later, last
            for u in range(own):
                blocks[u], later_blocks[u] = later_blocks[u], last_blocks[u]
            if unit >= 0:
                await_keys(unit, ctx)
                ask_keys(k, unit, blocks, held, end, kv_head, n_kv, part, lane)
            if later >= 0:
                last = follow(later, last_stream, first_unit, n_units)
            look_up(table, last, n_units, part, lane, last_blocks)
            wait_all()
            # Every lane's own stores and copies, for the tensor cores; then one arrives for all.
            isa.fence_async_shared()
            cuda.syncwarp()
            if lane < isa.ARRIVING_LANES:
                isa.mbarrier_arrive(i32(full + slot * 8))
            slot = i32(slot + 1)
            if slot == stages:
                slot, parity = i32(0), i32(parity ^ 1)

    return isa.inlined(fetch_sets)
