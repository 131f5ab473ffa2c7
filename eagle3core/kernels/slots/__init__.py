"""The bookkeeping of running sequences on the device: who runs, what a step works on, what it commits. One file a card.

Imports `isa` and the kernels' door alone.
"""
