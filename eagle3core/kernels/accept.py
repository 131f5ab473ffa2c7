"""Greedy acceptance: the longest path from the root on which every node equals the target's choice after its parent.

Source: EAGLE, arXiv 2401.15077, section 4; docs/requirements.md R-51..R-54.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Acceptance(NamedTuple):
    """What one verify step decided, per sequence.

    Attributes:
        n_accepted: `[B]` int64 drafts accepted, the root not counted.
        path: `[B, depth + 1]` int64 node indices root first, -1 past the last accepted node.
        tokens: `[B, depth + 1]` int64 tokens to commit: the accepted drafts, then the bonus; -1 after it.
        bonus: `[B]` int64 the target's own next token, root of the next step.
    """

    n_accepted: Tensor
    path: Tensor
    tokens: Tensor
    bonus: Tensor


def argmax_reference(logits: Tensor) -> Tensor:
    """Index of the largest entry of `[..., V]`; of equal ones the lowest index, on every device."""
    largest = logits.max(dim=-1, keepdim=True).values
    index = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == largest, index, logits.shape[-1]).min(dim=-1).values


def accept_greedy_reference(node_tokens: Tensor, choices: Tensor, parents: Tensor, depths: Tensor) -> Acceptance:
    """Accepted path of every sequence.

    Args:
        node_tokens: `[B, N]` int64 tokens of the tree, node 0 the root.
        choices: `[B, N]` int64 the target's choice after each node.
        parents: `[N]` int64, -1 for the root; a parent precedes its children.
        depths: `[N]` int64, 0 for the root.
    """
    batch, n_nodes = node_tokens.shape
    accepted = torch.zeros(batch, n_nodes, dtype=torch.bool, device=node_tokens.device)
    accepted[:, 0] = True
    for node in range(1, n_nodes):
        parent = int(parents[node])
        accepted[:, node] = accepted[:, parent] & (node_tokens[:, node] == choices[:, parent])
    # Of several deepest nodes, which only equal siblings can give, the earliest wins.
    last = argmax_reference(torch.where(accepted, depths, -1))  # [B]
    n_accepted = depths[last]
    width = int(depths.max()) + 1
    path = torch.full((batch, width), -1, dtype=torch.int64, device=node_tokens.device)
    node_at = last
    for level in range(width - 1, -1, -1):
        here = n_accepted >= level
        path[:, level] = torch.where(here, node_at, -1)
        node_at = torch.where(here, parents[node_at].clamp_min(0), node_at)
    bonus = choices.gather(1, last[:, None])[:, 0]
    on_path = node_tokens.gather(1, path.clamp_min(0)).where(path >= 0, -1)
    tokens = torch.cat([on_path[:, 1:], torch.full_like(path[:, :1], -1)], dim=1)  # drop the root, make room for bonus
    tokens = tokens.scatter(1, n_accepted[:, None], bonus[:, None])
    return Acceptance(n_accepted, path, tokens, bonus)
