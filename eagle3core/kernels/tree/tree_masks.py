"""What verification needs of a tree, from its parents: masks, depths, positions, leaves, paths, and the linked list.

Mask words hold 32 nodes each, lowest bit first: bit j of row i says that node i sees node j, an ancestor or itself.
A path is a root-to-leaf row of node indices, leaves in node order, padded with -1. The linked list names each node's
first child and next sibling. A negative length marks a dead sequence: masks 0, no leaves, everything else -1 or 0.
Source: SpecInfer, arXiv 2305.09781, section 4; docs/requirements.md R-38, R-40, R-42, R-43, R-45.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.kernels.card import poison
from eagle3core.kernels.tree.mask_words import pack_words


class TreeMasks(NamedTuple):
    """Trees of N nodes, W = ceil(N / 32) words; int32 unless said.

    Attributes:
        mask: `[B, N, W]` ancestor-or-self words.
        depths, positions: `[B, N]` distance from the root; sequence length + depth.
        leaves: `[B, 4 ceil(N / 4)]` int8, 1 for a leaf.
        paths: `[B, N, P]` a row a leaf, then rows of -1.
        first_child, next_sibling: `[B, N]` node index or -1.
    """

    mask: Tensor
    depths: Tensor
    positions: Tensor
    leaves: Tensor
    paths: Tensor
    first_child: Tensor
    next_sibling: Tensor


def new_tree_masks(batch: int, nodes: int, path_len: int, device: torch.device) -> TreeMasks:
    """Poisoned outputs for `batch` trees."""

    def integers(*shape: int) -> Tensor:
        return poison(*shape, dtype=torch.int32, device=device)

    return TreeMasks(
        integers(batch, nodes, -(-nodes // 32)), integers(batch, nodes), integers(batch, nodes),
        poison(batch, -(-nodes // 4) * 4, dtype=torch.int8, device=device), integers(batch, nodes, path_len),
        integers(batch, nodes), integers(batch, nodes),
    )  # fmt: skip


def tree_masks_reference(parents: Tensor, lengths: Tensor, path_len: int) -> TreeMasks:
    """Everything of `TreeMasks` from `parents: [B, N]` (-1 for the root; parents first) and `lengths: [B]`."""
    (batch, nodes), device = parents.shape, parents.device
    node, above = torch.arange(nodes, device=device), parents.long()
    seen, depths = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=device), torch.zeros_like(above)
    here = node.expand(batch, -1)
    lines = [here]  # lines[d]: each node's ancestor d levels up, -1 above the root
    for _ in range(path_len):
        seen |= (here[:, :, None] == node) & (here >= 0)[:, :, None]
        here = above.gather(1, here.clamp_min(0)).where(here >= 0, -1)
        depths += here >= 0
        lines.append(here)
    is_sibling = (above[:, :, None] == above[:, None]) & (above >= 0)[:, :, None]  # [B, N, N]
    later = node > node[:, None]
    next_sibling = _first(is_sibling & later, node)
    first_child = _first(above[:, None] == node[:, None], node)
    leaves = first_child < 0
    paths = _paths(torch.stack(lines[:path_len], dim=2), depths, leaves)
    padded = torch.zeros(batch, -(-nodes // 4) * 4, dtype=torch.int8, device=device)
    padded[:, :nodes] = leaves
    is_dead = lengths < 0
    made = (pack_words(seen), depths, lengths[:, None] + depths, padded, paths, first_child, next_sibling)
    empty = (0, 0, 0, 0, -1, -1, -1)
    return TreeMasks(*(
        value.masked_fill(is_dead.view(-1, *(1,) * (value.ndim - 1)), nothing).to(
            torch.int8 if value is padded else torch.int32
        )
        for value, nothing in zip(made, empty, strict=True)
    ))  # fmt: skip


def _first(holds: Tensor, node: Tensor) -> Tensor:
    """`[B, N]` the first node of each row of `holds: [B, N, N]`, -1 where there is none."""
    return holds.int().argmax(-1).where(holds.any(-1), -1)


def _paths(lines: Tensor, depths: Tensor, leaves: Tensor) -> Tensor:
    """`[B, N, P]` root-to-leaf rows, leaves in node order first, from each node's ancestors `lines: [B, N, P]`."""
    at = depths[:, :, None] - torch.arange(lines.shape[2], device=lines.device)  # levels up to the node of depth p
    down = lines.gather(2, at.clamp(0, lines.shape[2] - 1)).where((at >= 0) & leaves[:, :, None], -1)
    order = leaves.int().sort(dim=1, descending=True, stable=True).indices
    return down.gather(1, order[:, :, None].expand_as(down))
