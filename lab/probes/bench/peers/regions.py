"""A plain-torch step as pure functions of tensors, cut where attention is: what runs as it is, or through a compiler.

Between two attentions lie a map out, a residual, the feed-forward, and the next layer's norm, map in and rotation: one
region, so that a compiler may join all of it. Weights are arguments, so one compilation serves all layers of a width.
Keys and values are written into the views of the cache they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.geometry import BlockGeometry
from lab.probes.bench.peers.fused import FusedDraft, FusedLayer


@dataclass
class Place:
    """Where the rows of a pass go in one layer.

    Attributes:
        cos, sin: `[T, 1, D]`, the sines signed. k, v: `[B, K, T, D]` views of the caches.
    """

    cos: Tensor
    sin: Tensor
    k: Tensor
    v: Tensor


def norm(x: Tensor, gain: Tensor, block: BlockGeometry) -> Tensor:
    """Root-mean-square norm."""
    return F.rms_norm(x, (x.shape[-1],), gain, block.rms_norm_eps)


def project(x: Tensor, layer: FusedLayer, at: Place, block: BlockGeometry) -> Tensor:
    """Queries `[B, T, H, D]` of `x: [B, T, in]`; turned keys, and values, go to their place."""
    heads = F.linear(x, layer.qkv).view(*x.shape[:2], -1, block.head_dim)
    turned, v = heads[:, :, : -block.n_kv_heads], heads[:, :, -block.n_kv_heads :]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = turned.tensor_split([block.n_heads], dim=2)
        turned = torch.cat([norm(q, layer.q_norm, block), norm(k, layer.k_norm, block)], dim=2)
    turned = torch.addcmul(turned * at.cos, turned.roll(block.head_dim // 2, -1), at.sin)
    q, k = turned[:, :, : block.n_heads], turned[:, :, block.n_heads :]
    at.k.copy_(k.transpose(1, 2))
    at.v.copy_(v.transpose(1, 2))
    return q


def feed_forward(hidden: Tensor, layer: FusedLayer, block: BlockGeometry) -> Tensor:
    """The stream after the gated feed-forward."""
    gate, up = F.linear(norm(hidden, layer.mlp_norm, block), layer.gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, layer.down)


def attended(hidden: Tensor, mixed: Tensor, layer: FusedLayer) -> Tensor:
    """The stream after attention, whose mixed values are `mixed: [B, T, H, D]`."""
    return hidden + F.linear(mixed.flatten(2), layer.out)


def opening(tokens: Tensor, table: Tensor, layer: FusedLayer, at: Place, block: BlockGeometry) -> tuple[Tensor, Tensor]:
    """Stream and first queries of `tokens: [B, T]`."""
    hidden = F.embedding(tokens, table)
    return hidden, project(norm(hidden, layer.input_norm, block), layer, at, block)


def between(
    hidden: Tensor, mixed: Tensor, layer: FusedLayer, following: FusedLayer, at: Place, block: BlockGeometry
) -> tuple[Tensor, Tensor]:
    """Stream after `layer`, and queries of the following one."""
    hidden = feed_forward(attended(hidden, mixed, layer), layer, block)
    return hidden, project(norm(hidden, following.input_norm, block), following, at, block)


def closing(
    hidden: Tensor, mixed: Tensor, layer: FusedLayer, final_norm: Tensor, head: Tensor, block: BlockGeometry
) -> tuple[Tensor, Tensor]:
    """Stream after the last layer, and greedy choices `[B, T]`."""
    hidden = feed_forward(attended(hidden, mixed, layer), layer, block)
    return hidden, F.linear(norm(hidden, final_norm, block), head).argmax(-1)


def draft_opening(
    hidden: Tensor, tokens: Tensor, table: Tensor, draft: FusedDraft, at: Place, block: BlockGeometry
) -> Tensor:
    """The draft's queries, from the target's (or its own) stream and the tokens that follow."""
    embedded = norm(F.embedding(tokens, table), draft.layer.input_norm, block)
    x = torch.cat([embedded, norm(hidden, draft.hidden_norm, block)], -1)
    return project(x, draft.layer, at, block)


def draft_closing(
    hidden: Tensor, mixed: Tensor, draft: FusedDraft, pick: Tensor | None, block: BlockGeometry
) -> tuple[Tensor, Tensor]:
    """Feedback and proposed target ids `[B]` of the row that `pick: [B]` names, or of the only one."""
    hidden = attended(hidden, mixed, draft.layer)
    if pick is not None:
        hidden = hidden.gather(1, pick[:, None, None].expand(-1, 1, hidden.shape[-1]))
    hidden = feed_forward(hidden, draft.layer, block)
    ids = F.linear(norm(hidden, draft.final_norm, block), draft.head).argmax(-1)[:, 0]
    return hidden, ids if draft.draft_to_target is None else draft.draft_to_target[ids]


def accepting(tree: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts hold `[B]`, and the token after them `[B]`, of `tree, choices: [B, k + 1]`."""
    n_accepted = (choices[:, :-1] == tree[:, 1:]).long().cumprod(1).sum(1)
    return n_accepted, choices.gather(1, n_accepted[:, None])[:, 0]


@dataclass(frozen=True)
class Regions:
    """The functions of a step, as they are or compiled."""

    opening: Callable[..., tuple[Tensor, Tensor]] = opening
    between: Callable[..., tuple[Tensor, Tensor]] = between
    closing: Callable[..., tuple[Tensor, Tensor]] = closing
    draft_opening: Callable[..., Tensor] = draft_opening
    draft_closing: Callable[..., tuple[Tensor, Tensor]] = draft_closing
    accepting: Callable[..., tuple[Tensor, Tensor]] = accepting
