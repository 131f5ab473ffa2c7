"""The end of a split in `attention_streams`: warps lay their sums down, and the block joins them in stream order.

A warp's sums go to a free slot of its ring as [row][D] f32, 16-byte columns exchanged by row; where that is, and the
row's maximum and weight, to a table. Where a block handles all splits of a bundle, each thread keeps its part of the
bundle's sums in shared memory, and the last split of a bundle sends them out in the place of its first.

Source: the order of sums is that of `layout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import FLOOR, Shape
from eagle3core.kernels.attention.totals import make_weigh


def split_shared_bytes(shape: Shape, tiles: int, half: bool, joined: bool) -> int:
    """Shared memory of the table and of a bundle's sums, bytes."""
    rows = 8 if half else 16 * tiles
    return rows * shape.streams * 16 + (rows * (4 * shape.dim + 32) if joined else 0)


def make_split(isa: Any, shape: Shape, *, tiles: int, half: bool, joined: bool, whole: bool = False) -> tuple[Any, Any]:
    """`lay_tile` and `join_tile`, of 16 rows.

    `lay_tile(m, slot, table, warp, lane, accumulators, tops, sums)`
    `join_tile(m, table, tid, rows, first_row, split, partial, tops_sums, scale)`; `first_row` is that of split 0.

    Args:
        half: only eight rows exist, and `accumulators` is [D / 16][4]: D lane / 4, + 8 of rows 2 (lane % 4), + 1.
        joined: the block joins the splits of whole bundles.
        whole: the sums of probabilities are a row's, in each of its lanes, and not the lane's own.
    """
    i32, i64 = isa.i32, isa.i64
    weigh, dim, streams, zero = make_weigh(isa), shape.dim, shape.streams, np.float32(0)
    n_columns, n_tall, threads = dim // 8, dim // 16 if half else 0, 32 * streams
    tile_rows = 8 if half else 16
    items = tile_rows * dim // 4  # four elements of a row each
    rounds, chunk_shift = -(-items // threads), (dim // 4).bit_length() - 1
    all_rows = tile_rows * tiles
    bundle_at = all_rows * streams * 16  # from the table
    tops_at = bundle_at + all_rows * 4 * dim
    last = shape.bundle - 1

    def lay_row(m: Any, far: Any, slot: Any, table: Any, warp: Any, lane: Any, tops: Any, sums: Any) -> None:
        # The row's four lanes, 1 and then 2 apart, in both kernels of attention.
        total = sums[m * 2 + far]
        if not whole:
            total = total + isa.shuffle_xor_f32(total, 1)
            total = total + isa.shuffle_xor_f32(total, 2)
        if (lane & 3) == 0:
            # Rows apart by a constant, which a store takes along: one register holds the place of all through the walk.
            entry = i32(i32(table + ((lane >> 2) * streams + warp) * 16) + (m * 16 + far * 8) * streams * 16)
            isa.shared_store_f32x4(entry, tops[m * 2 + far], total, isa.f32_of_bits(slot), zero)

    def lay_values(m: Any, far: Any, slot: Any, lane: Any, accumulators: Any) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        at = i32(slot + (far * 8 + g) * (4 * dim) + (t & 1) * 8)
        for n in range(n_columns):
            o = (m * n_columns + n) * 4 + far * 2
            # Rows are a multiple of 32 words, so columns are exchanged by row: half a warp's 8-byte stores meet in no
            # bank.
            column = i32((2 * n + (t >> 1)) ^ (2 * (g & 3)))
            isa.shared_store_f32x2(i32(at + column * 16), accumulators[o], accumulators[o + 1])

    def lay_tall(slot: Any, lane: Any, accumulators: Any) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        at = i32(slot + t * (8 * dim) + (g & 3) * 4)
        for n in range(2 * n_tall):
            even = i32((2 * n + (g >> 2)) ^ (4 * (t & 1)))
            isa.shared_store_f32(i32(at + even * 16), accumulators[2 * n])
            isa.shared_store_f32(i32(at + 4 * dim + (even ^ 2) * 16), accumulators[2 * n + 1])

    def lay_values_of_fp8(m: Any, far: Any, slot: Any, lane: Any, accumulators: Any) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        at = i32(slot + (far * 8 + g) * (4 * dim))
        for n in range(n_columns // 2):
            # Four neighbouring columns a lane, see `unit.weighed`; exchanged by row as those above.
            o, column = (m * n_columns + 2 * n) * 4 + far * 2, i32((4 * n + t) ^ (2 * (g & 3)))
            isa.shared_store_f32x4(
                i32(at + column * 16), accumulators[o], accumulators[o + 1], accumulators[o + 4], accumulators[o + 5]
            )

    def lay_tall_of_fp8(slot: Any, lane: Any, accumulators: Any) -> None:
        g, t = i32(lane >> 2), i32(lane & 3)
        at = i32(slot + t * (8 * dim) + (g & 1) * 8)
        for n in range(n_tall):
            even = i32((4 * n + (g >> 1)) ^ (4 * (t & 1)))
            isa.shared_store_f32x2(i32(at + even * 16), accumulators[4 * n], accumulators[4 * n + 2])
            odd = i32(at + 4 * dim + (even ^ 2) * 16)
            isa.shared_store_f32x2(odd, accumulators[4 * n + 1], accumulators[4 * n + 3])

    if shape.is_fp8:
        lay_values, lay_tall = lay_values_of_fp8, lay_tall_of_fp8
    lay_row, lay_values, lay_tall = isa.inlined(lay_row), isa.inlined(lay_values), isa.inlined(lay_tall)

    def lay_tile(m: Any, slot: Any, table: Any, warp: Any, lane: Any, accumulators: Any, tops: Any, sums: Any) -> None:
        lay_row(m, 0, slot, table, warp, lane, tops, sums)
        if half:
            lay_tall(slot, lane, accumulators)
        else:
            lay_row(m, 1, slot, table, warp, lane, tops, sums)
            lay_values(m, 0, slot, lane, accumulators)
            lay_values(m, 1, slot, lane, accumulators)

    def join_bundle(row: Any, at: Any, place: Any, table: Any, top: Any, total: Any, o: Any, scale: Any) -> Any:
        """What the thread has of the bundle's sums so far, and this split's."""
        held_top, held, b = FLOOR, zero, (zero, zero, zero, zero)
        if place > 0:
            before = isa.shared_load_f32x4(i32(table + tops_at + (((place - 1) & 1) * all_rows + row) * 16))
            held_top, held = before[0], before[1]
        high, keep, take = weigh(held_top, top, scale)
        if held != zero:
            b = isa.shared_load_f32x4(at)  # else what lies there may never have been written
        o0, o1 = isa.fused(b[0], keep, isa.product(o[0], take)), isa.fused(b[1], keep, isa.product(o[1], take))
        o2, o3 = isa.fused(b[2], keep, isa.product(o[2], take)), isa.fused(b[3], keep, isa.product(o[3], take))
        return high, isa.fused(held, keep, isa.product(total, take)), o0, o1, o2, o3

    join_bundle = isa.inlined(join_bundle)

    def join_tile(
        m: Any, table: Any, tid: Any, rows: Any, first_row: Any, split: Any, partial: Any, tops_sums: Any, scale: Any
    ) -> None:
        for r in range(rounds):
            item = i32(tid + r * threads)
            tile_row, chunk = i32(item >> chunk_shift), i32(item & (dim // 4 - 1))
            row, place = i32(m * 16 + tile_row), i32(split & last)
            if item < items and row < rows:
                at = i32(tile_row * (4 * dim) + ((chunk ^ (2 * (tile_row & 3))) << 4))
                entry = i32(table + row * (streams * 16))
                top, total, o0, o1, o2, o3 = FLOOR, zero, zero, zero, zero, zero
                # Streams upwards, each joined to those before: the words of `totals.join`, to the same bits.
                for w in range(streams):
                    e = isa.shared_load_f32x4(i32(entry + w * 16))
                    a = isa.shared_load_f32x4(i32(isa.bits_of_f32(e[2]) + at))
                    top, keep, take = weigh(top, e[0], scale)
                    total = isa.fused(total, keep, isa.product(e[1], take))
                    o0 = isa.fused(o0, keep, isa.product(a[0], take))
                    o1 = isa.fused(o1, keep, isa.product(a[1], take))
                    o2 = isa.fused(o2, keep, isa.product(a[2], take))
                    o3 = isa.fused(o3, keep, isa.product(a[3], take))
                leaves, target = i32(1), first_row + i64(split) * rows + row
                if joined:
                    kept_at = i32(table + bundle_at + row * (4 * dim) + chunk * 16)
                    top, total, o0, o1, o2, o3 = join_bundle(
                        row, kept_at, place, table, top, total, (o0, o1, o2, o3), scale
                    )
                    # The bundle's last split sends its sums out, in the place of its first.
                    target = first_row + i64(split - last) * rows + row
                    if place < last:
                        leaves = i32(0)
                        isa.shared_store_f32x4(kept_at, o0, o1, o2, o3)
                        if chunk == 0:
                            own = i32(table + tops_at + ((place & 1) * all_rows + row) * 16)
                            isa.shared_store_f32x4(own, top, total, zero, zero)
                if leaves != 0:
                    isa.store_f32x4(partial + target * (4 * dim) + chunk * 16, o0, o1, o2, o3)
                    if chunk == 0:
                        isa.store_f32x2(tops_sums + target * 8, top, total)

    return isa.inlined(lay_tile), isa.inlined(join_tile)
