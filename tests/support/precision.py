"""The 2x rule: an op may err twice as much as plain torch does at the same dtype, plus twice one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

WIDER = {torch.float64: torch.float64, torch.float32: torch.float64, torch.bfloat16: torch.float32}


def largest_error(value: Tensor, truth: Tensor) -> float:
    """Largest absolute difference, taken in fp64."""
    return float((value.double() - truth.double()).abs().max())


def allowed_error(plain: Tensor, truth: Tensor) -> float:
    """What the 2x rule allows an op whose plain torch result at the same dtype is `plain`.

    With nothing wider than fp64 to tell the truth, two fp64 results may differ by a bound of 1e-12 of their scale.
    """
    if plain.dtype == torch.float64:
        return 1e-12 * max(1.0, float(truth.abs().max()))
    probe = (truth.to(plain.dtype) + 0.3) - 0.3
    return 2 * largest_error(plain, truth) + 2 * largest_error(probe, truth)
