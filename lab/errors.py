"""Errors of the lab: each says what is wrong, what is allowed, what to do, and which exit code it means.

`LabError` stands apart from `eagle3core.errors.Eagle3Error` (same three parts) so that reading, comparing and drawing
stored rows never imports the engine.

    LabError               3
      ExperimentError      2   a command, parameter or file that was not usable as given
      GateFailed           1   the work was done and a gate did not hold
      NotComparable        2   two runs, or a file and this version, that must not be compared
      RunFailed            3   the work could not be done
"""

from __future__ import annotations

EXIT_PASSED = 0
EXIT_GATE_FAILED = 1
EXIT_USAGE = 2
EXIT_COULD_NOT_RUN = 3
EXIT_UNDECIDED = 4


class LabError(Exception):
    """An error in three parts.

    Args:
        what: what is wrong, with the offending value.
        allowed: what would have been accepted.
        remedy: what the reader can do next.
    """

    exit_code = EXIT_COULD_NOT_RUN

    def __init__(self, what: str, allowed: str, remedy: str) -> None:
        self.what = what
        self.allowed = allowed
        self.remedy = remedy
        super().__init__(what, allowed, remedy)

    def __str__(self) -> str:
        return f"{self.what}\n  allowed: {self.allowed}\n  do: {self.remedy}"


class ExperimentError(LabError):
    """A parameter, option, configuration or file that cannot be used as given; nothing was started."""

    exit_code = EXIT_USAGE


class GateFailed(LabError):
    """The measurement was made and a stated threshold did not hold."""

    exit_code = EXIT_GATE_FAILED


class NotComparable(LabError):
    """Two runs that differ in machine or schema, so that a difference of their numbers would mean nothing."""

    exit_code = EXIT_USAGE


class RunFailed(LabError):
    """A night, notebook or write that could not be carried out; what was written before is safe."""

    exit_code = EXIT_COULD_NOT_RUN
