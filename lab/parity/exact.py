"""Hugging Face's modules with no hidden fp32: what the truth of an fp32 or fp64 run is computed with.

`LlamaRMSNorm`, `LlamaRotaryEmbedding`, their equals of other families, the eager softmax and that of a router work in
fp32 whatever the weights are, so an fp64 model of theirs is an fp32 model in those four places. The replacements here
compute in the dtype of their input and change nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm, GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, repeat_kv
from transformers.models.mistral.modeling_mistral import MistralRMSNorm, MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    Qwen3MoeTopKRouter,
)

EXACT_ATTENTION = "eagle3lab_exact"
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm, GptOssRMSNorm)
_ROTATIONS = (
    LlamaRotaryEmbedding, MistralRotaryEmbedding, Qwen2RotaryEmbedding, Qwen3RotaryEmbedding, Qwen3MoeRotaryEmbedding,
    GptOssRotaryEmbedding,
)  # fmt: skip


class ExactRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in the dtype of x (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.weight = source.weight
        self.eps = float(source.variance_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalised rows of `hidden_states: [..., E]`."""
        mean_square = hidden_states.square().mean(-1, keepdim=True)
        normed: Tensor = self.weight * (hidden_states / torch.sqrt(mean_square + self.eps))
        return normed


class ExactRotary(nn.Module):
    """cos and sin of position * frequency in the dtype of x, from Hugging Face's own fp32 frequencies.

    The frequencies stay the fp32 constants they are in every code base that trains or serves these checkpoints; only
    the angles and their cosines are taken one precision up.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.frequencies: Tensor = source.inv_freq.detach().to(torch.float32)
        self.scaling = float(source.attention_scaling)
        self.is_whole = not isinstance(source, GptOssRotaryEmbedding)  # which turns halves by angles of one half

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[B, T, D]` (of gpt-oss `[B, T, D / 2]`) for `position_ids: [B, T]`."""
        angles = position_ids[..., None].to(x.dtype) * self.frequencies.to(x.device, x.dtype)
        angles = torch.cat([angles, angles], dim=-1) if self.is_whole else angles
        return angles.cos() * self.scaling, angles.sin() * self.scaling


class ExactRouter(nn.Module):
    """Logits, shares and indices of the chosen experts, softmax in the dtype of the rows."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.weight, self.top_k, self.norm_topk_prob = source.weight, int(source.top_k), bool(source.norm_topk_prob)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `hidden_states: [..., E]`: `[n, X]`, `[n, k]` and `[n, k]`."""
        logits = nn.functional.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
        indices = logits.topk(self.top_k, dim=-1).indices
        return logits, shares_of(logits, indices, self.norm_topk_prob), indices


def shares_of(logits: Tensor, indices: Tensor, is_normalised: bool) -> Tensor:
    """Shares of the experts `indices: [n, k]` in the dtype of `logits: [n, X]`: of a softmax over them, or over all."""
    taken = logits.softmax(dim=-1).gather(1, indices)
    return taken / taken.sum(dim=-1, keepdim=True) if is_normalised else taken


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Softmax attention in the dtype of `query: [B, H, T, D]`; the eager function of Hugging Face rounds to fp32.

    `s_aux`: `[H]` sinks, a column more of every row's scores that has no value.
    """
    groups = int(module.num_key_value_groups)  # type: ignore[arg-type]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling + attention_mask
    n_keys = scores.shape[-1]
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    mixed = torch.matmul(scores.softmax(dim=-1)[..., :n_keys], value)
    return mixed.transpose(1, 2).contiguous(), None


def make_exact(model: nn.Module, config: Any) -> None:
    """Replace, in place, every module of `model` that computes in fp32 whatever its input is."""
    ALL_ATTENTION_FUNCTIONS.register(EXACT_ATTENTION, exact_attention)
    config._attn_implementation = EXACT_ATTENTION
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _NORMS):
                setattr(parent, name, ExactRmsNorm(child))
            elif isinstance(child, _ROTATIONS):
                setattr(parent, name, ExactRotary(child))
            elif isinstance(child, Qwen3MoeTopKRouter):
                setattr(parent, name, ExactRouter(child))


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """`[1, 1, T, S]` in `dtype`: 0 where `visible: [T, S]` bool holds, the most negative finite number elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]
