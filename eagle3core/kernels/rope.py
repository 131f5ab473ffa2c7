"""Rotary position embedding on q and k, half-split layout: (x1, x2) -> (x1 c - x2 s, x2 c + x1 s).

Source: Su et al., arXiv 2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.kernels.rms_norm import accumulation_dtype


def rope_tables(frequencies: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[B, T, head_dim / 2]` in `dtype` for `positions: [B, T]` int64.

    Angles are formed in fp32 from fp32 frequencies (fp64 for an fp64 model, from the same fp32 frequencies), as every
    code base that trains these checkpoints does.
    """
    wide = accumulation_dtype(dtype)
    angles = positions[..., None].to(wide) * frequencies.to(wide)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated heads of `x: [B, T, heads, D]` by `cos, sin: [B, T, D / 2]`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
