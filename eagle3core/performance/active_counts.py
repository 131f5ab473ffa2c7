"""How many slots took part in the steps of a run and what they accepted: one line at its end, in performance mode.

Source: docs/requirements.md R-87.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ActiveCounts:
    """Counts of one run.

    Attributes:
        n_slots: that the engine has.
        active: slots that took part, by step.
        n_rows, n_accepted: results of slots that were still decoding, and the drafts accepted in them.
    """

    n_slots: int
    active: list[int] = field(default_factory=list)
    n_rows: int = 0
    n_accepted: int = 0

    @property
    def n_left_out(self) -> int:
        """Slots that did no work in a step because they were finished or empty, summed over the steps."""
        return sum(self.n_slots - n for n in self.active)

    @property
    def accepted_a_row(self) -> float:
        """Accepted drafts a step and active slot; 0 without steps."""
        return self.n_accepted / self.n_rows if self.n_rows else 0.0

    def line(self) -> str:
        """For the log, under the names of the requirement."""
        active = self.active or [0]
        return (
            f"{len(self.active)} steps, active_count avg {sum(active) / len(active):.2f} min {min(active)} "
            f"max {max(active)} of {self.n_slots}, disabled_finished {self.n_left_out}, "
            f"effective_accept_per_active_slot {self.accepted_a_row:.3f}"
        )
