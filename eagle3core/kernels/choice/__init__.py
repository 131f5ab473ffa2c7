"""From logits to tokens: the largest, a sample. One file a card.

Imports `isa`, `tree` and the kernels' door alone.
"""
