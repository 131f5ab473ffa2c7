"""The bookkeeping of running sequences on the device: who runs, what a step works on, what it commits. One file a card.

Imports `isa` and the kernels' door alone.
"""

# What the lab may use: the file of that name.
__all__ = ["block_table"]
