"""What lies between the matrices of a layer: norms, rotation, embeddings, rows by index. One file a card.

Imports `isa` and the kernels' door alone.
"""
