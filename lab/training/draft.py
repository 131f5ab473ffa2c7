"""The EAGLE-3 draft head as it is trained: the whole sequence at once, several chained steps deep.

Written for training only, apart from the engine's draft, so that agreement of the two means something. Source: the
EAGLE-3 paper (training-time test), and docs/requirements.md on draft stages and alignment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lab.pairs.layout import write_draft
from lab.training.sizes import PairSize
from lab.training.target import ROPE_THETA
from lab.training.tokenizer import END_ID

EPS = 1e-5


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, EPS)


class Attention(nn.Module):
    """Attention of training step s: causal over step 0, plus its own column in steps 1..s.

    That is what the draft sees when it drafts: the committed prefix, then its own chain. The mask trick needs one full
    score matrix against the keys of step 0 and one dot product for each later step.
    """

    def __init__(self, size: PairSize) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.head_dim
        self.q_proj = nn.Linear(2 * size.hidden, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)

    def forward(self, x: Tensor, step: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`[B, M, H]` from `x: [B, M, 2H]`; appends this step's keys and values `[B, heads, M, D]` to `seen`."""
        batch, length, _ = x.shape
        positions = torch.arange(step, step + length, device=x.device)
        query = _rotated(self._split(self.q_proj(x), self.heads), positions)
        repeat = self.heads // self.kv_heads
        key = _rotated(self._split(self.k_proj(x), self.kv_heads), positions).repeat_interleave(repeat, dim=1)
        value = self._split(self.v_proj(x), self.kv_heads).repeat_interleave(repeat, dim=1)
        seen.append((key, value))
        scores = query @ seen[0][0].transpose(-1, -2)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        columns = [scores.masked_fill(future, float("-inf"))]
        columns += [(query * chained).sum(-1, keepdim=True) for chained, _ in seen[1:]]
        weights = torch.softmax(torch.cat(columns, dim=-1).float() / self.head_dim**0.5, dim=-1).to(value.dtype)
        mixed = weights[..., :length] @ seen[0][1]
        for i, (_, chained) in enumerate(seen[1:]):
            mixed = mixed + weights[..., length + i, None] * chained
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(z)) * up(z))."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(z)) * self.up_proj(z))
        return out


class Layer(nn.Module):
    """The one layer: attention over concat(normed embedding, normed h), residual on the un-normed h, then the MLP."""

    def __init__(self, size: PairSize) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(size.hidden)
        self.hidden_norm = RMSNorm(size.hidden)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = RMSNorm(size.hidden)
        self.mlp = MLP(size.hidden, size.draft_ffn)

    def forward(self, embedded: Tensor, h: Tensor, step: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(h)], dim=-1)
        residual = h + self.self_attn(x, step, seen)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Draft(nn.Module):
    """An EAGLE-3 head; parameter names are SafeAILab's.

    Args:
        size: its geometry.
        embedding: the target's table `[V, H]`, frozen and not saved.
        draft_to_target: `[Vd]` int64 target ids of its logits, ascending.
    """

    embedding: Tensor
    draft_to_target: Tensor

    def __init__(self, size: PairSize, embedding: Tensor, draft_to_target: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * size.hidden, size.hidden, bias=False)
        self.midlayer = Layer(size)
        self.norm = RMSNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.draft_vocab, bias=False)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        self.register_buffer("draft_to_target", draft_to_target.clone(), persistent=False)

    def forward(self, taps: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """Logits of every chained step at every root, `steps` tensors `[B, M, Vd]` fp32.

        Step i at root j pairs the state of step i-1 (step 0: the fused taps of position j) with token j+1+i, and
        predicts token j+2+i.

        Args:
            taps: `[B, M, 3H]` target states of positions 0..M-1, low to high.
            tokens: `[B, M + steps]` token ids of positions 0..M+steps-1.
            steps: chained steps.
        """
        length = taps.shape[1]
        seen: list[tuple[Tensor, Tensor]] = []
        state, logits = self.fc(taps).float(), []  # fp32: the residual stream must not lose bits
        for step in range(steps):
            fed = F.embedding(tokens[:, 1 + step : 1 + step + length], self.embedding)
            state = self.midlayer(fed, state, step, seen)
            with torch.autocast(taps.device.type, enabled=False):
                logits.append(self.lm_head(self.norm(state)))
        return logits


def tap_layers(n_layers: int) -> tuple[int, int, int]:
    """Default taps in the "input" convention: the residual streams before these layers."""
    return 2, n_layers // 2, n_layers - 3


def build_draft(size: PairSize, target: Any, draft_to_target: Tensor, seed: int) -> Draft:
    """A draft whose head starts as the target's rows of the draft vocabulary and whose norm as the target's."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        draft = Draft(size, target.model.embed_tokens.weight.float().cpu(), draft_to_target.cpu())
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight[draft_to_target.to(target.lm_head.weight.device)])
        draft.norm.weight.copy_(target.model.norm.weight)
    return draft.to(target.model.embed_tokens.weight.device)


def save_draft(draft: Draft, size: PairSize, directory: Path) -> None:
    """`config.json` and `model.safetensors` in the SafeAILab/SpecForge layout, bf16.

    The config spells the RoPE base both ways and says outright which convention its tap ids follow, since readers
    disagree: layer outputs here, so each id is one less than the layer whose input it is.
    """
    ids = draft.draft_to_target.cpu()
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in draft.state_dict().items()}
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(size.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.draft_ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": size.vocab,
        "draft_vocab_size": size.draft_vocab,
        "max_position_embeddings": size.max_position,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in tap_layers(size.layers)],
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_convention": "output",
    }
    write_draft(directory, config, weights, target_hidden=size.hidden)


def load_draft(directory: Path, size: PairSize, target: Any) -> Draft:
    """The saved draft in fp32 beside its target, frozen, for measuring."""
    weights = load_file(directory / "model.safetensors")
    ids = weights.pop("d2t") + torch.arange(size.draft_vocab)
    weights.pop("t2d")
    draft = Draft(size, target.model.embed_tokens.weight.float().cpu(), ids)
    draft.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return draft.to(target.model.embed_tokens.weight.device).eval().requires_grad_(False)


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Half-split rotary embedding of `[B, heads, M, D]`."""
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half].float(), x[..., half:].float()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
