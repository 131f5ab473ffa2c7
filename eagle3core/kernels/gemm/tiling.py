"""Which tiling a linear map gets: sizes of blocks, depths of rings, and who shares K. None of it changes a bit.

Source: measured on an H200, docs/log.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from eagle3core.errors import KernelLimit
from eagle3core.kernels import tuned
from eagle3core.kernels.card import SHARED_BYTES, SHARED_BYTES_SM
from eagle3core.kernels.gemm.group import FETCHING, group_shared_bytes
from eagle3core.kernels.gemm.held import held_shared_bytes, held_threads
from eagle3core.kernels.gemm.products import STREAMS, UNIT
from eagle3core.kernels.gemm.ring.shared import ring_shared_bytes, stay_shared_bytes
from eagle3core.kernels.gemm.tile import tile_shared_bytes

MULTIPROCESSORS = 132  # of the GPU the tilings were chosen on
# Wide blocks by (tiles of W, most tiles of x): products a second of each over those of the best, on an H200, of which
# each processor has one (reports/reference/h200/sweep_gemm.jsonl, 512 rows).
_WIDE = {(8, 32): 0.97, (12, 16): 1.0, (8, 16): 0.85}
# Tiles of x above which a lane of two warpgroups has no registers for W of two units: the assembler spilled, and made
# products one after the other.
_ONE_UNIT_ABOVE = 31
_MEETING = 2000 * 4096  # what blocks that share K pay for it: as many products a unit of k, times k


@dataclass(frozen=True)
class Tiling:
    """Order-neutral parameters of one GEMM launch; every value gives the same bits.

    Attributes:
        kernel: `ring` (warps divide K), `bulk` (the same, W packed and by bulk copies, which compute capability 8 does
            not have, and `x_tiles` 1 or 2), `tile` (warps divide the block) or `group` (warpgroups do; sm_90a only).
        x_tiles, w_tiles: rows of a block: 8 x_tiles of x, 16 w_tiles of W.
        units, stages: units of 32 k of a stage, and stages of the ring.
        warps_x, warps_w: of `tile`; see `make_gemm_tile`. warps_w: of `ring`, warps of a stream, which share x.
        split: of `tile` and `group`. together: of a split `group`; see `sums.make_hand_over`.
        cluster: of `group`, blocks of x that share tiles of W; see `make_gemm_group`.
        held: of `group`, totals in registers; see `make_gemm_held`. resident: there, and of `bulk` (`make_gemm_stay`),
            blocks of the grid at most, each of which takes several; 0: one each.
        paced: of `bulk`, cycles between requests for W as a block begins, by a warp more; 0: all at once.
    """

    kernel: Literal["ring", "bulk", "tile", "group"]
    x_tiles: int
    w_tiles: int
    units: int
    stages: int
    warps_x: int = 1
    warps_w: int = 1
    split: int = 1
    together: bool = False
    cluster: int = 1
    held: bool = False
    resident: int = 0
    paced: int = 0

    @property
    def stays(self) -> bool:
        """Whether its blocks are `make_gemm_stay`'s, for up to 16 rows."""
        return self.kernel == "bulk" and self.resident > 0

    @property
    def threads(self) -> int:
        if self.held:
            return held_threads(self.w_tiles)
        warps = {
            "ring": STREAMS * self.warps_w, "bulk": STREAMS, "tile": self.warps_x * self.warps_w, "group": self.w_tiles
        }  # fmt: skip
        return 32 * (warps[self.kernel] + (self.paced > 0)) + (FETCHING if self.kernel == "group" else 0)

    @property
    def shared_bytes(self) -> int:
        sizes = self.x_tiles, self.w_tiles, self.units, self.stages
        if self.stays:
            return stay_shared_bytes(*sizes)
        if self.kernel in ("ring", "bulk"):
            return ring_shared_bytes(*sizes, bulk=self.kernel == "bulk", paced=self.paced > 0)
        if self.held:
            return held_shared_bytes(*sizes)
        if self.kernel == "group":
            return group_shared_bytes(*sizes, self.split)
        return tile_shared_bytes(*sizes, self.warps_x * self.warps_w, self.split)

    @property
    def name(self) -> str:
        more = {
            "ring": f"_x{self.warps_w}" if self.warps_w > 1 else "",
            "bulk": f"_w{self.paced}" if self.paced else "",
            "tile": f"_{self.warps_x}x{self.warps_w}_s{self.split}",
            "group": f"_{'t' if self.together else 's'}{self.split}"
            + (f"_c{self.cluster}" if self.cluster > 1 else ""),
        }
        kernel = "held" if self.held else "stay" if self.stays else self.kernel  # of any grid
        return f"{kernel}_{self.x_tiles}x{self.w_tiles}_u{self.units}_p{self.stages}{more[self.kernel]}"


def choose_tiling(arch: str, rows: int, n_tiles: int, k: int, packed: bool = True, dtype: str = "bf16") -> Tiling:
    """The tiling for `rows` rows of x and `n_tiles` tiles of 16 weight rows: the tuned one, else the rule's."""
    setting = tuned.find(arch, "gemm", tuned.GemmKey(dtype, tuned.rows_regime(rows), 16 * n_tiles, k, packed))
    return Tiling(**setting) if setting else ruled_tiling(arch, rows, n_tiles, k, packed)


def ruled_tiling(arch: str, rows: int, n_tiles: int, k: int, packed: bool = True) -> Tiling:
    """The tiling where nothing was tuned; a pure function of its arguments.

    Up to 16 rows the depth of the ring decides how many blocks fit a multiprocessor. With room for exactly its share of
    a small grid, every processor gets that share; with more room, blocks of the next launch that start early
    (dependent launch) crowd some processors and leave others idle. Source: docs/log.md.
    """
    whole = -(-k // UNIT)
    units = 2 if whole % (2 * STREAMS) == 0 else 1
    share = -(-n_tiles // MULTIPROCESSORS)  # tiles a multiprocessor has to read
    if rows <= 8:
        # One copy a stage of a warp, and large stages: few instructions a byte, which is power. Source: docs/log.md.
        if arch != "sm_80" and packed and k % (8 * STREAMS * UNIT) == 0:
            return fitted(arch, Tiling("bulk", 1, 1, 8, 3 if share <= 2 else 2))
        if whole % (4 * STREAMS) == 0:  # fewer turns of the loop a byte: less time, and less power where that binds
            return fitted(arch, Tiling("ring", 1, 1, 4, 4 if share <= 2 else 3))
        return fitted(arch, Tiling("ring", 1, 1, 1, 16 if share <= 2 else 12 if share == 3 else 8))
    if rows <= 16:
        if share <= 3:
            return fitted(arch, Tiling("ring", 2, 1, units, (13 if share <= 2 else 8) // units))
        return fitted(arch, Tiling("ring", 2, 2, units, 8 // units) if share <= 8 else Tiling("ring", 2, 2, 1, 5))
    if arch == "sm_90a" and packed:
        return (_choose_narrow if rows <= 64 else _choose_wide)(arch, rows, n_tiles, k)
    if rows <= 64:
        x_tiles, w_tiles, stages = 4 if rows <= 32 else 8, 8, 8
        warps_x, warps_w = (1, 4) if rows <= 32 else (2, 2)
    elif SHARED_BYTES[arch] >= 227 * 1024:
        x_tiles, w_tiles, stages, warps_x, warps_w = 16, 16, 4, 2, 4
    else:
        x_tiles, w_tiles, stages, warps_x, warps_w = 16, 8, 8, 4, 2
    blocks = -(-n_tiles // w_tiles) * -(-rows // (8 * x_tiles))
    split = STREAMS if blocks < 0.75 * MULTIPROCESSORS and k >= 32 * UNIT * STREAMS else 1
    return fitted(arch, Tiling("tile", x_tiles, w_tiles, 1, stages, warps_x, warps_w, split))


def _choose_narrow(arch: str, rows: int, n_tiles: int, k: int) -> Tiling:
    """For 17 to 64 rows, where the bytes of W count: enough of them must be under way on every processor.

    Small maps share K; where no block is left over after a round, the blocks are large.
    """
    share, units = -(-n_tiles // MULTIPROCESSORS), -(-k // UNIT)
    x_tiles = next(v for v in (3, 4, 6, 8) if 8 * v >= rows)
    if x_tiles <= 4 and share <= 8 and n_tiles % 2 == 0:
        if share > 2:
            return fitted(arch, Tiling("ring", 4, 2, 1, 6))
        if units % (2 * STREAMS) == 0:
            return fitted(arch, Tiling("ring", 4, 2, 2, 6))
    w_tiles, split = 8, 1
    if share <= 3:
        w_tiles, split = 4 * share, STREAMS
    elif _last_round(-(-n_tiles // 8)) < 0.75:
        w_tiles = 4
    small = w_tiles == 4 and split == 1
    tiling = Tiling("group", x_tiles, w_tiles, 4 if x_tiles <= 4 or small else 2, 8, split=split, together=split > 1)
    return deepest(arch, tiling, units, blocks=(3 if x_tiles <= 4 else 2) if small else 1)


def _choose_wide(arch: str, rows: int, n_tiles: int, k: int) -> Tiling:
    """For more than 64 rows, where products count: the least rounds of blocks times what the products of a block take.

    Who shares K, only where all blocks run at once, pays for the sums that meet.
    """
    found = []
    for (w_tiles, most), rate in _WIDE.items():
        blocks_x = -(-rows // (8 * most))
        x_tiles = -(-rows // (8 * blocks_x))
        blocks, products = blocks_x * -(-n_tiles // w_tiles), round(128 * x_tiles * w_tiles / rate)
        found.append((-(-blocks // MULTIPROCESSORS) * products, x_tiles, w_tiles, 1))
        if blocks * STREAMS <= MULTIPROCESSORS:
            found.append((products // STREAMS + _MEETING // k, x_tiles, w_tiles, STREAMS))
    _, x_tiles, w_tiles, split = min(found, key=lambda one: one[0])
    return deepest(
        arch, Tiling("group", x_tiles, w_tiles, 2, 16, split=split, together=split > 1), -(-k // UNIT), blocks=1
    )  # fmt: skip


def _last_round(blocks: int) -> float:
    """Share of the processors' time that blocks of equal length use, one a processor."""
    return blocks / MULTIPROCESSORS / -(-blocks // MULTIPROCESSORS)


def deepest(arch: str, tiling: Tiling, units: int, blocks: int) -> Tiling:
    """`tiling` with as deep a ring as lets `blocks` of them on a processor; at least three stages, or shorter ones."""
    most = min(SHARED_BYTES[arch], SHARED_BYTES_SM[arch] // blocks - 1024)
    if tiling.kernel == "group" and tiling.x_tiles > _ONE_UNIT_ABOVE and tiling.w_tiles > 4:
        units = 1
    while tiling.units > units or (
        tiling.units > 1 and replace(tiling, stages=3).shared_bytes > most
    ):  # fmt: skip
        tiling = replace(tiling, units=tiling.units // 2)
    while tiling.stages > 2 and tiling.shared_bytes > most:
        tiling = replace(tiling, stages=tiling.stages - 1)
    return tiling


def fitted(arch: str, tiling: Tiling) -> Tiling:
    """`tiling` with as many stages less as shared memory asks for."""
    limit = SHARED_BYTES[arch]
    while tiling.shared_bytes > limit and tiling.stages > 2:
        tiling = replace(tiling, stages=tiling.stages - 1)
    if tiling.shared_bytes > limit:
        raise KernelLimit(f"{tiling} needs {tiling.shared_bytes} bytes", f"{limit} on {arch}", "use smaller blocks")
    return tiling
