"""The EAGLE-3 draft head, stage by stage.

Entry j of a sequence pairs the target's taps at position j with token j + 1 and predicts token j + 2. Chained levels
feed the head's own output back in place of the fused taps. Source: EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.checkpoint.draft import DraftCheckpoint
from eagle3core.kernels.layer.rms_norm import rms_norm_reference
from eagle3core.kernels.layer.rope import rope_reference, rope_tables
from eagle3core.model.block import Block, KVRows, Linear, Pass
from eagle3core.model.target import TargetModel
from eagle3core.trace import Trace
from eagle3core.weights.rope import rope_frequencies


class DraftOutput(NamedTuple):
    """What a pass over the draft gives.

    Attributes:
        feedback: `[B, T, Hd]` the layer's output before the final norm, fed to the next level.
        logits: `[B, n, Vd]` over the draft vocabulary for the rows asked for; None when none were.
    """

    feedback: Tensor
    logits: Tensor | None


class DraftModel:
    """Weights of the draft on one device; shares the target's embedding or head where the checkpoint brings none."""

    def __init__(self, checkpoint: DraftCheckpoint, target: TargetModel) -> None:
        weights, geometry = checkpoint.weights, checkpoint.geometry
        self.geometry = geometry
        self.fc = Linear(weights["fc.weight"])
        self.block = Block(weights, "midlayer.", geometry.block)
        self.embed_norm = weights["midlayer.input_layernorm.weight"]
        self.hidden_norm = weights["midlayer.hidden_norm.weight"]
        self.mlp_norm = weights["midlayer.post_attention_layernorm.weight"]
        self.final_norm = weights["norm.weight"]
        self.embedding = weights["embed_tokens.weight"] if geometry.has_embedding else target.embedding
        self.lm_head = Linear(weights["lm_head.weight"]) if geometry.has_head else target.head
        self.draft_to_target = checkpoint.draft_to_target
        self.target_to_draft = _inverse(checkpoint.draft_to_target, geometry.vocab_size)
        frequencies, self.rope_scale = rope_frequencies(geometry.block.rope, geometry.block.head_dim)
        self.rope_frequencies = frequencies.to(self.fc.weight.device)

    def own_tensors(self) -> Iterable[Tensor]:
        """Every weight the draft does not share with the target."""
        tensors = [self.fc.weight, self.embed_norm, self.hidden_norm, self.mlp_norm, self.final_norm]
        tensors += self.block.tensors()
        tensors += [self.embedding] if self.geometry.has_embedding else []
        return tensors + ([self.lm_head.weight] if self.geometry.has_head else [])

    def extend(
        self, taps: Tensor, tokens: Tensor, at: Pass, view: KVRows, trace: Trace, head_rows: Tensor | None
    ) -> DraftOutput:
        """Pass over entries made of true target taps `[B, T, n_taps * H]` and tokens `[B, T]` int64.

        `head_rows: [B]` names the row of each sequence whose logits are wanted; None wants none.
        """
        with trace.span("EagleModule::forward"):
            trace.tap("draft.taps", taps, at.valid)
            with trace.span("draft.fc"):
                hidden = self.fuse(taps)
            return self._layer(hidden, tokens, at, view, trace, head_rows)

    def chain(self, feedback: Tensor, tokens: Tensor, at: Pass, view: KVRows, trace: Trace) -> DraftOutput:
        """Pass over drafted tokens `[B, T]` with the parents' own output `[B, T, Hd]`; logits of every row."""
        with trace.span("EagleModule::forward"):
            trace.tap("draft.feedback_in", feedback, at.valid)
            return self._layer(feedback, tokens, at, view, trace, None, every_row=True)

    def fuse(self, taps: Tensor) -> Tensor:
        """h = fc(taps), `[B, T, Hd]`."""
        return self.fc(taps)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the token table, `[B, T, Hd]`, by target ids."""
        return F.embedding(tokens, self.embedding)

    def concat(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Attention input `[B, T, 2 Hd]`: normed embedding first, normed hidden state second."""
        eps = self.geometry.block.rms_norm_eps
        normed = (
            rms_norm_reference(embedded, self.embed_norm, eps),
            rms_norm_reference(hidden, self.hidden_norm, eps),
        )
        return torch.cat(normed, dim=-1)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, T, H, D]`, k and v `[B, T, K, D]`, before rotation."""
        return self.block.qkv(x)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k rotated to `positions: [B, T]`."""
        cos, sin = rope_tables(self.rope_frequencies, self.rope_scale, positions, q.dtype)
        return rope_reference(q, cos, sin), rope_reference(k, cos, sin)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, view: KVRows, at: Pass) -> Tensor:
        """Projected attention output `[B, T, Hd]`; writes k and v to the draft's cache."""
        return self.block.attend(q, k, v, 0, view, at)

    def mlp(self, residual: Tensor) -> Tensor:
        """Feed-forward of the normed residual stream, `[B, T, Hd]`."""
        return self.block.mlp(rms_norm_reference(residual, self.mlp_norm, self.geometry.block.rms_norm_eps))

    def feed_back(self, output: Tensor) -> Tensor:
        """State handed to the next level: the layer's output as it is, not normed."""
        return output

    def head(self, normed: Tensor) -> Tensor:
        """Logits over the draft vocabulary, `[B, n, Vd]`."""
        return self.lm_head(normed)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target-vocabulary ids of draft-vocabulary ids, same shape."""
        return draft_ids if self.draft_to_target is None else self.draft_to_target[draft_ids]

    def to_draft_ids(self, target_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids of target ids, same shape; -1 for a token the draft cannot propose."""
        return target_ids if self.target_to_draft is None else self.target_to_draft[target_ids]

    def _layer(
        self,
        hidden: Tensor,
        tokens: Tensor,
        at: Pass,
        view: KVRows,
        trace: Trace,
        head_rows: Tensor | None,
        *,
        every_row: bool = False,
    ) -> DraftOutput:
        trace.tap("draft.tokens", tokens, at.valid)
        trace.tap("draft.positions", at.positions, at.valid)
        trace.tap("draft.fc", hidden, at.valid)
        residual = hidden + self._attention(hidden, tokens, at, view, trace)
        with trace.span("EAGLE_DRAFT_FFN"), trace.span("draft.mlp"):
            forwarded = self.mlp(residual)
        trace.tap("draft.mlp", forwarded, at.valid)
        output = residual + forwarded
        feedback = self.feed_back(output)
        trace.tap("draft.feedback", feedback, at.valid)
        if not every_row and head_rows is None:
            return DraftOutput(feedback, None)
        valid = at.valid
        if head_rows is not None:
            rows = torch.arange(len(head_rows), device=head_rows.device)
            output, valid = output[rows, head_rows][:, None], valid[rows, head_rows][:, None]
        return DraftOutput(feedback, self._logits(output, valid, trace))

    def _attention(self, hidden: Tensor, tokens: Tensor, at: Pass, view: KVRows, trace: Trace) -> Tensor:
        with trace.span("EAGLE_DRAFT_ATTENTION_FMHA"):
            with trace.span("draft.qkv"):
                x = self.concat(self.embed(tokens), hidden)
                q, k, v = self.qkv(x)
            trace.tap("draft.concat", x, at.valid)
            trace.tap("draft.qkv", torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1), at.valid)
            with trace.span("draft.attn"):
                q, k = self.rotate(q, k, at.positions)
                attended = self.attend(q, k, v, view, at)
            trace.tap("draft.rope", torch.cat([q.flatten(2), k.flatten(2)], dim=-1), at.valid)
            trace.tap("draft.attn", attended, at.valid)
        return attended

    def _logits(self, output: Tensor, valid: Tensor, trace: Trace) -> Tensor:
        with trace.span("EAGLE_DRAFT_LM_HEAD"), trace.span("draft.head"):
            normed = rms_norm_reference(output, self.final_norm, self.geometry.block.rms_norm_eps)
            logits = self.head(normed)
        trace.tap("draft.norm", normed, valid)
        trace.tap("draft.head", logits, valid)
        return logits


def _inverse(draft_to_target: Tensor | None, vocab_size: int) -> Tensor | None:
    """`[V]` int64 draft id of each target id, -1 where there is none; None when both vocabularies are one."""
    if draft_to_target is None:
        return None
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_to_target.device)
    inverse[draft_to_target] = torch.arange(len(draft_to_target), device=draft_to_target.device)
    return inverse
