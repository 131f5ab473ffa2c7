"""Weights in FP8 (e4m3): a byte a value, and one fp32 scale a row of the map, which is an output channel.

W[r, c] = stored[r, c] * scale[r], and y = (x stored^T) * scale: sums are made of the stored values, which bf16 and fp16
hold exactly, and scaled once. Quantised once, when a model is packed; only linear maps are, never tables, norms and
biases.

Source: e4m3 after Micikevicius et al., arXiv 2209.05433; a scale an output channel as compressed-tensors writes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.kernels.card import E4M3

LARGEST = torch.finfo(E4M3).max  # 448
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # smaller ones would be subnormal, and lose bits of their own
_TOGETHER = 1 << 24  # values converted at a time: what quantising takes beside both matrices


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight: [rows, k]` of any floating dtype as e4m3 of the same shape, and its scales `[rows]` fp32.

    The largest magnitude of a row becomes 448; a row of zeros has scale 1.
    """
    rows, k = weight.shape
    stored = torch.empty(rows, k, dtype=E4M3, device=weight.device)
    scales = torch.ones(rows, dtype=torch.float32, device=weight.device)
    step = max(1, _TOGETHER // k)
    for at in range(0, rows, step):
        wide = weight[at : at + step].float()
        largest = wide.abs().amax(dim=1)  # [step]
        fitting = (largest / LARGEST).clamp_min(_LEAST_SCALE)
        scales[at : at + step] = torch.where(largest > 0, fitting, scales[at : at + step])
        stored[at : at + step] = (wide / scales[at : at + step, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return stored, scales
