"""A tree's paths to its leaves, and the tree of a mask: what recorded and packed trees are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from random_trees import ancestors
from torch import Tensor

from eagle3core.errors import ConfigError
from eagle3core.step.tree import FlatTree


def paths_of(tree: FlatTree) -> Tensor:
    """`[leaves, max_depth + 1]` int64 node indices from the root to each leaf, padded with -1, in leaf order."""
    leaves = [node for node in range(tree.n_nodes) if node not in tree.parents]
    rows = torch.full((len(leaves), tree.max_depth + 1), -1, dtype=torch.int64)
    for row, leaf in enumerate(leaves):
        line = ancestors(tree, leaf)
        rows[row, : len(line)] = torch.tensor(line)
    return rows


def tree_from_mask(mask: Tensor | Sequence[Sequence[int]]) -> FlatTree:
    """The tree whose ancestor-or-self mask `[N, N]` is given.

    Raises:
        ConfigError: a row that is not "self and the ancestors of some earlier node", or a mask that is not square.
    """
    rows = torch.as_tensor(mask).bool()
    if rows.ndim != 2 or rows.shape[0] != rows.shape[1] or rows.shape[0] == 0:
        raise ConfigError(f"tree mask has shape {tuple(rows.shape)}", "[N, N] with N >= 1", "give one square mask")
    parents = [-1]
    for node in range(1, rows.shape[0]):
        ancestors = rows[node, :node].nonzero()[:, 0]
        parents.append(int(ancestors[-1]) if len(ancestors) else -1)
    tree = FlatTree(tuple(parents))
    if not torch.equal(tree.mask, rows):
        raise ConfigError(
            "the tree mask is not the ancestor mask of any tree in parent-before-child order",
            "row i = row of its parent, plus itself",
            "sort the nodes so that parents precede children",
        )
    return tree
