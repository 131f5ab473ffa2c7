"""Sets of units as the tensor cores read them from shared memory, and who brings them there.

A stage holds a set: keys, then values, each as [64 elements of D][unit][key] rows of 128 bytes, whose 16-byte columns
are exchanged by key. That is how a tensor copy lays down 16 rows of the cache, and how a product reads them: 64 k of
keys, or 64 columns of values, are one tile of such rows. So nothing of keys and values passes through the queue of
the load and store units, which exponentials need as well (docs/log.md): four copies a unit, or two, and their bytes
complete the stage's barrier.

A warp each fetches a unit of every set: one warp alone, lane after lane, took nearly as long for a set's sixteen copies
as the others for its products (docs/log.md). Units that do not exist are not copied: their scores, which the product
makes all the same, are of whatever the stage held and nobody reads them.

Source: derived here; matrix descriptors from the PTX ISA, the order of their fields with a transposed operand from
github.com/NVIDIA/cutlass, include/cute/atom/mma_traits_sm90_gmma.hpp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle3core.kernels.attention.layout import BLOCK_SHIFT, UNIT, Shape, make_walk
from eagle3core.kernels.attention.ring import make_ring

TILE_BYTES = UNIT * 128  # of 64 elements of a unit's keys, or values: what a copy brings
_GROUP = 8 * 128  # bytes of 8 rows; products name how far apart things are in sixteenths
_SWIZZLE = 1 << 62  # of 128 bytes


class Products(NamedTuple):
    """What a warpgroup multiplies: 64 rows by a set.

    Attributes:
        score: `(scores, queries, at)`: 8 scores a lane and unit, of the stage at `at`.
        add: `(weights, accumulators, goes_on, at)`: values of a set, of unit u by weights 4u .. 4u + 3; where `goes_on`
            is 0 they begin the sums.
        add_alone: `(weights, accumulators, at)`: values of the unit whose values begin at `at`.
        begin_alone: `(o, weights, accumulators, at)`: the same by weights o .. o + 3, whatever the sums held.
    """

    score: Any
    add: Any
    add_alone: Any
    begin_alone: Any


def half_set_bytes(units: int) -> int:
    """Bytes of 64 elements of all keys, or values, of a set."""
    return units * TILE_BYTES


def make_products(isa: Any, shape: Shape, *, units: int) -> Products:
    """Products of a set, between `group_fence` and `group_commit`."""
    i32, i64 = isa.i32, isa.i64
    n_products, half_set = shape.dim // 16, half_set_bytes(units)
    keys_bytes = shape.dim // 64 * half_set
    first_product = isa.group_mma(shape.dtype, UNIT * units, True)
    further_product = isa.group_mma(shape.dtype, UNIT * units)
    value_product = isa.group_mma(shape.dtype, shape.dim, False, True)
    first_value_product = isa.group_mma(shape.dtype, shape.dim, True, True)
    perhaps_first_values = isa.group_mma(shape.dtype, shape.dim, False, True, True)
    keys_apart = _SWIZZLE | (_GROUP >> 4) << 32  # 8 keys; 16 elements lie within a row
    values_apart = _SWIZZLE | (half_set >> 4) << 16 | (_GROUP >> 4) << 32  # 64 columns, then 8 keys

    def named(at: Any, apart: Any) -> Any:
        return i64((at & 0x3FFFF) >> 4) + apart

    named = isa.inlined(named)

    def score(scores: Any, queries: Any, at: Any) -> None:
        there = named(at, keys_apart)
        first_product(scores, queries[0], queries[1], queries[2], queries[3], there)
        for p in range(n_products - 1):
            # Four products, of 32 bytes each, to a row of 128 bytes.
            o, beside = (p + 1) * 4, ((p + 1) & 3) * 2 + ((p + 1) >> 2) * (half_set >> 4)
            further_product(scores, queries[o], queries[o + 1], queries[o + 2], queries[o + 3], there + beside)

    def add_alone(weights: Any, accumulators: Any, at: Any) -> None:
        value_product(accumulators, weights[0], weights[1], weights[2], weights[3], named(at, values_apart))

    def begin_alone(o: Any, weights: Any, accumulators: Any, at: Any) -> None:
        first_value_product(
            accumulators, weights[o], weights[o + 1], weights[o + 2], weights[o + 3], named(at, values_apart)
        )

    def add(weights: Any, accumulators: Any, goes_on: Any, at: Any) -> None:
        there = named(i32(at + keys_bytes), values_apart)
        perhaps_first_values(accumulators, weights[0], weights[1], weights[2], weights[3], goes_on, there)
        for u in range(units - 1):
            o, beside = 4 * (u + 1), (u + 1) * (TILE_BYTES >> 4)
            value_product(accumulators, weights[o], weights[o + 1], weights[o + 2], weights[o + 3], there + beside)

    return Products(isa.inlined(score), isa.inlined(add), isa.inlined(add_alone), isa.inlined(begin_alone))


def make_await_set(isa: Any) -> Any:
    """`await_set(full, parity)`: until a stage's bytes are there; products may follow."""

    def await_set(full: Any, parity: Any) -> None:
        isa.mbarrier_wait(full, parity)
        isa.group_fence()

    return isa.inlined(await_set)


def make_place_of(isa: Any, stages: int) -> Any:
    """`place_of(turn)`: (stage, parity of its round) of a ring's turns 0 .. 2 `stages` - 1."""
    i32 = isa.i32

    def place_of(turn: Any) -> Any:
        slot, parity = turn, i32(0)
        if turn >= stages:
            slot, parity = i32(turn - stages), i32(1)
        return slot, parity

    return isa.inlined(place_of)


def make_clear_past(isa: Any, shape: Shape, *, units: int, row_warps: int, named_barrier: int) -> Any:
    """`clear_past(at, n_keys, own_lane, own_group)`: zeros for values of a unit from its key `n_keys` on.

    They may be anything in the cache, and 0 * NaN would spoil the sums. All lanes of the `row_warps` warps that
    multiply the ring's sets come here, and meet at barrier `named_barrier` + own_group; `at` is where the values begin.
    """
    i32, half_set, threads = isa.i32, half_set_bytes(units), 32 * row_warps
    n_pieces = shape.dim // 64 * (TILE_BYTES >> 4)  # of 16 bytes, 8 a row: their exchange stays within the row

    def clear_past(at: Any, n_keys: Any, own_lane: Any, own_group: Any) -> None:
        i = i32(own_lane)
        while i < n_pieces:
            half, piece = i32(i >> 7), i32(i & 127)
            if (piece >> 3) >= n_keys:
                isa.shared_store_u32x4(i32(at + half * half_set + piece * 16), i32(0), i32(0), i32(0), i32(0))
            i = i32(i + threads)
        isa.fence_async_shared()  # the tensor cores see what was stored before it
        isa.named_barrier(i32(named_barrier + own_group), threads)

    return isa.inlined(clear_past)


def make_last_of(isa: Any, shape: Shape, *, groups: int) -> Any:
    """`last_of(stream, end, first_unit, n_units)`: the last one that has a unit, of the streams a group walks from
    `stream` up to `end`; below `stream` if none has one."""
    i32 = isa.i32
    first_of, _ = make_walk(isa, shape)

    def last_of(stream: Any, end: Any, first_unit: Any, n_units: Any) -> Any:
        last = i32(stream + ((end - 1 - stream) & -groups))
        while last >= stream and first_of(last, first_unit) >= n_units:
            last = i32(last - groups)
        return last

    return isa.inlined(last_of)


def make_fetch_sets(
    isa: Any, shape: Shape, *, groups: int, units: int, stages: int, overlap: bool, short: bool, cluster: int
) -> Any:  # fmt: skip
    """`fetch_sets(ring, full, empty, k_map, v_map, ...)`: unit `part` of all sets of a group's walk from `unit` on.

    By one warp; others do so with the set's other parts. Barriers `full` and `empty` of the group, 8 bytes a stage. In
    a stage's round part 0 arrives at `full` and says how many bytes come, some of which may be there before; at `empty`
    the warps that multiply arrive. The maps are of the cache's rows, 16 a box.

    Args:
        groups, units, stages, overlap: as in `attention_group`.
        short: sets may lie across streams (`warpgroup.across`), where the last operand says so.
        cluster: blocks that walk the same sets, 1 or 2: the first one's warps bring keys for both, the second's values.
    """
    cuda, i32, halves = isa.cuda, isa.i32, shape.dim // 64
    half_set, set_bytes, unit_bytes = half_set_bytes(units), units * shape.unit_bytes, shape.unit_bytes
    interleave = shape.splits * shape.streams
    interleave_shift, everyone = interleave.bit_length() - 1, i32((1 << cluster) - 1)
    follow, _, _ = make_ring(isa, shape, row_warps=units, groups=groups, units=units)

    def look_up(table: Any, unit: Any, n_units: Any, part: Any, shift: Any) -> Any:
        # The cache block of unit `part` of the set at `unit`; 0 where there is none.
        own, block = i32(unit + (part << shift)), i32(0)
        if unit >= 0 and own < n_units:
            block = isa.load_u32(table + i32(own >> (BLOCK_SHIFT - 4)) * 4)
        return block

    def copy_set(
        at: Any, full: Any, k_map: Any, v_map: Any, unit: Any, block: Any, n_units: Any, kv_head: Any, n_kv: Any,
        part: Any, lane: Any, shift: Any, brings_values: Any,
    ) -> None:  # fmt: skip
        own = i32(unit + (part << shift))
        if lane == 0 and part == 0:
            n_there = i32(min(i32(n_units - unit + ((1 << shift) - 1)) >> shift, units))
            isa.mbarrier_expect(full, i32(n_there * unit_bytes))
        if lane == 0 and own < n_units:
            # Cache rows: [block][key head][64 tokens].
            row = i32(((block * n_kv + kv_head) << BLOCK_SHIFT) + ((own & 3) << 4))
            place = i32(at + part * TILE_BYTES)
            if cluster > 1:
                # Bytes of the other block may come before this one has announced them: a phase ends with its arrivals.
                own_map = k_map
                if brings_values != 0:
                    place, own_map = i32(place + halves * half_set), v_map
                for h in range(halves):
                    isa.cluster.tensor_copy(i32(place + h * half_set), own_map, i32(h * 64), row, full, everyone)
            else:
                for h in range(halves):
                    isa.tensor_copy(i32(place + h * half_set), k_map, i32(h * 64), row, full)
                for h in range(halves):
                    isa.tensor_copy(i32(place + (halves + h) * half_set), v_map, i32(h * 64), row, full)

    look_up, copy_set = isa.inlined(look_up), isa.inlined(copy_set)

    def fetch_sets(
        ring: Any, full: Any, empty: Any, k_map: Any, v_map: Any, table: Any, unit: Any, last_stream: Any, ctx: Any,
        first_unit: Any, n_units: Any, kv_head: Any, n_kv: Any, lane: Any, part: Any, is_short: Any,
    ) -> None:  # fmt: skip
        shift = i32(interleave_shift)
        if short and is_short != 0:
            shift = i32(0)
        if lane == 0:
            isa.tensor_map_acquire(k_map)
            isa.tensor_map_acquire(v_map)
        cuda.syncwarp()
        brings_values = i32(0)
        if cluster > 1:
            brings_values = isa.cluster.rank()
        slot, parity = i32(0), i32(1)  # the first round waits for nobody
        block = look_up(table, unit, n_units, part, shift)
        while unit >= 0:
            # The next set's blocks are asked for before this one's stage is waited for.
            if short and is_short != 0:
                later = i32(unit + units)
                if later >= min(last_stream, n_units):
                    later = i32(-1)
            else:
                later = follow(unit, last_stream, first_unit, n_units)
            later_block = look_up(table, later, n_units, part, shift)
            if overlap and (unit + ((units - 1) << shift)) * UNIT + UNIT > ctx:
                isa.wait_previous()  # keys of this step; older ones were there before
            isa.mbarrier_wait(i32(empty + slot * 8), parity)
            copy_set(
                i32(ring + slot * set_bytes), i32(full + slot * 8), k_map, v_map, unit, block, n_units, kv_head, n_kv,
                part, lane, shift, brings_values,
            )  # fmt: skip
            slot = i32(slot + 1)
            if slot == stages:
                slot, parity = i32(0), i32(parity ^ 1)
            unit, block = later, later_block

    return isa.inlined(fetch_sets)
