"""Draft trees on the device: growing, choosing, masking and accepting them. One file a card.

Imports `isa` and the kernels' door alone.
"""
