"""Weights in FP8 (e4m3): a byte a value, and fp32 scales, one a row of the map (an output channel) or of blocks.

W[r, c] = stored[r, c] * scale[r], and y = (x stored^T) * scale: sums are made of the stored values, which bf16 and fp16
hold exactly, and scaled once; scales of blocks multiply the sums of their 128 k (`kernels.gemm.fp8.blocks`). Quantised
once, when a model is packed, or stored so; only linear maps are, never tables, norms and biases.

Source: e4m3 after Micikevicius et al., arXiv 2209.05433; a scale an output channel as compressed-tensors writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels.card import E4M3
from eagle3core.kernels.gemm.fp8.operands import by_element

LARGEST = torch.finfo(E4M3).max  # 448
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # smaller ones would be subnormal, and lose bits of their own
_TOGETHER = 1 << 24  # values converted at a time: what quantising takes beside both matrices


class Fp8Matrix(NamedTuple):
    """A matrix in e4m3.

    Attributes:
        stored: `[rows, k]` e4m3. scales: fp32, `[rows]`, or `[rows / 8, blocks]` of 8 rows by 128 k each.
    """

    stored: Tensor
    scales: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """What it means, `[rows, k]`: rounded once, from fp32 (fp64 for fp64)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.stored.to(wide) * by_element(self.scales, self.stored.shape[1])).to(dtype)

    def padded(self, rows: int) -> Fp8Matrix:
        """With so many rows of zeros behind it."""
        stored = F.pad(self.stored.view(torch.uint8), (0, 0, 0, rows)).view(E4M3)
        missing = rows if self.scales.ndim == 1 else -(-stored.shape[0] // 8) - len(self.scales)
        more = torch.ones(missing, *self.scales.shape[1:], device=self.scales.device)
        return Fp8Matrix(stored, torch.cat([self.scales, more]))


def stacked(parts: Sequence[Fp8Matrix]) -> Fp8Matrix | None:
    """Matrices of one width as one, every scale kept; None where some have scales of blocks and others of rows that
    differ within eight."""
    forms = {part.scales.ndim for part in parts}
    scales = [part.scales for part in parts]
    if len(forms) > 1:
        widened = [_of_blocks(part) for part in parts]
        if any(one is None for one in widened):
            return None
        scales = [one for one in widened if one is not None]
    stored = torch.cat([part.stored.view(torch.uint8) for part in parts]).view(E4M3)
    return Fp8Matrix(stored, torch.cat(scales))


def _of_blocks(part: Fp8Matrix) -> Tensor | None:
    """Scales of rows as those of blocks, where eight neighbours share one."""
    if part.scales.ndim > 1:
        return part.scales
    if len(part.scales) % 8 or bool((part.scales.view(-1, 8) != part.scales[::8, None]).any()):
        return None
    return part.scales[::8, None].expand(-1, -(-part.stored.shape[1] // 128)).contiguous()


def quantised(weight: Tensor) -> Fp8Matrix:
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
    return Fp8Matrix(stored, scales)
