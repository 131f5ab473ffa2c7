"""How a launch over experts is cut: the order of its sums, which nothing but k sets, and what is neutral.

Source: derived here; not tuned on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3core.kernels.experts.maps.order import FP8_BLOCKS, UNIT, UNIT_BYTES

STREAMS = 4  # warps of a block, each with a contiguous range of k
_STAGE_BYTES, _RING_BYTES = 3264, 16 << 10  # a warp's, of tiles that few rows share


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


@dataclass(frozen=True)
class Form:
    """Order-neutral parameters of one launch; every value gives the same bits.

    Attributes:
        x_tiles, w_tiles: of a block: 8 x_tiles rows of an expert, 16 w_tiles rows of its matrix.
        step: units multiplied at once, whose x a lane holds twice; divides the pieces of k.
        stage_steps, stages: steps of a ring's stage, and stages.
    """

    x_tiles: int
    w_tiles: int
    step: int
    stage_steps: int
    stages: int

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
        return f"{self.x_tiles}x{self.w_tiles}_u{self.step}x{self.stage_steps}_p{self.stages}"

    def stage_bytes(self, form: str) -> int:
        """Of a warp's stage."""
        return self.w_tiles * self.stage_steps * self.step * UNIT_BYTES[form]

    def shared_bytes(self, form: str) -> int:
        """Dynamic shared memory of a block: rings, their barriers, sums."""
        rings = STREAMS * self.stages * (self.stage_bytes(form) + 8)
        return rings + self.buffers * STREAMS * 512 * self.x_tiles * self.w_tiles


def x_tiles_for(rows: int, n_chosen: int, n_experts: int) -> int:
    """Tiles of 8 rows that a group has: as many as three times the rows of an expert on average fill."""
    want = min(rows, -(-3 * rows * n_chosen // n_experts))
    return next((tiles for tiles in (1, 2, 4) if 8 * tiles >= want), 8)


def form_for(form: str, k: int, x_tiles: int) -> Form:
    """The parameters for a format and groups of 8 `x_tiles` rows."""
    # Sums of blocks are a second set, for which two tiles of a matrix would leave too few registers.
    piece, w_tiles = piece_units(k, form), 2 if x_tiles == 8 and form != FP8_BLOCKS else 1
    step = next(units for units in (6, 4, 3, 2, 1) if piece % units == 0 and (units * x_tiles <= 8 or units == 1))
    step_bytes = w_tiles * step * UNIT_BYTES[form]
    stage_steps = max(1, _STAGE_BYTES // step_bytes)
    return Form(x_tiles, w_tiles, step, stage_steps, max(3, _RING_BYTES // (stage_steps * step_bytes)))
