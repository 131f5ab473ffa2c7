"""An invariant that broke in a row of a step: what is said of it, and whether anything can go on.

Source: docs/requirements.md R-62.
"""

from __future__ import annotations

import logging

from eagle3core.kernels.slots.slot_state import NO_ROOM, NOT_FINITE
from eagle3core.performance import mode as performance_mode
from eagle3core.step.outcome import RowOutcome

log = logging.getLogger("eagle3core")


def report_fault(row: RowOutcome, number: int) -> None:
    """Say that an invariant broke in step `number`: the slot goes on as the baseline would, or nothing can go on.

    Raises:
        InvariantViolated: in performance mode, or when the slot has no room left.
    """
    broken = performance_mode.broken_by_fault(row.slot, row.fault, number)
    is_of_engine = row.fault & ~NOT_FINITE  # numbers that overflow are the model's, and no reason to end a batch
    if row.fault & NO_ROOM or (is_of_engine and performance_mode.is_on()):
        raise broken
    log.error("[EAGLE] slot %d goes on without its drafts: %s", row.slot, broken)
