"""How long prompts may keep running requests from their next step, counted in rows.

Rows, not time: what is run next must not depend on a clock, or the same requests would be decoded beside others from
run to run, which where plain torch computes may turn a near-tie. A pass of few rows takes as long as one of
`LEAST_ROWS`, since it reads the same weights.
"""

from __future__ import annotations

# An H200 reads a chunk of 512 rows of an 8B target in about 31 ms and steps in 4.6 ms (README, "Three numbers"): a step
# costs about what 512 * 4.6 / 31 = 76 rows of a chunk cost, of which this is the power of two below.
LEAST_ROWS = 64

# A pass that owes more is too long for those that wait for it: at a share of one half eight steps, which 512 rows owe.
# Those take an H200 about 30 ms at the 8B shape, 45 behind 32K tokens, and longer passes read hardly faster.
MOST_OWED = 8 * LEAST_ROWS


class ReadingShare:
    """What prompts owe to the steps of the requests that run.

    Args:
        share: of the time that prompts and steps take together, what prompts may have while requests run; (0, 1].
    """

    def __init__(self, share: float) -> None:
        self._steps_per_row = (1.0 - share) / share
        self._owed = 0.0  # rows of steps; less than 0 where the last step was larger than what was owed

    @property
    def most_rows(self) -> float | None:
        """Rows of the largest pass that may be made while requests run; None: of any."""
        return MOST_OWED / self._steps_per_row if self._steps_per_row else None

    @property
    def may_read(self) -> bool:
        """Whether the next pass over prompts may be made before the next step."""
        return self._owed <= 0.0

    def read(self, rows: int) -> None:
        """Note that a pass of `rows` rows was made while requests run."""
        self._owed += max(rows, LEAST_ROWS) * self._steps_per_row

    def stepped(self, rows: int) -> None:
        """Note that a step of `rows` rows was made; it pays what is owed and nothing in advance."""
        if self._owed > 0.0:
            self._owed -= max(rows, LEAST_ROWS)

    def forget(self) -> None:
        """Owe nothing, since nothing runs."""
        self._owed = 0.0
