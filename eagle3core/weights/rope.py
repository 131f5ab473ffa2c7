"""Rotary frequencies of a checkpoint, plain or stretched to a longer context.

Source: Su et al., arXiv 2104.09864; scalings as the Hugging Face config names them (`rope_type`), and for YaRN
Peng et al., arXiv 2309.00071, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3core.geometry import RopeGeometry


def rope_frequencies(rope: RopeGeometry, head_dim: int) -> tuple[Tensor, float]:
    """Angular frequencies `[head_dim / 2]` fp32 on the CPU, and the multiplier of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope), 1.0
    if rope.kind == "yarn":
        attention = rope.attention_factor
        return _yarn_frequencies(frequencies, rope, head_dim), (
            0.1 * math.log(rope.factor) + 1.0 if attention is None and rope.factor > 1 else attention or 1.0
        )
    return frequencies, 1.0


def _llama3_frequencies(frequencies: Tensor, rope: RopeGeometry) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(wavelength > longest, frequencies / rope.factor, blended)
    return torch.where(wavelength < shortest, frequencies, stretched)


def _yarn_frequencies(frequencies: Tensor, rope: RopeGeometry, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)  # equal limits would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
