"""What a block of `gemm_group` takes: threads, registers and shared memory.

Source: derived here; the hand-over of registers from the PTX ISA, setmaxnreg.
"""

from __future__ import annotations

from eagle3core.kernels.gemm.ring import FRAGMENT
from eagle3core.kernels.gemm.stages import FETCHING_WARPS
from eagle3core.kernels.gemm.sums import sums_bytes

_WARPGROUP = 4  # warps, which give up or take registers together
_POOL = 65536 // 32  # registers of a processor, for each lane of a warp
FETCHING_REGISTERS = 48  # of a lane that fetches, where registers are handed over: with fewer it spills


def group_threads(w_tiles: int, held: bool) -> int:
    """Threads of a block: a multiplying warp a tile of W, and those that fetch."""
    return 32 * (w_tiles + (_WARPGROUP if held else FETCHING_WARPS))


def group_registers(w_tiles: int) -> int:
    """Registers that a multiplying lane can have where those that fetch give theirs up: a multiple of 8."""
    return min(240, (_POOL - _WARPGROUP * FETCHING_REGISTERS) // w_tiles // 8 * 8)


def group_holds_totals(x_tiles: int, w_tiles: int, units: int, split: int) -> bool:
    """Whether `held` is possible: sums, totals, W of a stage and the rest fit the registers of a multiplying lane."""
    return split == 1 and 8 * x_tiles + 8 * units + 16 <= group_registers(w_tiles)


def group_totals_in_shared(x_tiles: int, w_tiles: int, split: int, blocks: bool = False, held: bool = False) -> bool:
    """Whether the totals over streams leave the registers: 16 sums, as many totals and the rest fit a thread.

    `blocks`: there the sums of a block and those of its stream are two. `held`: see `make_gemm_group`.
    """
    return split == 1 and (x_tiles > 4 or blocks) and not held


def group_shared_bytes(
    x_tiles: int, w_tiles: int, units: int, stages: int, split: int, *,
    fp8: bool = False, blocks: bool = False, held: bool = False,
) -> int:  # fmt: skip
    """Dynamic shared memory of a block, bytes: ring and totals, reused for sums; row scales; a flag; barriers."""
    ring = stages * units * ((1 if fp8 else 2) * w_tiles + x_tiles) * FRAGMENT
    totals = 512 * x_tiles * w_tiles if group_totals_in_shared(x_tiles, w_tiles, split, blocks, held) else 0
    return max(ring + totals, sums_bytes(x_tiles, w_tiles) if split == 1 else 0) + 32 * x_tiles + 16 + 16 * stages
