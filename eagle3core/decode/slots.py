"""Slots: which sequences a step works on, and how requests enter and leave."""

from __future__ import annotations

from torch import Tensor

from eagle3core.decode.state import DecodeState


def active_slots(active: Tensor) -> Tensor:
    """Indices `[A]` int64 of the active slots, ascending; finished slots cost a step nothing (R-81..R-83)."""
    return active.nonzero()[:, 0]


def first_free_slot(state: DecodeState) -> int | None:
    """Lowest slot without a request, or None."""
    free = (~state.active).nonzero()[:, 0]
    return int(free[0]) if len(free) else None


def release_slot(state: DecodeState, slot: int) -> None:
    """Empty `slot`: its blocks go back to the pools and its counters to zero."""
    state.active[slot] = False
    for row in (state.roots, state.lengths, state.draft_lengths, state.pending_counts):
        row[slot] = 0
    state.target_cache.truncate(slot, 0)
    if state.draft_cache is not None:
        state.draft_cache.truncate(slot, 0)
