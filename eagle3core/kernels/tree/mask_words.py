"""Rows of booleans as int32 words, lowest bit first: how tree masks travel. Source: docs/requirements.md R-43."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(mask: Tensor) -> Tensor:
    """`[..., ceil(N / 32)]` int32 words, lowest bit first, of `mask: [..., N]` bool."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).long()
    padded = padded.view(*mask.shape[:-1], -1, 32)
    words = (padded << torch.arange(32, device=mask.device)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def unpack_words(words: Tensor, n: int) -> Tensor:
    """`[..., n]` bool from int32 words, lowest bit first."""
    bits = words.long()[..., None] >> torch.arange(32, device=words.device) & 1
    return bits.flatten(-2)[..., :n].bool()
