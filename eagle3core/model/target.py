"""The target: a Llama-architecture decoder, forward stage by stage over the paged cache.

Called by prefill with a chunk of the prompt and by verification with the nodes of a tree; the two differ only in
positions and mask. Source: Touvron et al., arXiv 2302.13971; shapes as Hugging Face `LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.checkpoint.target import TargetCheckpoint
from eagle3core.kernels.layer.rms_norm import rms_norm_reference
from eagle3core.kernels.layer.rope import rope_reference, rope_tables
from eagle3core.model.block import Block, KVRows, Linear, Pass
from eagle3core.trace import Trace
from eagle3core.weights.rope import rope_frequencies


class TargetOutput(NamedTuple):
    """What a pass over the target gives.

    Attributes:
        logits: `[B, T, V]`; `[B, 1, V]` with head="last"; None with head="none".
        taps: `[B, T, n_taps * E]` residual streams the draft reads, ascending layer order; width 0 with no taps.
    """

    logits: Tensor | None
    taps: Tensor


class TargetModel:
    """Weights of the target on one device, in one dtype.

    Args:
        checkpoint: named tensors and geometry, already checked.
        taps: layer-input ids to capture, ascending; id n is the last layer's output before the final norm.
    """

    def __init__(self, checkpoint: TargetCheckpoint, taps: tuple[int, ...] = ()) -> None:
        weights, geometry = checkpoint.weights, checkpoint.geometry
        self.geometry = geometry
        self.taps = taps
        self.embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        prefixes = [f"model.layers.{i}." for i in range(geometry.n_layers)]
        self.blocks = [Block(weights, prefix, geometry.block) for prefix in prefixes]
        self.attn_norms = [weights[f"{prefix}input_layernorm.weight"] for prefix in prefixes]
        self.mlp_norms = [weights[f"{prefix}post_attention_layernorm.weight"] for prefix in prefixes]
        self.final_norm = weights["model.norm.weight"]
        self.head = Linear(weights["lm_head.weight"])
        frequencies, self.rope_scale = rope_frequencies(geometry.block.rope, geometry.block.head_dim)
        self.rope_frequencies = frequencies.to(self.device)

    def own_tensors(self) -> Iterable[Tensor]:
        """Every weight, shared ones once."""
        tensors = [self.embedding, self.final_norm, *self.attn_norms, *self.mlp_norms, self.head.weight]
        tensors += [tensor for block in self.blocks for tensor in block.tensors()]
        return {tensor.data_ptr(): tensor for tensor in tensors}.values()

    def forward(
        self, tokens: Tensor, at: Pass, view: KVRows, trace: Trace, *, head: Literal["all", "last", "none"] = "all"
    ) -> TargetOutput:
        """Logits and taps for `tokens: [B, T]` int64 placed by `at`; writes their keys and values.

        `head` says which rows get logits: every one, the last of each sequence, or none.
        """
        with trace.span("BASE_DECODE_STEP"):
            with trace.span("target.embed"):
                hidden = F.embedding(tokens, self.embedding)
            trace.tap("target.embed", hidden, at.valid)
            cos, sin = rope_tables(self.rope_frequencies, self.rope_scale, at.positions, self.dtype)
            captured = []
            for layer in range(self.geometry.n_layers):
                if layer in self.taps:
                    captured.append(hidden)
                hidden = self._layer(layer, hidden, cos, sin, at, view, trace)
            if self.geometry.n_layers in self.taps:
                captured.append(hidden)
            taps = torch.cat(captured, dim=-1) if captured else hidden[..., :0]
            trace.tap("target.taps", taps, at.valid)
            if head == "none":
                return TargetOutput(None, taps)
            rows = slice(-1, None) if head == "last" else slice(None)
            return TargetOutput(self._logits(hidden[:, rows], at.valid[:, rows], trace), taps)

    def _layer(
        self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, at: Pass, view: KVRows, trace: Trace
    ) -> Tensor:
        block, eps = self.blocks[layer], self.geometry.block.rms_norm_eps
        with trace.span(f"target.{layer}.attn"):
            q, k, v = block.qkv(rms_norm_reference(hidden, self.attn_norms[layer], eps))
            q, k = rope_reference(q, cos, sin), rope_reference(k, cos, sin)
            hidden = hidden + block.attend(q, k, v, layer, view, at)
        trace.tap(f"target.{layer}.attn", hidden, at.valid)
        with trace.span(f"target.{layer}.mlp"):
            hidden = hidden + block.mlp(rms_norm_reference(hidden, self.mlp_norms[layer], eps))
        trace.tap(f"target.{layer}.mlp", hidden, at.valid)
        return hidden

    def _logits(self, hidden: Tensor, valid: Tensor, trace: Trace) -> Tensor:
        with trace.span("target.head"):
            normed = rms_norm_reference(hidden, self.final_norm, self.geometry.block.rms_norm_eps)
            logits = self.head(normed)
        trace.tap("target.norm", normed, valid)
        trace.tap("target.head", logits, valid)
        return logits
