"""What a block of the ring kernels asks for of shared memory."""

from __future__ import annotations

from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS


def ring_shared_bytes(
    x_tiles: int, w_tiles: int, units: int, stages: int, bulk: bool = False, fp8: bool = False, paced: bool = False
) -> int:
    """Dynamic shared memory of a block, bytes: the rings, which the last reduction reuses; barriers of bulk copies."""
    fragments = ((1 if fp8 else 2) * w_tiles + (0 if bulk else x_tiles)) * units
    rings = STREAMS * stages * (fragments * FRAGMENT + (8 if bulk else 0)) + (8 if paced else 0)
    sums = STREAMS * 128 * x_tiles * w_tiles + 8 * x_tiles
    return max(rings, 4 * sums)


def stay_shared_bytes(x_tiles: int, w_tiles: int, units: int, stages: int, fp8: bool = False) -> int:
    """The same of `make_gemm_stay`, bytes: rings and barriers, sums of two tiles beside them, the rows' scales."""
    rings = STREAMS * stages * ((1 if fp8 else 2) * w_tiles * units * FRAGMENT + 8)
    return rings + 2 * 4 * STREAMS * 128 * x_tiles * w_tiles + 4 * 8 * x_tiles
