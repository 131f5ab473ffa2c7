"""The sums of a split in `attention_group`, which its streams join when they end: where they lie until they leave.

A warpgroup that walks all streams of a split holds them in registers (`held`). Groups that walk streams side by side
hand them on in shared memory, as in `attention_rows` (`attention.totals`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.totals import make_totals, totals_bytes
from eagle3core.kernels.attention.warpgroup.held import bundle_bytes, make_held_join, make_held_leave
from eagle3core.kernels.attention.warpgroup.whole import make_whole_leave


class SplitSums(NamedTuple):
    """Sums of one warp's 16 rows, wherever they lie; `at` is the lane's own address, `held` the registers.

    Attributes:
        begin: `(at)`: no stream has joined yet; of sums in shared memory alone.
        join: `(at, is_first, accumulators, tops, sums, held, total_tops, total_sums, scale)`: a stream joins those of
            its split that came before.
        leave: `(at, split, is_last, row0, rows, first_row, lane, accumulators, held, total_tops, total_sums, partial,
            tops_sums, scale)`: the split's sums go out, or join those of its bundle; see `make_totals`,
            `make_held_leave` and `make_whole_leave`.
        leave_empty: see `make_held_leave`; of sums in registers alone.
    """

    begin: Any
    join: Any
    leave: Any
    leave_empty: Any


def holds_sums(groups: int) -> bool:
    """Whether the sums of a split lie in registers."""
    return groups == 1


def sums_bytes(shape: Shape, groups: int) -> int:
    """Shared memory of one warp's sums: of a split, which streams walked side by side hand on, or of a bundle."""
    return bundle_bytes(shape) if holds_sums(groups) else totals_bytes(shape, 1)


def make_split_sums(isa: Any, shape: Shape, *, groups: int, joined: bool, whole: bool) -> SplitSums:
    """The sums of a split; `groups`, `joined` and `whole` as in `attention_group`."""
    holds = holds_sums(groups)
    begin, join_shared, leave_shared = make_totals(isa, shape, joined=joined, tiles=1)
    join_held = make_held_join(isa, shape)
    leave_held, leave_empty = make_held_leave(isa, shape, joined=joined)
    if whole:
        leave_held = make_whole_leave(isa, shape)

    def join(
        at: Any, is_first: Any, accumulators: Any, tops: Any, sums: Any, held: Any, total_tops: Any, total_sums: Any,
        scale: Any,
    ) -> None:  # fmt: skip
        if holds:
            join_held(is_first, accumulators, tops, sums, held, total_tops, total_sums, scale)
        else:
            join_shared(at, is_first, accumulators, tops, sums, total_tops, total_sums, scale)

    def leave(
        at: Any, split: Any, is_last: Any, row0: Any, rows: Any, first_row: Any, lane: Any, accumulators: Any,
        held: Any, total_tops: Any, total_sums: Any, partial: Any, tops_sums: Any, scale: Any,
    ) -> None:  # fmt: skip
        if holds:
            leave_held(
                at, split, is_last, row0, rows, first_row, lane, held, total_tops, total_sums, partial, tops_sums, scale
            )
        else:
            leave_shared(
                at, split, row0, rows, first_row, lane, accumulators, total_tops, total_sums, partial, tops_sums, scale
            )

    return SplitSums(begin, isa.inlined(join), isa.inlined(leave), leave_empty)
