"""W in FP8 (e4m3) for `gemm_ring`: how its bytes lie, so that one load of 16 bytes is a lane's part of a unit.

A unit of 32 k of a tile is one run of 512 bytes, half of what 16-bit W takes. A lane's 16 bytes are the 8 values of its
row of the pairs' lower half, then those of the upper; of every 4 values the middle two have changed places, so that two
masks and shifts make two words of two 16-bit values, in the places where 16-bit W has them.

Source: derived here.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_UNIT = 32  # k of one unit


def lanes_first(packed: Tensor) -> Tensor:
    """Bytes `[n_w, units * 32]` in the order of 16-bit W as kernels read those of FP8."""
    pieces = packed.view(len(packed) // 16, -1, 2, 8, 4, 2, 2, 2)  # tile, unit, half, row, lane, word, pair, value
    return pieces.permute(0, 1, 3, 4, 2, 5, 7, 6).reshape(packed.shape).contiguous()


def halves_first(packed: Tensor) -> Tensor:
    """The inverse of `lanes_first`."""
    pieces = packed.view(len(packed) // 16, -1, 8, 4, 2, 2, 2, 2)  # tile, unit, row, lane, half, word, value, pair
    return pieces.permute(0, 1, 4, 2, 3, 5, 7, 6).reshape(packed.shape).contiguous()
