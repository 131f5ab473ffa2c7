"""Rotary frequencies of a checkpoint, plain or stretched to a longer context, and the table that programs read.

Kinds whose frequencies depend on a length (dynamic, longrope) take one length for the whole engine, that of its
sessions: a cached key keeps the angle it was written with, so one sequence cannot use two sets.

Source: Su et al., arXiv 2104.09864; scalings as the Hugging Face config names them (`rope_type`): YaRN and dynamic
after Peng et al., arXiv 2309.00071, LongRoPE after Ding et al., arXiv 2402.13753.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3core.checkpoint.rope import llama3_frequencies
from eagle3core.geometry import RopeGeometry
from eagle3core.kernels.layer.rope import rope_pairs


def rope_frequencies(rope: RopeGeometry, head_dim: int, length: int = 0) -> tuple[Tensor, float]:
    """Angular frequencies fp32 on the CPU, one a pair, and the multiplier of cos and sin.

    `length`: tokens of the longest session; of no matter to kinds with one set of frequencies.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind == "dynamic":
        return 1.0 / (_dynamic_base(rope, head_dim, length) ** exponents), 1.0
    if rope.kind == "longrope":
        factors = rope.long_factors if length > rope.original_max_position else rope.short_factors
        stretched = torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents
        return 1.0 / stretched, rope.attention_factor or 1.0
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return llama3_frequencies(frequencies, rope), 1.0
    if rope.kind == "yarn":
        attention = rope.attention_factor
        return _yarn_frequencies(frequencies, rope, head_dim), (
            0.1 * math.log(rope.factor) + 1.0 if attention is None and rope.factor > 1 else attention or 1.0
        )
    return frequencies, 1.0


def rope_table(
    rope: RopeGeometry, head_dim: int, length: int, n_positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`[n_positions, head_dim / 2, 2]` cos and sin in `dtype`."""
    frequencies, scale = rope_frequencies(rope, head_dim, length)
    return rope_pairs(frequencies.to(device), scale, n_positions, dtype).contiguous()


def _dynamic_base(rope: RopeGeometry, head_dim: int, length: int) -> float:
    longest = max(length, rope.original_max_position) / rope.original_max_position
    return float(rope.theta * (rope.factor * longest - (rope.factor - 1)) ** (head_dim / (head_dim - 2)))


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
