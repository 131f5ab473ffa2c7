"""One decoder layer's projections, shared by the target and the draft.

The draft differs only in what its attention reads (embedding and hidden state side by side), so both go through the
same linear maps and the same paged attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from eagle3core.geometry import BlockGeometry
from eagle3core.kernels.attention.launcher import paged_attention_reference
from eagle3core.kernels.layer.swiglu import swiglu_reference


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b with `weight: [out, in]`, `bias: [out]` or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Pass:
    """Where the rows of one forward pass sit.

    Attributes:
        positions: `[B, T]` int64 rotary positions.
        prefix_lens: `[B]` int64 cached keys before this pass; row t is written at prefix_lens + t.
        mask: `[B, T, T]` bool ancestor-or-self among the rows of this pass.
        valid: `[B, T]` bool rows that hold a token; others are padding, never written.
    """

    positions: Tensor
    prefix_lens: Tensor
    mask: Tensor
    valid: Tensor


class KVRows(Protocol):
    """A batch's rows of one KV cache, as a layer writes and reads them."""

    block_tables: Tensor  # [B, M] int32

    def write(self, layer: int, starts: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> None:
        """Store `k, v: [B, T, K, D]` at tokens starts + 0..T-1, valid rows only."""

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[n_blocks, K, block, D]` of one layer."""


class Block:
    """Projections of one layer: q, k, v, o and the gated feed-forward.

    Args:
        weights: the checkpoint's tensors.
        prefix: name before `self_attn.` and `mlp.`, e.g. "model.layers.3." or "midlayer.".
        geometry: widths.
    """

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, geometry: BlockGeometry) -> None:
        def linear(name: str) -> Linear:
            return Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

        self.geometry = geometry
        self.q, self.k, self.v, self.o = (linear(f"self_attn.{name}_proj") for name in "qkvo")
        self.gate, self.up, self.down = (linear(f"mlp.{name}_proj") for name in ("gate", "up", "down"))

    def tensors(self) -> list[Tensor]:
        """Weights and biases of the layer's projections."""
        maps = (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)
        return [tensor for m in maps for tensor in (m.weight, m.bias) if tensor is not None]

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected heads of `x: [B, T, in]`: q `[B, T, H, D]`, k and v `[B, T, K, D]`."""
        batch, n_rows, _ = x.shape
        q, k, v = (project(x).view(batch, n_rows, -1, self.geometry.head_dim) for project in (self.q, self.k, self.v))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, view: KVRows, at: Pass) -> Tensor:
        """Write k and v to the cache, attend, project: `[B, T, E]`."""
        view.write(layer, at.prefix_lens, k, v, at.valid)
        k_blocks, v_blocks = view.blocks(layer)
        mixed = paged_attention_reference(q, k_blocks, v_blocks, view.block_tables, at.prefix_lens, at.mask)
        return self.o(mixed.flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        """down(silu(gate x) * up x), `[B, T, E]`."""
        return self.down(swiglu_reference(self.gate(x), self.up(x)))
