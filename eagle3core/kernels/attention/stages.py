"""Sets of units in the order in which the tensor cores read them from shared memory, and who brings them there.

A stage holds a set: the keys of all its units, then their values, in pieces of 8 keys by 16 bytes, 128 bytes each.
Keys [half of 8][8 elements][key][16 bytes], of which a product takes two neighbours, and values [half of 8][8
columns][key][16 bytes], read transposed.

A fetching warp brings the same unit of every set. Keys wait in its registers: those of the next two sets are asked for
before those of this one are handed over. Values
are copied when their stage is free, and arrive at its barrier by themselves. A fence for the tensor cores waits for all
that its thread has under way (docs/log.md), so it stands with those who multiply, after the barrier.

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


def full_arrivals(isa: Any, units: int) -> int:
    """How often fetching warps, one a unit, arrive at a stage's barrier before it is full."""
    return int(units * (32 + isa.ARRIVING_LANES))


def make_fetch_sets(isa: Any, shape: Shape, *, groups: int, units: int, stages: int, overlap: bool) -> Any:
    """`fetch_sets(ring, full, empty, part, k, ...)`: unit `part` of all sets of a group's walk, by one fetching warp.

    Barriers `full` and `empty` of the group, 8 bytes a stage. In a stage's round every lane of the `units` fetching
    warps arrives at `full` when its copies are there, and `ARRIVING_LANES` of each warp for its stores; at `empty` the
    warps that multiply do. `full_arrivals` counts the former.

    Args:
        groups, units, stages, overlap: as in `attention_group`.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    pieces, half_bytes, row_bytes = shape.pieces, shape.half_bytes, 2 * shape.dim
    head_bytes, interleave = row_bytes << BLOCK_SHIFT, shape.splits * shape.streams
    set_bytes, step = units * shape.unit_bytes, units * interleave
    n_held = 8 * pieces  # registers of keys: of 16 keys a lane holds four pieces of 16 bytes or eight
    follow, _, _ = make_ring(isa, shape, row_warps=units, groups=groups, units=units)  # a warp of it copies one unit
    wait_all = isa.COPY_WAIT[0]

    def after(unit: Any, last_stream: Any, first_unit: Any, n_units: Any) -> Any:
        # The set after `unit`'s; none after none.
        if unit >= 0:
            unit = follow(unit, last_stream, first_unit, n_units)
        return unit

    def look_up(table: Any, unit: Any, n_units: Any, part: Any, lane: Any) -> Any:
        # The cache block of the warp's unit of the set at `unit`; 0 where the stream has ended before.
        own, block = i32(unit + part * interleave), i32(0)
        if unit >= 0 and own < n_units:
            # The popcount adds zero; were the address visibly uniform, the entry would be waited for at once.
            block = isa.load_u32(table + i32((own >> 2) + (isa.popcount(lane) >> 6)) * 4)
        return block

    def ask_keys(
        k: Any, unit: Any, block: Any, held: Any, ctx: Any, end: Any, kv_head: Any, n_kv: Any, part: Any, lane: Any
    ) -> None:
        if overlap and (unit + (step - interleave)) * UNIT + UNIT > ctx:
            isa.wait_previous()  # keys of this step; older ones were there before
        first = i32((unit + part * interleave) * UNIT)
        head = i64(i32(block * n_kv + kv_head)) * head_bytes
        for h in range(2):
            key = i32(h * 8 + (lane >> 2))
            source = k + head + i32(((first & 63) + key) * row_bytes + (lane & 3) * 16)
            for j in range(pieces):
                o = (h * pieces + j) * 4
                for w in range(4):
                    held[o + w] = i32(0)  # keys past the end: nobody reads their scores, but a set is scored whole
                if i32(first + key) < end:
                    x = isa.load_u32x4_l2(source + j * 64)
                    for w in range(4):
                        held[o + w] = x[w]

    def put_keys(at: Any, held: Any, part: Any, lane: Any) -> None:
        place = i32(at + part * half_bytes + (lane >> 2) * 16 + (lane & 3) * _PIECE)
        for h in range(2):
            for j in range(pieces):
                o, there = (h * pieces + j) * 4, i32(place + (h * (half_bytes >> 1) + j * 4 * _PIECE))
                isa.shared_store_u32x4(there, held[o], held[o + 1], held[o + 2], held[o + 3])

    def copy_values(
        at: Any, v: Any, unit: Any, block: Any, end: Any, kv_head: Any, n_kv: Any, part: Any, lane: Any
    ) -> None:
        # Eight lanes copy the same column of eight keys: 128 bytes without bank conflicts.
        key, column = i32(lane & 7), i32(lane >> 3)
        first = i32((unit + part * interleave) * UNIT)
        head = i64(i32(block * n_kv + kv_head)) * head_bytes
        for h in range(2):
            size = i32(0)  # values past the end become zeros: 0 * NaN would spoil the sums
            if i32(first + (h * 8 + key)) < end:
                size = i32(16)
            source = v + head + i32(((first & 63) + (h * 8 + key)) * row_bytes + column * 16)
            target = i32(at + (units + part) * half_bytes + h * (half_bytes >> 1) + column * _PIECE + key * 16)
            for j in range(pieces):
                isa.copy16_fill(i32(target + j * (4 * _PIECE)), source + j * 64, size)

    after, look_up, ask_keys = isa.inlined(after), isa.inlined(look_up), isa.inlined(ask_keys)
    put_keys, copy_values = isa.inlined(put_keys), isa.inlined(copy_values)

    def hand_over(
        ring: Any, full: Any, empty: Any, slot: Any, parity: Any, held: Any, v: Any, unit: Any, block: Any, end: Any,
        kv_head: Any, n_kv: Any, part: Any, lane: Any,
    ) -> Any:  # fmt: skip
        at = i32(ring + slot * set_bytes)
        isa.mbarrier_wait(i32(empty + slot * 8), parity)
        copy_values(at, v, unit, block, end, kv_head, n_kv, part, lane)
        isa.copies_arrive(i32(full + slot * 8))
        put_keys(at, held, part, lane)
        cuda.syncwarp()  # then some arrive for the stores of all
        if lane < isa.ARRIVING_LANES:
            isa.mbarrier_arrive(i32(full + slot * 8))
        slot = i32(slot + 1)
        if slot == stages:
            slot, parity = i32(0), i32(parity ^ 1)
        return slot, parity

    hand_over = isa.inlined(hand_over)

    def fetch_sets(
        ring: Any, full: Any, empty: Any, part: Any, k: Any, v: Any, table: Any, unit: Any, last_stream: Any, ctx: Any,
        end: Any, first_unit: Any, n_units: Any, kv_head: Any, n_kv: Any, lane: Any,
    ) -> None:  # fmt: skip
        # Keys of two sets are on their way to registers, each waiting for its turn; of two more the blocks are.
        # Every set of four has variables of its own: to move what a load has not brought yet waits for all loads.
        held, later_held = cuda.local.array(n_held, i32), cuda.local.array(n_held, i32)
        slot, parity = i32(0), i32(1)  # the first round through the ring waits for nobody
        later = after(unit, last_stream, first_unit, n_units)
        third = after(later, last_stream, first_unit, n_units)
        fourth = after(third, last_stream, first_unit, n_units)
        block, later_block = look_up(table, unit, n_units, part, lane), look_up(table, later, n_units, part, lane)
        third_block = look_up(table, third, n_units, part, lane)
        fourth_block = look_up(table, fourth, n_units, part, lane)
        if unit >= 0:
            ask_keys(k, unit, block, held, ctx, end, kv_head, n_kv, part, lane)
        if later >= 0:
            ask_keys(k, later, later_block, later_held, ctx, end, kv_head, n_kv, part, lane)
        while unit >= 0:
            slot, parity = hand_over(
                ring, full, empty, slot, parity, held, v, unit, block, end, kv_head, n_kv, part, lane
            )
            unit, block = third, third_block
            if unit >= 0:
                ask_keys(k, unit, block, held, ctx, end, kv_head, n_kv, part, lane)
            third = after(fourth, last_stream, first_unit, n_units)
            third_block = look_up(table, third, n_units, part, lane)
            if later >= 0:
                slot, parity = hand_over(
                    ring, full, empty, slot, parity, later_held, v, later, later_block, end, kv_head, n_kv, part, lane
                )
                later, later_block = fourth, fourth_block
                if later >= 0:
                    ask_keys(k, later, later_block, later_held, ctx, end, kv_head, n_kv, part, lane)
                fourth = after(third, last_stream, first_unit, n_units)
                fourth_block = look_up(table, fourth, n_units, part, lane)
        # Nobody leaves while its copies are under way.
        isa.copy_commit()
        wait_all()

    return isa.inlined(fetch_sets)
