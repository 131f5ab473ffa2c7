"""Shared memory of a block of `attention_group`: rings, sums, a tree's nodes, barriers."""

from __future__ import annotations

from typing import NamedTuple

from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.paths import tail_bytes
from eagle3core.kernels.attention.rows import rows_shared_bytes
from eagle3core.kernels.attention.totals import totals_bytes
from eagle3core.kernels.attention.warpgroup.sums import sums_bytes


class Offsets(NamedTuple):
    """Where things begin, bytes from the rings, which come first.

    Attributes:
        totals: sums, those of one row warp after the other's.
        tail: nodes of a tree, as `load_tail` lays them.
        turns: barriers, 8 bytes each: of every row warp one a group.
        full, empty: barriers of stages: of every group one a stage.
    """

    totals: int
    tail: int
    turns: int
    full: int
    empty: int


def group_offsets(shape: Shape, row_warps: int, groups: int, units: int, stages: int, tail: int) -> Offsets:
    """The places of a block's things; arguments as of `attention_group`."""
    totals_at = groups * stages * units * shape.unit_bytes
    tail_at = totals_at + row_warps * sums_bytes(shape, groups)
    turns_at = tail_at + tail_bytes(shape, tail)
    full_at = turns_at + 8 * groups * row_warps
    return Offsets(totals_at, tail_at, turns_at, full_at, full_at + 8 * groups * stages)


def group_shared_bytes(shape: Shape, row_warps: int, groups: int, units: int, stages: int, tail: int = 0) -> int:
    """Dynamic shared memory of a block, bytes: as of `attention_rows`, and two barriers a stage."""
    rows = rows_shared_bytes(shape, row_warps, groups, units, stages, shape.pieces, tail, 1)
    spared = row_warps * (totals_bytes(shape, 1) - sums_bytes(shape, groups))
    return rows - spared + 16 * groups * stages
