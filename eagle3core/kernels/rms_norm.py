"""Root-mean-square normalisation: y = w * cast(x / sqrt(mean(x^2) + eps)).

Source: Zhang and Sennrich, arXiv 1910.07467; the Llama order of operations (cast before the gain).
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over a row are made: fp64 stays fp64, everything else uses fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised rows of `x: [..., E]` times `weight: [E]`, in the dtype of `x`."""
    wide = x.to(accumulation_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
