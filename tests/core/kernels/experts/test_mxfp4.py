"""Every byte and every scale of MXFP4 decodes to the value of its definition, and of transformers' own decoding."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eagle3core.kernels.experts.matrices import Mxfp4Matrices
from eagle3core.kernels.experts.mxfp4 import MOST_SCALE, decoded

pytestmark = pytest.mark.reference


def by_definition(nibble: int, scale: int) -> float:
    """Sign, exponent with a bias of 1 and one bit of fraction; exponent 0 is subnormal."""
    exponent, fraction = (nibble >> 1) & 3, nibble & 1
    magnitude = math.ldexp(1 + fraction / 2, exponent - 1) if exponent else fraction / 2
    return math.ldexp(-magnitude if nibble & 8 else magnitude, scale - 127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_at_every_scale_is_what_the_definition_says(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).expand(16, MOST_SCALE + 1, 16)
    scales = torch.arange(MOST_SCALE + 1, dtype=torch.uint8).expand(16, -1)
    found = decoded(blocks, scales, dtype).view(16, MOST_SCALE + 1, 32)
    assert found.dtype == dtype
    for scale in (0, 1, 100, 126, 127, 128, 200, MOST_SCALE):
        expected = [by_definition(nibble, scale) for byte in range(256) for nibble in (byte & 15, byte >> 4)]
        assert found[:, scale].flatten().tolist() == expected
    assert bool(found.isfinite().all())
    assert torch.equal(found[:, : MOST_SCALE + 1].bfloat16().to(dtype), found), "bf16 holds every product"


def test_experts_are_those_that_transformers_decodes() -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 2, 16), generator=random).to(torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), generator=random).to(torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [X, k, rows]
    maps = Mxfp4Matrices(blocks, scales)
    for i in range(3):
        assert torch.equal(maps.of(i, torch.float32), theirs[i].T)
        assert torch.equal(maps.rolled().of(i, torch.float32), theirs[i - 1].T)
