"""Gated feed-forward activation: silu(gate) * up.

Source: Shazeer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, `[..., F]`."""
    return F.silu(gate) * up
