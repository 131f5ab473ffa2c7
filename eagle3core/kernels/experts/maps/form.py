"""How a launch over experts is cut: the order of its sums, which nothing but k sets, and what is neutral.

Source: derived here; groups of 8 rows in MXFP4 and FP8 as timed on an H200 (reports/reference/h200/experts_cuts.jsonl).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3core.kernels.card import SHARED_BYTES_SM
from eagle3core.kernels.experts.maps.order import FP8, FP8_BLOCKS, UNIT, UNIT_BYTES

STREAMS = 4  # warps of a block, each with a contiguous range of k
THREADS = 32 * STREAMS
_STAGE_BYTES, _RING_BYTES = 3264, 16 << 10  # a warp's, of tiles that few rows share
_BLOCK_SHARED = 1024  # that a resident block takes beside its own
_STEPS = (6, 4, 3, 2, 1)  # units of a step


@dataclass(frozen=True)
class Cut:
    """What is neutral of a launch, before k is known.

    Attributes:
        w_tiles: tiles of 16 rows of a matrix that a block multiplies at once; matrices have an even number.
        resident: blocks that a multiprocessor is to hold, for which registers and shared memory are left.
        step: units multiplied at once; of a k whose pieces it does not divide, the next smaller one that does.
        stage_steps, stages: steps of a ring's stage, and stages; 0: as many as fill what a warp's share of memory is.
        first: stages that gate and up ask for as they begin, 0: all. The others are asked for as these land: what is
            asked for all at once comes all at once, and the first late.
    """

    w_tiles: int
    resident: int
    step: int
    stage_steps: int = 0
    stages: int = 0
    first: int = 0


# By a group's tiles of 8 rows. A lane holds x of two steps, so more rows leave smaller steps.
_BY_ROWS = {1: Cut(1, 3, 6), 2: Cut(1, 3, 4), 4: Cut(1, 3, 2), 8: Cut(2, 2, 1)}
# By format and tiles of rows. Those named were the fastest over 1, 4 and 16 rows of 128 experts. Sums of blocks are a
# second set, for which two tiles of 64 rows leave too few registers.
_CUTS = {(form, rows): cut for form in UNIT_BYTES for rows, cut in _BY_ROWS.items()} | {
    ("mxfp4", 1): Cut(2, 4, 6, 1, 3),
    (FP8, 1): Cut(2, 4, 2, 1, 5),
    (FP8_BLOCKS, 1): Cut(2, 4, 4, 1, 2),
    (FP8_BLOCKS, 8): Cut(1, 2, 1),
}

# In place of these, where it chooses its experts itself.
_OF_ONE_ROW = {"mxfp4": Cut(2, 3, 6, 2, 2, 1), FP8: Cut(2, 4, 4, 1, 2)}


def piece_units(k: int, form: str) -> int:
    """Units of 32 k that streams are cut at, and that lie between two looks at a ring: a function of k and format.

    The most whose longest stream is within a twelfth of a quarter of k; 2880, 90 units, has streams of 3, 4, 4 and 4
    pieces of 6. Where scales are those of blocks, a step may not reach from one block into the next.
    """
    n_units = k // UNIT
    for units in (4, 2) if form == FP8_BLOCKS else (6, 4, 3, 2):
        if n_units % units == 0 and 12 * 4 * units * -(-n_units // (units * STREAMS)) <= 13 * n_units:
            return units
    return 1


# Worth timing against these, by format and tiles of rows.
_SWEPT = {
    ("mxfp4", 1): (
        Cut(2, 3, 6, 2, 2), Cut(2, 3, 6, 2, 2, 1), Cut(2, 3, 6, 1, 4), Cut(2, 3, 6, 1, 5), Cut(2, 4, 6, 1, 3),
        Cut(2, 4, 6, 1, 3, 1), Cut(2, 4, 3, 2, 3), Cut(2, 5, 3, 2, 2), Cut(1, 4, 6, 2, 3), Cut(1, 5, 6, 2, 2),
        Cut(1, 5, 3, 4, 2), Cut(3, 3, 6, 1, 3), Cut(4, 3, 3, 1, 3),
    ),
    ("mxfp4", 2): (Cut(2, 4, 3, 2, 3), Cut(2, 3, 3, 2, 4), Cut(1, 4, 3, 4, 3)),
    ("mxfp4", 4): (Cut(2, 3, 2, 3, 3), Cut(2, 2, 3, 2, 5)),
    (FP8, 1): (
        Cut(2, 5, 2, 1, 4), Cut(2, 4, 2, 1, 5), Cut(2, 4, 4, 1, 2), Cut(2, 3, 4, 1, 4), Cut(2, 5, 4, 1, 2),
        Cut(1, 5, 4, 1, 4), Cut(1, 4, 4, 1, 6), Cut(4, 3, 2, 1, 4), Cut(2, 3, 4, 1, 4, 1), Cut(1, 6, 4, 1, 4),
        Cut(1, 8, 2, 1, 5), Cut(1, 8, 2, 1, 5, 1),
    ),
    (FP8, 2): (Cut(2, 4, 2, 1, 4), Cut(2, 4, 2, 2, 2), Cut(1, 4, 4, 1, 5)),
    (FP8_BLOCKS, 1): (Cut(2, 5, 2, 1, 4), Cut(2, 4, 4, 1, 2), Cut(2, 3, 4, 1, 4), Cut(1, 5, 4, 1, 4)),
    ("plain", 1): (
        Cut(2, 5, 2, 1, 2), Cut(2, 3, 2, 1, 4), Cut(2, 3, 4, 1, 2), Cut(1, 5, 2, 1, 4), Cut(1, 4, 4, 1, 3),
        Cut(1, 3, 4, 1, 3), Cut(1, 3, 4, 1, 4), Cut(2, 3, 4, 1, 2, 1),
    ),
    ("plain", 2): (Cut(2, 4, 2, 1, 2), Cut(2, 3, 2, 1, 3)),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """Order-neutral parameters of one launch; every value gives the same bits.

    Attributes:
        x_tiles, w_tiles: of a block: 8 x_tiles rows of an expert, 16 w_tiles rows of its matrix.
        resident: blocks that a multiprocessor is to hold.
        step: units multiplied at once, whose x a lane holds twice; divides the pieces of k.
        stage_steps, stages, first: steps of a ring's stage, stages, and those asked for at first; see `Cut`.
    """

    x_tiles: int
    w_tiles: int
    resident: int
    step: int
    stage_steps: int
    stages: int
    first: int = 0

    @property
    def rows(self) -> int:
        """Rows of a group: those of one expert that a block takes at once."""
        return 8 * self.x_tiles

    @property
    def buffers(self) -> int:
        """Places for the streams' sums: two, so that a tile's are written while others are still read; one if large."""
        return 2 if self.x_tiles * self.w_tiles <= 2 else 1

    @property
    def name(self) -> str:
        at_first = f"f{self.first}" if self.first else ""
        return (
            f"{self.x_tiles}x{self.w_tiles}_r{self.resident}_u{self.step}x{self.stage_steps}_p{self.stages}{at_first}"
        )

    def stage_bytes(self, form: str) -> int:
        """Of a warp's stage."""
        return self.w_tiles * self.stage_steps * self.step * UNIT_BYTES[form]

    def shared_bytes(self, form: str) -> int:
        """Dynamic shared memory of a block: rings, their barriers, sums, and where these meet."""
        rings = STREAMS * self.stages * (self.stage_bytes(form) + 8)
        return rings + self.buffers * STREAMS * 512 * self.x_tiles * self.w_tiles + (8 if self.buffers > 1 else 0)

    def resident_on(self, arch: str, form: str) -> int:
        """Blocks that a multiprocessor of `arch` has shared memory for, at most `resident`."""
        return max(1, min(self.resident, SHARED_BYTES_SM[arch] // (self.shared_bytes(form) + _BLOCK_SHARED)))

    def shared_bytes_on(self, arch: str, form: str) -> int:
        """What a block asks for: so much that a multiprocessor has room for no block more.

        Blocks of the next launch, which start early, would take that room on some processors and leave others to fewer.
        """
        one_more = SHARED_BYTES_SM[arch] // (self.resident_on(arch, form) + 1)
        return max(self.shared_bytes(form), (one_more - _BLOCK_SHARED) // 16 * 16 + 16)


def x_tiles_for(rows: int, n_chosen: int, n_experts: int) -> int:
    """Tiles of 8 rows that a group has: as many as three times the rows of an expert on average fill."""
    want = min(rows, -(-3 * rows * n_chosen // n_experts))
    return next((tiles for tiles in (1, 2, 4) if 8 * tiles >= want), 8)


def form_for(
    form: str, k: int, x_tiles: int, setting: Mapping[str, Any] | None = None, *, is_lone: bool = False
) -> Form:  # fmt: skip
    """The parameters for a format and groups of 8 `x_tiles` rows; `setting`: fields of a cut in place of its own.

    `is_lone`: of one row alone, which chooses its experts itself.

    The same for both maps of an expert: where two launches divide a processor's memory differently the second one's
    blocks wait until it has none of the first, and what they would ask for early comes late (docs/log.md).
    """
    cut = _OF_ONE_ROW.get(form, _CUTS[form, x_tiles]) if is_lone else _CUTS[form, x_tiles]
    return formed(replace(cut, **(setting or {})), form, k, x_tiles)


def formed(cut: Cut, form: str, k: int, x_tiles: int) -> Form:
    """A cut for this k."""
    piece = piece_units(k, form)
    step = next(units for units in _STEPS if units <= cut.step and piece % units == 0)
    step_bytes = cut.w_tiles * step * UNIT_BYTES[form]
    stage_steps = cut.stage_steps or max(1, _STAGE_BYTES // step_bytes)
    stages = cut.stages or max(3, _RING_BYTES // (stage_steps * step_bytes))
    return Form(x_tiles, cut.w_tiles, cut.resident, step, stage_steps, stages, cut.first)


def swept(arch: str, form: str, x_tiles: int, maps: Sequence[tuple[int, int]]) -> list[Cut]:
    """Cuts worth timing against the default; all give its bits.

    Left out are those whose blocks the shared memory of `arch` does not hold, or whose tiles do not divide a matrix's.

    Args:
        maps: (k, tiles of 16 rows of an expert's matrix) of every map that is launched with them.
    """

    def fits(cut: Cut) -> bool:
        made = [formed(cut, form, k, x_tiles) for k, _ in maps]
        return all(tiles % cut.w_tiles == 0 for _, tiles in maps) and all(
            one.resident_on(arch, form) == cut.resident for one in made
        )

    tried = _SWEPT.get((form, x_tiles), ())
    return [cut for cut in tried if fits(cut)]
