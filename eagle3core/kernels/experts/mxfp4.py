"""MXFP4: groups of 32 values of 4 bits, neighbours along a row, with a power of two in common.

A byte holds two neighbours, the first in its lower half. A value has a sign, two bits of exponent and one of fraction
(E2M1); the scale s of a group is a byte that stands for 2^(s - 127). All products are exact in bf16 already.
Source: OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
BIAS = 127
MOST_SCALE = BIAS + 125  # 6 * 2^125 is the largest product below 2^128; 255 is no number


def decoded(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., 32 G]` values of `blocks: [..., G, 16]` and `scales: [..., G]`, both uint8, in fp32 or fp64."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=blocks.device)
    exponents = torch.arange(-BIAS, 256 - BIAS, device=blocks.device)
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents).to(dtype)
    neighbours = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # [..., G, 32]
    return (values[neighbours.int()] * powers[scales.int()][..., None]).flatten(-2)
