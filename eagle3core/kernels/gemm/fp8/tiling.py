"""Which tiling a linear map with W in e4m3 gets: those of `gemm_ring`, which alone reads such W.

Half the bytes of W lie in a stage, so rings are twice as deep for as much of it under way, and x weighs twice as much
beside it: from 9 rows on, several tiles of W share what is fetched of x. Above 16 rows, which is reading prompts and
large batches, blocks take 32 rows each and W is read again for each of them, mostly from the cache.

Source: derived here from what was measured of 16-bit W (docs/log.md); not tuned on a GPU yet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from eagle3core.kernels import tuned
from eagle3core.kernels.card import SHARED_BYTES_SM
from eagle3core.kernels.gemm.ring import STREAMS, UNIT, ring_shared_bytes
from eagle3core.kernels.gemm.tiling import MULTIPROCESSORS, Tiling, choose_tiling, fitted

_SUFFIX = "_fp8"


@dataclass(frozen=True)
class Fp8Tiling(Tiling):
    """A tiling of `ring` or `bulk` over W in e4m3."""

    @property
    def shared_bytes(self) -> int:
        return ring_shared_bytes(
            self.x_tiles, self.w_tiles, self.units, self.stages, bulk=self.kernel == "bulk", fp8=True
        )

    @property
    def name(self) -> str:
        return f"{super().name}_fp8"


def as_fp8(tiling: Tiling) -> Fp8Tiling:
    """The same parameters over W in e4m3."""
    return Fp8Tiling(**asdict(tiling))


def choose_fp8_tiling(arch: str, rows: int, n_tiles: int, k: int, dtype: str = "bf16") -> Fp8Tiling:
    """The tiling for `rows` rows of x and `n_tiles` tiles of 16 packed weight rows: the tuned one, else the rule's."""
    key = tuned.GemmKey(fp8_key(dtype), tuned.rows_regime(rows), 16 * n_tiles, k, packed=True)
    setting = tuned.find(arch, "gemm", key)
    return Fp8Tiling(**setting) if setting else _ruled(arch, rows, n_tiles, k)


def tiling_for(arch: str, rows: int, key: tuned.GemmKey) -> Tiling:
    """What is launched for `rows` rows of x and the map of a key, whichever format its W has."""
    dtype, is_fp8 = of_fp8_key(key.dtype)
    if is_fp8:
        return choose_fp8_tiling(arch, rows, key.weight_rows // 16, key.k, dtype)
    return choose_tiling(arch, rows, key.weight_rows // 16, key.k, key.packed, dtype)


def fp8_key(dtype: str) -> str:
    """What a tuned file calls the dtype of x together with W in e4m3."""
    return f"{dtype}{_SUFFIX}"


def of_fp8_key(dtype: str) -> tuple[str, bool]:
    """The dtype of x by its name in a tuned file, and whether W is in e4m3."""
    return dtype.removesuffix(_SUFFIX), dtype.endswith(_SUFFIX)


def _ruled(arch: str, rows: int, n_tiles: int, k: int) -> Fp8Tiling:
    """The tiling where nothing was tuned; a pure function of its arguments."""
    units, share = -(-k // UNIT), -(-n_tiles // MULTIPROCESSORS)
    if rows <= 8:
        if arch != "sm_80" and k % (8 * STREAMS * UNIT) == 0:
            return _fitted(arch, Fp8Tiling("bulk", 1, 1, 8, 6 if share <= 2 else 4))
        if units % (4 * STREAMS) == 0:
            return _fitted(arch, Fp8Tiling("ring", 1, 1, 4, 8 if share <= 2 else 6))
        return _fitted(arch, Fp8Tiling("ring", 1, 1, 1, 16))
    x_tiles, deep = (2, 2) if rows <= 16 else (4, 1)
    w_tiles = next(v for v in ((4, 2, 1) if share > 3 else (2, 1)) if n_tiles % v == 0)
    deep = deep if units % (deep * STREAMS) == 0 else 1
    tiling = Fp8Tiling("ring", x_tiles, w_tiles, deep, 16)
    # Room for two on a processor even where there is one each: the next kernel's blocks come early.
    while tiling.stages > 4 and tiling.shared_bytes + 1024 > SHARED_BYTES_SM[arch] // 2:
        tiling = Fp8Tiling("ring", x_tiles, w_tiles, deep, tiling.stages - 1)
    return _fitted(arch, tiling)


def _fitted(arch: str, tiling: Fp8Tiling) -> Fp8Tiling:
    made = fitted(arch, tiling)
    assert isinstance(made, Fp8Tiling), "a copy with fewer stages is of the same class"
    return made
