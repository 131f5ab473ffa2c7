"""What the draft has not read, as whoever enqueues counts it: which kind of step may follow.

Kinds differ in how many entries their draft reads, and a step writes over the states that the one before left in its
rows. Slots are counted together, by the one that waits most. Source: derived here.
"""

from __future__ import annotations

from collections.abc import Mapping

from eagle3core.step.depths.kinds import KEEPS, READS, StepKind


class Unread:
    """The account, in the order in which work is enqueued.

    Args:
        kinds: of the engine. n_kept: places of a slot for states of steps without drafts.

    Attributes:
        most: entries that wait in some slot, at most.
    """

    def __init__(self, kinds: Mapping[int, StepKind], n_kept: int) -> None:
        self._kinds, self._n_kept = kinds, n_kept
        self.most = 1  # a prompt leaves one
        self._lie_in_step = False  # the states of the newest step lie where the next one writes its own

    def kind_for(self, depth: int) -> int:
        """The kind of the next step, if `depth` drafts are wanted: with too many entries waiting the draft reads them
        first, in a step without drafts."""
        if KEEPS not in self._kinds:
            return depth
        if depth:
            return depth if self.most <= self._kinds[depth].entries else READS
        return READS if self._lie_in_step or self.most >= self._n_kept else KEEPS

    def ran(self, kind: int) -> None:
        """Note a step that was enqueued."""
        self._lie_in_step = kind > READS
        self.most = self.most + 1 if kind == KEEPS else max(kind, 0) + 1

    def forget(self) -> None:
        """No slot holds anything."""
        self.most, self._lie_in_step = 1, False
