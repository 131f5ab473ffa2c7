"""The bookkeeping of running sequences on the device: who runs, what a step works on, what it commits. One file a card.

Imports `isa`, `tree` and the kernels' door alone.
"""

from eagle3core.kernels.slots.slot_state import REQUEST, REQUEST_ID, SPAN

# What the lab may use: names of the slots' numbers, and the file of that name.
__all__ = ["REQUEST", "REQUEST_ID", "SPAN", "block_table"]
