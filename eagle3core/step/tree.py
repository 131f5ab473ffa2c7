"""The trees a step verifies: one known beforehand, as flat arrays, or one that the draft grows in the step.

A chain is the tree with one child a node and plain decoding the tree with a root alone, so all run through the same
pass. Source: SpecInfer, arXiv 2305.09781, section 4 (tree attention); EAGLE-2, arXiv 2406.16858, section 4;
docs/requirements.md R-37, R-39, R-42, R-43, R-53.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle3core.errors import ConfigError
from eagle3core.kernels.tree.growth import pool_size


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

    @cached_property
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


@dataclass(frozen=True)
class GrownTree:
    """A tree whose nodes are found in the step: every node of a beam has `top_k` candidates, and the `top_k` best of a
    level are the next beam; of all candidates the best `n_nodes` - 1 are the drafts.

    Attributes:
        top_k: candidates of a node, and nodes of a beam.
        max_depth: levels of candidates; the longest path in drafts.
        n_nodes: nodes that are verified, the root included.
        scores: fixed log-probabilities of a static tree, `[max_depth, top_k, top_k]` f32: by level, place in the beam
            and rank (of level 0 the first row alone); None where the draft's own decide.
    """

    top_k: int
    max_depth: int
    n_nodes: int
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        pool = pool_size(self.top_k, self.max_depth)
        if min(self.top_k, self.max_depth) < 1 or not 2 <= self.n_nodes <= pool + 1:
            raise ConfigError(
                f"a tree of {self.n_nodes} nodes by {self.max_depth} levels with top_k {self.top_k}",
                f"at least 1 level and candidate, and 2..{pool + 1} nodes, the root and what the levels score",
                "lower max_decoding_tokens, or raise num_speculative_tokens or the tree's top_k",
            )

    @property
    def beam_rows(self) -> int:
        """Cache rows that the beams of all passes of the draft take beyond the committed ones."""
        return (self.max_depth - 1) * self.top_k


def chain_tree(n_drafts: int) -> FlatTree:
    """The tree with one child a node: root and `n_drafts` drafts; 0 gives plain decoding."""
    return FlatTree(tuple(range(-1, n_drafts)))
