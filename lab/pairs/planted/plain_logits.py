"""Logits of a target over one text, from its named tensors alone: no engine, no cache, no packing.

Source: Llama, Qwen3 and gpt-oss as transformers 5.17 has them; MXFP4 after the OCP Microscaling specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.geometry import BlockGeometry, ExpertsGeometry, TargetGeometry
from eagle3core.kernels.layer import rms_norm_reference, rope_reference, rope_tables
from eagle3core.weights import rope_frequencies

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def causal_logits(weights: Mapping[str, Tensor], geometry: TargetGeometry, tokens: Tensor) -> Tensor:
    """Logits `[T, V]` of one causal pass over `tokens: [T]`, in the dtype of the weights."""
    h = weights["model.embed_tokens.weight"][tokens]  # [T, E]
    positions = torch.arange(len(tokens), device=tokens.device)
    frequencies, scale = rope_frequencies(geometry.block.rope, geometry.block.head_dim)
    angles = rope_tables(frequencies.to(tokens.device), scale, positions[None], h.dtype)
    for i in range(geometry.n_layers):
        block, layer = geometry.block_of(i), _Tensors(weights, f"model.layers.{i}.")
        back = positions[:, None] - positions  # [T, T] positions from a query back to a key
        window = geometry.window_of(i) or len(tokens)
        x = rms_norm_reference(h, layer["input_layernorm.weight"], block.rms_norm_eps)
        h = h + _attention(layer, block, x, angles, (back >= 0) & (back < window))
        x = rms_norm_reference(h, layer["post_attention_layernorm.weight"], block.rms_norm_eps)
        h = h + (_feed_forward(layer, x) if block.experts is None else _experts(layer, block.experts, x))
    normed = rms_norm_reference(h, weights["model.norm.weight"], geometry.block.rms_norm_eps)
    return F.linear(normed, weights["lm_head.weight"])


class _Tensors:
    """The tensors of one layer."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.weights, self.prefix = weights, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def applied(self, name: str, x: Tensor) -> Tensor:
        """A map, with its bias where it has one."""
        return F.linear(x, self[f"{name}.weight"], self.weights.get(f"{self.prefix}{name}.bias"))


def _attention(
    layer: _Tensors, block: BlockGeometry, x: Tensor, angles: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    q, k, v = (layer.applied(f"self_attn.{n}_proj", x).view(1, len(x), -1, block.head_dim) for n in "qkv")
    if block.has_qk_norm:
        gains = (layer[f"self_attn.{n}_norm.weight"] for n in "qk")
        q, k = (rms_norm_reference(t, gain, block.rms_norm_eps) for t, gain in zip((q, k), gains, strict=True))
    q, k = rope_reference(q, *angles), rope_reference(k, *angles)
    group = block.n_heads // block.n_kv_heads
    q, k, v = q[0].transpose(0, 1), *(t[0].transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))  # [H, T, D]
    scores = (q @ k.transpose(1, 2) / block.head_dim**0.5).masked_fill(~visible, float("-inf"))
    if block.has_sinks:  # one more column, which takes part in the sum alone
        sinks = layer["self_attn.sinks"][:, None, None].expand(-1, len(x), 1)
        shares = torch.cat([scores, sinks], dim=2).softmax(2)[:, :, :-1]
    else:
        shares = scores.softmax(2)
    return layer.applied("self_attn.o_proj", (shares @ v).transpose(0, 1).flatten(1))


def _feed_forward(layer: _Tensors, x: Tensor, prefix: str = "mlp.") -> Tensor:
    gated = F.silu(layer.applied(f"{prefix}gate_proj", x)) * layer.applied(f"{prefix}up_proj", x)
    return layer.applied(f"{prefix}down_proj", gated)


def _experts(layer: _Tensors, experts: ExpertsGeometry, x: Tensor) -> Tensor:
    is_clamped = experts.gate == "clamped"
    logits = layer.applied("mlp.router" if is_clamped else "mlp.gate", x)
    taken, chosen = logits.topk(experts.n_chosen, dim=1)
    shares = taken.softmax(1) if experts.is_normalised else logits.softmax(1).gather(1, chosen)
    total = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        given = _clamped(layer, x[rows], expert) if is_clamped else _feed_forward(
            layer, x[rows], f"mlp.experts.{expert}.")  # fmt: skip
        total.index_add_(0, rows, shares[rows, places, None] * given)
    return total


def _clamped(layer: _Tensors, x: Tensor, expert: int) -> Tensor:
    """gpt-oss's expert: gate and up alternate, both clamped at 7."""

    def applied(name: str, rows: Tensor) -> Tensor:
        own = f"mlp.experts.{name}_proj"
        weight = _of_4_bits(layer[f"{own}_blocks"][expert], layer[f"{own}_scales"][expert])
        return F.linear(rows, weight.to(rows.dtype), layer[f"{own}_bias"][expert])

    v = applied("gate_up", x)
    gate, up = v[:, ::2].clamp(max=7.0), v[:, 1::2].clamp(-7.0, 7.0)
    return applied("down", gate * torch.sigmoid(1.702 * gate) * (up + 1))


def _of_4_bits(blocks: Tensor, scales: Tensor) -> Tensor:
    """`[rows, k]` fp32 of `blocks: [rows, k / 32, 16]`, the earlier value in the lower half of a byte."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - _SCALE_BIAS).flatten(1)
