"""From logits to tokens: the largest, the k largest, a sample. One file a card.

Imports `isa`, `tree` and the kernels' door alone.
"""

from eagle3core.kernels.choice.top_k import top_k_cost

__all__ = [
    "top_k_cost",
]
