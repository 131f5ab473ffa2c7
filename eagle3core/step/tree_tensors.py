"""Device memory of a tree that the draft grows: candidates, beams, the nodes, and what verification needs of them.

Allocated once for all slots; a smaller batch uses the first elements (docs/requirements.md R-25, R-47).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.kernels.isa.powers import PIECE
from eagle3core.kernels.tree.grow_tree import Offers
from eagle3core.kernels.tree.growth import Growth, new_growth, pool_size
from eagle3core.kernels.tree.select_tree import Counts, Selection
from eagle3core.kernels.tree.tree_masks import TreeMasks, new_tree_masks
from eagle3core.step.buffers import rows_of
from eagle3core.step.tree import GrownTree


@dataclass(frozen=True)
class TreeTensors:
    """A grown tree for each of S sequences; int32 unless said.

    Attributes:
        offers: room for the candidates of a beam's nodes.
        powers: `[S * k, V / 16]` f32 what the head leaves of every 16 logits beside the best.
        growth: scored candidates and the beam. counts: room for their ranks. selection: the nodes. masks: of the nodes.
    """

    offers: Offers
    powers: Tensor
    growth: Growth
    counts: Counts
    selection: Selection
    masks: TreeMasks

    def for_batch(self, batch: int) -> TreeTensors:
        """The same memory for the first `batch` sequences."""

        def first(tensor: Tensor) -> Tensor:
            return rows_of(tensor, batch, *tensor.shape[1:])

        return TreeTensors(
            Offers(*map(first, self.offers)), self.powers, Growth(*map(first, self.growth)),
            Counts(*map(first, self.counts)), Selection(*map(first, self.selection)),
            TreeMasks(*map(first, self.masks)),
        )  # fmt: skip


def new_tree_tensors(tree: GrownTree, slots: int, vocabulary: int, device: torch.device) -> TreeTensors:
    """Tensors for `slots` sequences and a draft of `vocabulary` tokens."""
    k, nodes, rows = tree.top_k, tree.n_nodes, slots * tree.top_k

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    return TreeTensors(
        offers=Offers(floats(slots, k, k), integers(slots, k, k), integers(slots)),
        powers=floats(rows, vocabulary // PIECE), growth=new_growth(slots, k, tree.max_depth, device),
        counts=Counts(integers(slots, pool_size(k, tree.max_depth)), integers(slots)),
        selection=Selection(*(integers(slots, nodes) for _ in Selection._fields)),
        masks=new_tree_masks(slots, nodes, tree.max_depth + 1, device),
    )  # fmt: skip
