"""What joins gate and up in an expert, in plain torch. Source: SwiGLU, arXiv 2002.05202; gpt-oss as in transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ALPHA, LIMIT = 1.702, 7.0  # of the clamped gate; gpt-oss's configuration states the second and transformers fixes both


def silu_gate(v: Tensor) -> Tensor:
    """silu(gate) * up of `v: [n, 2 F]`, gate before up."""
    gate, up = v.chunk(2, dim=1)
    return F.silu(gate) * up


def clamped_gate(v: Tensor) -> Tensor:
    """gate sigmoid(1.702 gate) (up + 1) of `v: [n, 2 F]`, whose even columns are gate and odd ones up, both clamped."""
    gate, up = v[:, ::2].clamp(max=LIMIT), v[:, 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_gate, "clamped": clamped_gate}
