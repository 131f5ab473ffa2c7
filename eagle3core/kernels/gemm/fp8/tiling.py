"""Which tiling a linear map with W in e4m3 gets.

Half the bytes of W lie in a stage, and x weighs twice as much beside it. Up to 8 rows rings are small, so that a
processor has several blocks, of which some begin while others end. From 9 rows on, several tiles of W share what is
fetched of x. Above 16 rows, which is reading prompts and large batches, tilings are those of 16-bit W with deeper
rings. Scales of blocks ask for a second set of sums, so blocks of rows are smaller there; where streams are not whole
blocks, or there are no warpgroups, `gemm_ring` takes 32 rows at a time and W is read again for each of them, mostly
from the cache.

Source: up to 8 rows, with scales of rows, what an H200 chose for the shapes of Llama-3.1-8B (docs/log.md); the rest
derived here from what was measured of 16-bit W.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from eagle3core.kernels import tuned
from eagle3core.kernels.card import SHARED_BYTES_SM
from eagle3core.kernels.gemm.fp8.blocks import BLOCK_UNITS
from eagle3core.kernels.gemm.group import group_shared_bytes
from eagle3core.kernels.gemm.products import STREAMS, UNIT
from eagle3core.kernels.gemm.ring.shared import ring_shared_bytes, stay_shared_bytes
from eagle3core.kernels.gemm.tile import tile_shared_bytes
from eagle3core.kernels.gemm.tiling import (
    MULTIPROCESSORS,
    Tiling,
    choose_tiling,
    deepest,
    fitted,
    ruled_tiling,
)

_ROWS, _BLOCKS = "_fp8", "_fp8_blocks"
# Of x, where a thread of two warpgroups holds the sums of a block and those of its stream: 16 tiles spilled.
_MOST_TILES = 12


@dataclass(frozen=True)
class Fp8Tiling(Tiling):
    """A tiling over W in e4m3."""

    blocks: ClassVar[bool] = False  # whether scales are those of blocks

    @property
    def shared_bytes(self) -> int:
        sizes = self.x_tiles, self.w_tiles, self.units, self.stages
        if self.stays:
            return stay_shared_bytes(*sizes, fp8=True)
        if self.kernel == "group":
            return group_shared_bytes(*sizes, self.split, fp8=True, blocks=self.blocks)
        if self.kernel == "tile":
            return tile_shared_bytes(*sizes, self.warps_x * self.warps_w, self.split, fp8=True)
        return ring_shared_bytes(*sizes, bulk=self.kernel == "bulk", fp8=True, paced=self.paced > 0)

    @property
    def name(self) -> str:
        return f"{super().name}{_BLOCKS if self.blocks else _ROWS}"


@dataclass(frozen=True)
class Fp8BlockTiling(Fp8Tiling):
    """A tiling over W in e4m3 with scales of blocks, of every kernel but `tile`."""

    blocks: ClassVar[bool] = True


def as_fp8(tiling: Tiling, blocks: bool = False) -> Fp8Tiling:
    """The same parameters over W in e4m3."""
    return (Fp8BlockTiling if blocks else Fp8Tiling)(**asdict(tiling))


def choose_fp8_tiling(
    arch: str, rows: int, n_tiles: int, k: int, dtype: str = "bf16", blocks: bool = False
) -> Fp8Tiling:
    """The tiling for `rows` rows of x and `n_tiles` tiles of 16 packed weight rows: the tuned one, else the rule's."""
    key = tuned.GemmKey(fp8_key(dtype, blocks), tuned.rows_regime(rows), 16 * n_tiles, k, packed=True)
    setting = tuned.find(arch, "gemm", key)
    return as_fp8(Tiling(**setting), blocks) if setting else _ruled(arch, rows, n_tiles, k, blocks)


def tiling_for(arch: str, rows: int, key: tuned.GemmKey) -> Tiling:
    """What is launched for `rows` rows of x and the map of a key, whichever format its W has."""
    dtype, fp8 = of_fp8_key(key.dtype)
    if fp8:
        return choose_fp8_tiling(arch, rows, key.weight_rows // 16, key.k, dtype, fp8 == "blocks")
    return choose_tiling(arch, rows, key.weight_rows // 16, key.k, key.packed, dtype)


def fp8_key(dtype: str, blocks: bool = False) -> str:
    """What a tuned file calls the dtype of x together with W in e4m3, with scales of rows or of blocks."""
    return f"{dtype}{_BLOCKS if blocks else _ROWS}"


def of_fp8_key(dtype: str) -> tuple[str, bool | str]:
    """The dtype of x by its name in a tuned file, and W's format as a case of the card has it: `fp8`, "blocks" of
    scales of blocks, or False."""
    if dtype.endswith(_BLOCKS):
        return dtype.removesuffix(_BLOCKS), "blocks"
    return dtype.removesuffix(_ROWS), dtype.endswith(_ROWS)


def has_whole_blocks(k: int) -> bool:
    """Whether every stream over K is made of whole blocks, as `group` asks of scales of blocks."""
    return k % (STREAMS * BLOCK_UNITS * UNIT) == 0


def _ruled(arch: str, rows: int, n_tiles: int, k: int, blocks: bool) -> Fp8Tiling:
    """The tiling where nothing was tuned; a pure function of its arguments."""
    if rows > 16 and (arch == "sm_90a" or not blocks) and (has_whole_blocks(k) or not blocks):
        return _many_rows(arch, rows, n_tiles, k, blocks)
    return as_fp8(_few_rows(arch, rows, n_tiles, k, blocks), blocks)


def _many_rows(arch: str, rows: int, n_tiles: int, k: int, blocks: bool) -> Fp8Tiling:
    """The rule's tiling of 16-bit W, with as many blocks on a processor and a ring as deep as that leaves."""
    base = ruled_tiling(arch, rows, n_tiles, k)
    if blocks and (base.kernel != "group" or not takes(as_fp8(base, blocks), k)):
        base = Tiling("group", low_block(rows), 8, 2, 8)
    return deepened(arch, base, k, blocks)


def low_block(rows: int) -> int:
    """Tiles of x of a block of `group` with scales of blocks, the blocks about even."""
    blocks = -(-rows // (8 * _MOST_TILES))
    return -(-rows // (8 * blocks))


def deepened(arch: str, tiling: Tiling, k: int, blocks: bool) -> Fp8Tiling:
    """A tiling of 16-bit W over e4m3: as many blocks on a processor, with the deeper rings for which half of W leaves
    room."""
    twice = as_fp8(replace(tiling, stages=2 * tiling.stages), blocks)
    if tiling.kernel != "group":
        return _fitted(arch, twice)
    resident = max(1, SHARED_BYTES_SM[arch] // (tiling.shared_bytes + 1024))
    return _same_class(deepest(arch, twice, -(-k // UNIT), blocks=resident))


def takes(tiling: Fp8Tiling, k: int) -> bool:
    """Whether the kernel of a tiling reads W in e4m3 with its form of scales, beside what it asks of 16-bit W."""
    if tiling.kernel == "tile":
        return not tiling.blocks and tiling.w_tiles % (tiling.warps_x * tiling.warps_w) == 0
    if tiling.held or not tiling.blocks:
        return not tiling.held  # which leaves no registers to widen W in
    if tiling.stays:
        return False
    # Above 8 tiles of x a third warpgroup would leave a thread too few registers for both sums.
    small = tiling.x_tiles <= 8 or (tiling.x_tiles <= _MOST_TILES and tiling.w_tiles <= 8)
    return tiling.units <= BLOCK_UNITS and (tiling.kernel != "group" or (small and has_whole_blocks(k)))


def _few_rows(arch: str, rows: int, n_tiles: int, k: int, blocks: bool) -> Fp8Tiling:
    """`ring` or `bulk`: up to 16 rows, and above where `_many_rows` cannot."""
    units, share = -(-k // UNIT), -(-n_tiles // MULTIPROCESSORS)
    most_tiles = 2 if blocks and rows > 16 else 4
    if rows <= 8 and blocks and arch != "sm_80" and k % (BLOCK_UNITS * STREAMS * UNIT) == 0:
        return _fitted(arch, Fp8Tiling("bulk", 1, 1, BLOCK_UNITS, 12 if share <= 2 else 8))
    if rows <= 8:
        if arch != "sm_80" and k % (8 * STREAMS * UNIT) == 0 and share > 2:
            return _fitted(arch, Fp8Tiling("bulk", 1, 1, 8, 2))
        if units % (4 * STREAMS) == 0:
            return _fitted(arch, Fp8Tiling("ring", 1, 1, 4, 6 if share <= 2 else 4))
        return _fitted(arch, Fp8Tiling("ring", 1, 1, 1, 16))
    x_tiles, deep = (2, 2) if rows <= 16 else (4, 1)
    w_tiles = next(v for v in ((4, 2, 1) if share > 3 else (2, 1)) if n_tiles % v == 0 and v <= most_tiles)
    deep = deep if units % (deep * STREAMS) == 0 else 1
    tiling = Fp8Tiling("ring", x_tiles, w_tiles, deep, 16)
    # Room for two on a processor even where there is one each: the next kernel's blocks come early.
    while tiling.stages > 4 and tiling.shared_bytes + 1024 > SHARED_BYTES_SM[arch] // 2:
        tiling = Fp8Tiling("ring", x_tiles, w_tiles, deep, tiling.stages - 1)
    return _fitted(arch, tiling)


def _fitted(arch: str, tiling: Fp8Tiling) -> Fp8Tiling:
    return _same_class(fitted(arch, tiling))


def _same_class(made: Tiling) -> Fp8Tiling:
    assert isinstance(made, Fp8Tiling), "a copy with fewer stages is of the same class"
    return made
