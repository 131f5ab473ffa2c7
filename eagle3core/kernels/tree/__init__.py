"""Draft trees on the device: growing, choosing, masking and accepting them. One file a card.

Imports `isa` and the kernels' door alone.
"""

from eagle3core.kernels.tree.grow_tree import grow_tree_cost

# What the lab may use; of `tree_masks` the file, for the shapes of a tree's buffers.
__all__ = ["grow_tree_cost", "tree_masks"]
