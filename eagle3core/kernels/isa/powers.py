"""Sums of e^x in pieces of 16: what the one who makes x leaves, and how whoever needs the whole sum joins the pieces.

A piece is its largest x and the sum of 2^(x * LOG2_E - r), r = largest * LOG2_E rounded. An exponent then costs one
instruction, and the joining side, which knows r, takes out what rounding it left. Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3core.kernels.isa.by_row import one_up

PIECE = 16
LOWEST = -2e38  # below every x, and finite even times LOG2_E: a piece of nothing but -inf has the sum 0, not NaN
LOG2_E = 1.4426950408889634


def make_offset(isa: Any) -> Any:
    """`offset(largest)`: r of a piece, or of a whole row."""
    lowest, log2_e = np.float32(LOWEST), np.float32(LOG2_E)

    def offset(largest: Any) -> Any:
        return isa.product(isa.maximum(largest, lowest), log2_e)

    return isa.inlined(offset)


def pieces_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of every 16 columns of `x: [rows, V]`, a NaN counting as infinite, and the sums: `[rows, V / 16]`.

    r is rounded as in the kernels where x has sixteen bits.
    """
    wide, log2_e = x.to(one_up(x.dtype)).view(len(x), -1, PIECE), float(np.float32(LOG2_E))
    largest = torch.where(wide.isnan(), torch.inf, wide).amax(-1)
    r = largest.clamp_min(LOWEST) * log2_e
    return largest, (wide.double() * log2_e - r.double()[..., None]).exp2().sum(-1).to(wide.dtype)
