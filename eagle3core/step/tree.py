"""A draft tree as flat arrays, the one shape that verification knows.

A chain is the tree with one child a node and plain decoding the tree with a root alone, so all three run through the
same pass. Source: SpecInfer, arXiv 2305.09781, section 4 (tree attention); docs/requirements.md R-42, R-43, R-53.
"""

from __future__ import annotations

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


def chain_tree(n_drafts: int) -> FlatTree:
    """The tree with one child a node: root and `n_drafts` drafts; 0 gives plain decoding."""
    return FlatTree(tuple(range(-1, n_drafts)))
