"""Row-major weights as a strong plain-torch decoder wants them: q, k, v in one matrix, gate and up in another.

The parts can be taken out again as views, so that two peers share one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.geometry import BlockGeometry

Weights = Mapping[str, Tensor]


@dataclass
class FusedLayer:
    """One decoder layer.

    Attributes:
        qkv: `[(H + 2K) D, in]`.
        out: `[E, H D]`.
        gate_up: `[2 F, E]`.
        down: `[E, F]`.
        input_norm, mlp_norm: `[E]`.
        q_norm, k_norm: `[D]`, of every head of q and k, or None.
    """

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def parts(self, block: BlockGeometry) -> dict[str, Tensor]:
        """Views by the layer's names in a checkpoint."""
        q, kv, inner = block.n_heads * block.head_dim, block.n_kv_heads * block.head_dim, block.intermediate_size
        norms = {"self_attn.q_norm.weight": self.q_norm, "self_attn.k_norm.weight": self.k_norm}
        return {
            **{name: gain for name, gain in norms.items() if gain is not None},
            "self_attn.q_proj.weight": self.qkv[:q],
            "self_attn.k_proj.weight": self.qkv[q : q + kv],
            "self_attn.v_proj.weight": self.qkv[q + kv :],
            "self_attn.o_proj.weight": self.out,
            "mlp.gate_proj.weight": self.gate_up[:inner],
            "mlp.up_proj.weight": self.gate_up[inner:],
            "mlp.down_proj.weight": self.down,
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
        }


@dataclass
class FusedTarget:
    """A whole target."""

    table: Tensor
    layers: list[FusedLayer]
    final_norm: Tensor
    head: Tensor

    def named(self, block: BlockGeometry) -> dict[str, Tensor]:
        """Views by Hugging Face name."""
        named = {
            "model.embed_tokens.weight": self.table,
            "model.norm.weight": self.final_norm,
            "lm_head.weight": self.head,
        }
        for i, layer in enumerate(self.layers):
            named |= {f"model.layers.{i}.{name}": part for name, part in layer.parts(block).items()}
        return named


@dataclass
class FusedDraft:
    """An EAGLE-3 head; shares the target's table."""

    fc: Tensor
    layer: FusedLayer
    hidden_norm: Tensor
    final_norm: Tensor
    head: Tensor
    draft_to_target: Tensor | None


def fuse_target(weights: Weights, n_layers: int) -> FusedTarget:
    """The target of named tensors; each is asked for once, and only the fused copies are kept."""
    table = weights["model.embed_tokens.weight"]  # first: a planted head is made from it while it is held
    layers = [_layer(weights, f"model.layers.{i}.") for i in range(n_layers)]
    return FusedTarget(table, layers, weights["model.norm.weight"], weights["lm_head.weight"])


def fuse_draft(weights: Weights, target: FusedTarget, draft_to_target: Tensor | None) -> FusedDraft:
    """The head of named tensors."""
    return FusedDraft(
        weights["fc.weight"],
        _layer(weights, "midlayer."),
        weights["midlayer.hidden_norm.weight"],
        weights["norm.weight"],
        weights.get("lm_head.weight", target.head),
        draft_to_target,
    )


def _layer(weights: Weights, prefix: str) -> FusedLayer:
    def stacked(*names: str) -> Tensor:
        return torch.cat([weights[f"{prefix}{name}.weight"] for name in names])

    return FusedLayer(
        qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=weights[f"{prefix}self_attn.o_proj.weight"],
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=weights[f"{prefix}mlp.down_proj.weight"],
        input_norm=weights[f"{prefix}input_layernorm.weight"],
        mlp_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        q_norm=weights.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=weights.get(f"{prefix}self_attn.k_norm.weight"),
    )
