"""A draft tree as flat arrays, the one shape that verification knows.

A chain is the tree with one child a node and plain decoding the tree with a root alone, so all three run through the
same pass. Source: SpecInfer, arXiv 2305.09781, section 4 (tree attention); docs/requirements.md R-42, R-43, R-53.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle3core.errors import ConfigError


@dataclass(frozen=True)
class FlatTree:
    """A tree of N nodes, node 0 the root (the last sampled token), parents before children.

    Attributes:
        parents: parent index of each node, -1 for the root.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ConfigError(
                f"tree parents are {self.parents!r}", "a list that starts with -1, the root", "put the root first"
            )
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ConfigError(
                    f"node {node} has parent {parent}",
                    f"an earlier node, 0..{node - 1}",
                    "sort parents before children",
                )

    @property
    def n_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> Tensor:
        """`[N]` int64 distance from the root; also the offset of a node's position from the root's."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return torch.tensor(depths, dtype=torch.int64)

    @property
    def max_depth(self) -> int:
        """Longest root-to-leaf path in drafts."""
        return int(self.depths.max())

    @cached_property
    def mask(self) -> Tensor:
        """`[N, N]` bool: row i sees column j when j is i or an ancestor of i."""
        mask = torch.eye(self.n_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    @cached_property
    def paths(self) -> Tensor:
        """`[leaves, max_depth + 1]` int64 node indices from the root to each leaf, padded with -1, in leaf order."""
        inner = set(self.parents)
        leaves = [node for node in range(self.n_nodes) if node not in inner]
        rows = torch.full((len(leaves), self.max_depth + 1), -1, dtype=torch.int64)
        for row, leaf in enumerate(leaves):
            node = leaf
            while node >= 0:
                rows[row, self.depths[node]] = node
                node = self.parents[node]
        return rows


def chain_tree(n_drafts: int) -> FlatTree:
    """The tree with one child a node: root and `n_drafts` drafts; 0 gives plain decoding."""
    return FlatTree(tuple(range(-1, n_drafts)))


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
