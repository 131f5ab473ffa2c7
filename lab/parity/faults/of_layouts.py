"""Misreadings: keys of a published head that a loader takes for something else, one name a key.

The head is read again from its files and then changed as a loader that has the key wrong would have it; parity's
reference reads the files itself, so it parts from the engine at the first stage that the key decides. A key that says
one of two things is read as the other, whichever the head has, so that every head shows it; what else a head must have
stands in `needs`. Keys and meanings: docs/checkpoints.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle3core.checkpoint import DraftCheckpoint
from lab.parity.faults.fault import Fault

WINDOW = 4  # positions: shorter than any prompt of more than one word
_ROTATED = tuple(f"midlayer.self_attn.{name}_" for name in "qk")


def _as_if(head: DraftCheckpoint, **variant: Any) -> DraftCheckpoint:
    return replace(head, geometry=replace(head.geometry, variant=replace(head.geometry.variant, **variant)))


def _block_as_if(head: DraftCheckpoint, **block: Any) -> DraftCheckpoint:
    return replace(head, geometry=replace(head.geometry, block=replace(head.geometry.block, **block)))


def _with_ones(head: DraftCheckpoint, *names: str, width: int) -> DraftCheckpoint:
    """With gains of one for norms that the file does not have."""
    like = head.weights["norm.weight"]
    return replace(head, weights={**{name: torch.ones_like(like[:1]).expand(width) for name in names}, **head.weights})


def _residual(head: DraftCheckpoint) -> DraftCheckpoint:
    return _as_if(head, normed_residual=not head.geometry.variant.normed_residual)


def _feedback(head: DraftCheckpoint) -> DraftCheckpoint:
    return _as_if(head, feeds_normed=not head.geometry.variant.feeds_normed)


def _norm_over_all(head: DraftCheckpoint) -> DraftCheckpoint:
    geometry = head.geometry
    if geometry.variant.fusion_norm != "none":
        return _as_if(head, fusion_norm="none")
    width = len(geometry.taps) * geometry.target_hidden_size
    return _as_if(_with_ones(head, "input_norm.weight", width=width), fusion_norm="all")


def _norm_of_each(head: DraftCheckpoint) -> DraftCheckpoint:
    geometry = head.geometry
    if geometry.variant.fusion_norm != "none":
        return _as_if(head, fusion_norm="none")
    names = [f"fc_norm.{i}.weight" for i in range(len(geometry.taps))]
    return _as_if(_with_ones(head, *names, width=geometry.target_hidden_size), fusion_norm="each")


def _activation(head: DraftCheckpoint) -> DraftCheckpoint:
    return _as_if(head, activation="gelu" if head.geometry.variant.activation == "silu" else "silu")


def _logit_scale(head: DraftCheckpoint) -> DraftCheckpoint:
    return _as_if(head, logit_scale=0.5 if head.geometry.variant.logit_scale == 1.0 else 1.0)


def _interleaved(head: DraftCheckpoint) -> DraftCheckpoint:
    """Pairs that lie half a head apart taken for neighbours."""

    def exchanged(rows: Tensor) -> Tensor:
        halves = rows.view(-1, 2, head.geometry.block.head_dim // 2, *rows.shape[1:])  # [heads, 2, D / 2, ...]
        return halves.transpose(1, 2).reshape(rows.shape).contiguous()

    changed = {name: exchanged(rows) for name, rows in head.weights.items() if name.startswith(_ROTATED)}
    return replace(head, weights={**head.weights, **changed})


def _rope_base(head: DraftCheckpoint) -> DraftCheckpoint:
    rope = head.geometry.block.rope
    return _block_as_if(head, rope=replace(rope, theta=4 * rope.theta))


def _taps(head: DraftCheckpoint) -> DraftCheckpoint:
    """Outputs taken for inputs; where a tap is the first layer's input already, the other way round."""
    taps = head.geometry.taps
    by = -1 if taps and min(taps) > 0 else 1
    return replace(head, geometry=replace(head.geometry, taps=tuple(tap + by for tap in taps)))


def _map(head: DraftCheckpoint) -> DraftCheckpoint:
    ids = head.draft_to_target
    return head if ids is None else replace(head, draft_to_target=ids.roll(1))


def _norms_of_heads(head: DraftCheckpoint) -> DraftCheckpoint:
    block = head.geometry.block
    if block.has_qk_norm:
        return _block_as_if(head, has_qk_norm=False)
    names = [f"midlayer.self_attn.{name}_norm.weight" for name in "qk"]
    return _block_as_if(_with_ones(head, *names, width=block.head_dim), has_qk_norm=True)


def _window(head: DraftCheckpoint) -> DraftCheckpoint:
    return replace(head, geometry=replace(head.geometry, window=0 if head.geometry.window else WINDOW))


LAYOUT_FAULTS = (
    Fault(
        "misread_norm_before_residual", "the residual is taken on the other side of the input's norm",
        "draft.attn", "extend", misread=_residual,
    ),
    Fault(
        "misread_norm_output", "the state fed back is taken on the other side of the final norm", "draft.feedback",
        "extend", needs="k >= 2", misread=_feedback,
    ),
    Fault(
        "misread_norm_before_fc", "the norm over all taps is left out, or one added", "draft.fc", "prefill",
        misread=_norm_over_all,
    ),
    Fault(
        "misread_fc_norm", "the norm of each tap is left out, or one added", "draft.fc", "prefill",
        misread=_norm_of_each,
    ),
    Fault("misread_hidden_act", "silu is taken for gelu, others for silu", "draft.feedback", "extend",
          needs="plain torch: kernels compute silu alone", misread=_activation),
    Fault(
        "misread_logit_scale", "the factor of the logits is left out, or one half taken", "draft.norm", "extend",
        misread=_logit_scale,
    ),
    Fault(
        "misread_rope_style", "pairs half a head apart are taken for neighbours", "draft.qkv", "prefill",
        misread=_interleaved,
    ),
    Fault("misread_rope_theta", "the rotary base is four times as large", "draft.rope", "prefill",
          misread=_rope_base),
    Fault("misread_taps", "outputs of layers are taken for their inputs", "target.taps", "prefill", misread=_taps),
    Fault(
        "misread_d2t", "the vocabulary map is one row off", "draft.tokens", "chain1",
        needs="a draft vocabulary smaller than the target's, and k >= 2", misread=_map,
    ),
    Fault(
        "misread_qk_norm", "norms of the heads of q and k are left out, or added", "draft.rope", "prefill",
        misread=_norms_of_heads,
    ),
    Fault("misread_sliding_window", f"a window is left out, or one of {WINDOW} taken", "draft.attn", "extend",
          misread=_window),
    Fault(
        "misread_attention_bias", "biases of q, k and v are left out", "draft.qkv", "prefill",
        needs="a head with such biases", misread=lambda head: _as_if(head, qkv_bias=False),
    ),
    Fault(
        "misread_tied_head", "the target's output head is taken for the tied one", "draft.head", "extend",
        needs="a head tied to an embedding of its own", misread=lambda head: _as_if(head, tied_head=False),
    ),
)  # fmt: skip
