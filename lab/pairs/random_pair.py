"""A second pair beside the shipped one: random weights, unequal widths, scaled RoPE, and drafts that are often right.

The shipped pair cannot show every mistake. Its RoPE has the base that readers fall back to (10000) and no scaling, and
both halves are equally wide. This pair has llama3 scaling over a base of 500000, with prompts that cross the scaled
positions; a draft half as wide as its target, so with an embedding of its own; another scaling in the draft than in the
target; taps that are no reader's default, the last of them what leaves the target's last layer; and target tokens
outside the draft vocabulary.

How random weights come to agree: the target's head holds, in the row of each token's successor, that token's embedding.
The layers add about as much to the residual stream, so most tokens, not all, are followed by their successor. In the
draft, the query heads of the first key head look at themselves (queries are scaled keys). They give r(t), a projection
of the newest token's embedding, and take away what was said of the tokens before. The head's row of each successor
holds r(t) at a random strength; weak rows lose against all the rest, which is random and depends on what came before:
the other attention heads, the target's states, the feed-forward. So acceptance lies between chance and certainty, and
a token's rank depends on everything that the draft reads.
Source: derived here; lab/pairs/planted builds drafts of a known acceptance by the same attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.pairs.layout import write_draft, write_target
from lab.pairs.on_disk import Pair, pair_on_disk

EPS = 1e-5
THETA = 500000.0
GATED_RMS = 0.6  # of silu(g) * u for standard normal g and u
PEAKED = 2.0  # scale of random queries: attention is uneven, so that mistakes in it show

# Root mean squares in the residual streams, where an embedding and r(t) have 1.
LAYERS = 1.35  # all layers of the target together
LOOKING_BACK, FUSED, FORWARD = 0.75, 0.6, 0.4  # the draft's random heads, its fc, its feed-forward

SUCCESSOR = 9.0  # logit of a token's successor over the spread of the others, before the layers' part
OUTSIDE = 0.1  # tokens outside the draft vocabulary that often follow, as a share of those inside
STRENGTHS = (1.0, 2.4)  # of r(t) in the draft's head, evenly drawn
DRAFT_LOGIT, DRAFT_SPREAD = 12.0, 1.8  # logit of a row of strength 1, and what the random part of each row adds
OWN_SCORE = 10.0  # a key's score with itself, times |k|^2 / sqrt(D) of unit-variance keys: far above all others


@dataclass(frozen=True)
class RandomShape:
    """Widths of a random pair; the draft has two key heads or more, and `draft_hidden` is another than `hidden`.

    The defaults are small, and such that the GPU's kernels take them.
    """

    vocab: int = 1000
    draft_vocab: int = 600
    layers: int = 5
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 448
    draft_hidden: int = 128
    draft_heads: int = 6
    draft_kv_heads: int = 2
    draft_ffn: int = 320
    taps: tuple[int, ...] = (1, 2, 5)
    scaled_from: int = 256
    max_position: int = 4096


def make_random_pair(directory: str | Path, shape: RandomShape | None = None, *, seed: int = 0) -> Pair:
    """Writes `target` and `draft` in bf16 under `directory`; they depend on the shape and the seed alone."""
    folder, halves = Path(directory), _Halves(shape or RandomShape(), seed)
    write_target(folder / "target", halves.target_config(), _in_bf16(halves.target()))
    write_draft(folder / "draft", halves.draft_config(), _in_bf16(halves.draft()), target_hidden=halves.shape.hidden)
    return pair_on_disk(folder / "target", folder / "draft")


class _Halves:
    """Configs and tensors of both halves, drawn from one generator: the target's first, then the draft's."""

    def __init__(self, shape: RandomShape, seed: int) -> None:
        self.shape, self.random = shape, torch.Generator().manual_seed(seed)
        order = torch.randperm(shape.vocab, generator=self.random)
        self.draft_ids = order[: shape.draft_vocab].sort().values
        # One cycle through the draft's tokens and a few others; the rest lead into it.
        n_cycle = min(round((1 + OUTSIDE) * shape.draft_vocab), shape.vocab)
        cycle = order[:n_cycle][torch.randperm(n_cycle, generator=self.random)]
        self.successor = cycle[torch.randint(n_cycle, (shape.vocab,), generator=self.random)]
        self.successor[cycle] = cycle.roll(-1)

    def target_config(self) -> dict[str, Any]:
        """A Llama without end tokens."""
        shape = self.shape
        return {
            **self._config(shape.hidden, shape.ffn, shape.heads, shape.kv_heads, stretched=8.0),
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": shape.layers,
        }

    def draft_config(self) -> dict[str, Any]:
        """Tap ids are layer inputs, and the config says so."""
        shape = self.shape
        return {
            **self._config(shape.draft_hidden, shape.draft_ffn, shape.draft_heads, shape.draft_kv_heads, stretched=4.0),
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": shape.draft_vocab,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(shape.taps), "use_aux_hidden_state": True},
            "eagle_aux_hidden_state_layer_convention": "input",
        }

    def _config(self, hidden: int, ffn: int, heads: int, kv_heads: int, *, stretched: float) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.shape.vocab,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self.shape.head_dim,
            "rms_norm_eps": EPS,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
            "max_position_embeddings": self.shape.max_position,
            "rope_theta": THETA,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": stretched,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": self.shape.scaled_from,
            },
        }

    def target(self) -> Iterator[tuple[str, Tensor]]:
        """Names, as Hugging Face has them, and tensors."""
        shape = self.shape
        table = self._normal(shape.vocab, shape.hidden)
        yield "model.embed_tokens.weight", table
        part = LAYERS / math.sqrt(2 * shape.layers)  # of one attention, or one feed-forward
        for i in range(shape.layers):
            prefix = f"model.layers.{i}."
            yield f"{prefix}input_layernorm.weight", self._gains(shape.hidden)
            for name, tensor in self._attention(shape.hidden, shape.hidden, shape.heads, shape.kv_heads, part).items():
                yield f"{prefix}self_attn.{name}_proj.weight", tensor
            yield f"{prefix}post_attention_layernorm.weight", self._gains(shape.hidden)
            for name, tensor in self._mlp(shape.hidden, shape.ffn, part).items():
                yield f"{prefix}mlp.{name}_proj.weight", tensor
        yield "model.norm.weight", self._gains(shape.hidden)
        head = self._matrix(shape.vocab, shape.hidden)
        yield "lm_head.weight", head.index_add(0, self.successor, SUCCESSOR / shape.hidden * table)

    def draft(self) -> Iterator[tuple[str, Tensor]]:
        """Names, as SafeAILab has them, and tensors."""
        shape, width = self.shape, self.shape.draft_hidden
        table, gains = self._normal(shape.vocab, width), self._gains(width)
        yield "embed_tokens.weight", table
        # The target's states have a variance of 1 + LAYERS^2 at most.
        spread = FUSED / math.sqrt(1 + LAYERS**2)
        yield "fc.weight", spread * self._matrix(width, len(shape.taps) * shape.hidden)
        yield "midlayer.input_layernorm.weight", gains
        yield "midlayer.hidden_norm.weight", self._gains(width)
        attention, said = self._draft_attention()
        for name, tensor in attention.items():
            yield f"midlayer.self_attn.{name}_proj.weight", tensor
        yield "midlayer.post_attention_layernorm.weight", self._gains(width)
        for name, tensor in self._mlp(width, shape.draft_ffn, FORWARD).items():
            yield f"midlayer.mlp.{name}_proj.weight", tensor
        yield "norm.weight", self._gains(width)
        embedded = table / table.square().mean(-1, keepdim=True).sqrt() * gains
        yield "lm_head.weight", self._draft_head(embedded @ said.T)
        yield "d2t", self.draft_ids - torch.arange(shape.draft_vocab)
        yield "t2d", torch.zeros(shape.vocab, dtype=torch.bool).index_fill_(0, self.draft_ids, True)

    def _draft_attention(self) -> tuple[dict[str, Tensor], Tensor]:
        """Projections of the draft's attention, and `[Hd, Hd]` how r(t) follows from a normed embedding."""
        shape, width, size = self.shape, self.shape.draft_hidden, self.shape.head_dim
        made = self._attention(2 * width, width, shape.draft_heads, shape.draft_kv_heads, LOOKING_BACK)
        group = shape.draft_heads // shape.draft_kv_heads  # query heads of the first key head
        stretch = math.sqrt(width / size)  # brings r(t) to the length of an embedding
        into, out = (self._basis(width, size) for _ in range(2))
        made["k"][:size] *= OWN_SCORE**0.25
        made["q"][: group * size] = OWN_SCORE**0.5 * made["k"][:size].repeat(group, 1)
        # The state that is fed back holds, within `out`, what was said of earlier tokens.
        typical = math.sqrt(1 + LOOKING_BACK**2 + FUSED**2 + 2 * FORWARD**2)
        made["v"][:size] = torch.cat([into.T, -typical / stretch * out.T], dim=1)
        made["o"][:, : group * size] = stretch / group * out.repeat(1, group)
        return made, stretch * out @ into.T

    def _draft_head(self, said: Tensor) -> Tensor:
        """`[Vd, Hd]` the sum of r(t), `said: [V, Hd]`, over the tokens t that each row follows, at their strengths."""
        shape, width = self.shape, self.shape.draft_hidden
        low, high = STRENGTHS
        strengths = low + (high - low) * torch.rand(shape.vocab, 1, generator=self.random)
        rows = torch.zeros(shape.vocab, width).index_add(0, self.successor, DRAFT_LOGIT / width * strengths * said)
        return rows[self.draft_ids] + DRAFT_SPREAD * self._matrix(shape.draft_vocab, width)

    def _attention(self, reads: int, writes: int, heads: int, kv_heads: int, part: float) -> dict[str, Tensor]:
        size = self.shape.head_dim
        return {
            "q": PEAKED * self._matrix(heads * size, reads),
            "k": self._matrix(kv_heads * size, reads),
            "v": self._matrix(kv_heads * size, reads),
            "o": part * self._matrix(writes, heads * size),
        }

    def _mlp(self, width: int, inner: int, part: float) -> dict[str, Tensor]:
        gate, up = self._matrix(inner, width), self._matrix(inner, width)
        return {"gate": gate, "up": up, "down": part / GATED_RMS * self._matrix(width, inner)}

    def _matrix(self, rows: int, columns: int) -> Tensor:
        """Keeps the variance of what it is applied to."""
        return self._normal(rows, columns) / math.sqrt(columns)

    def _gains(self, width: int) -> Tensor:
        return 1.0 + 0.1 * self._normal(width)

    def _basis(self, rows: int, columns: int) -> Tensor:
        """Orthonormal columns; in fp64, so that no machine's rounding shows in bf16."""
        basis: Tensor = torch.linalg.qr(self._normal(rows, columns).double()).Q
        return basis.float()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)


def _in_bf16(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors}
