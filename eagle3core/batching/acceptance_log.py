"""A log of acceptance for programs: on request, one JSON line for every step and request.

Lines are made on the host of results that were read anyway, and appended as they come. A line stands alone: it names
its request, what was drafted, what the target chose, and how much of that was accepted and committed.
Source: docs/requirements.md R-164; the fields are in docs/metrics.md.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Sequence
from os import PathLike

from eagle3core.errors import ConfigError
from eagle3core.metrics import StepRecord
from eagle3core.request import Request
from eagle3core.step.outcome import RowOutcome

log = logging.getLogger("eagle3core")

SCHEMA = 1


class AcceptanceLog:
    """The file of one engine; nothing at all without one.

    Args:
        path: lines are appended to it; None: none are written.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | PathLike[str] | None) -> None:
        self._file: int | None = None
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            weakref.finalize(self, os.close, self._file)
        except OSError as error:
            raise ConfigError(
                f"acceptance_log {str(path)!r} cannot be written: {error.strerror or error}",
                "a file in a folder that exists and can be written",
                "name another file, or leave acceptance_log out",
            ) from error

    def write(self, request: Request, row: RowOutcome, number: int, step: StepRecord, drafts: Sequence[int]) -> None:
        """Append what a step of that number gave `request`; a file system that refuses it ends the log, not the run."""
        if self._file is None:
            return
        try:
            os.write(self._file, (json.dumps(line_of(request, row, number, step, drafts)) + "\n").encode())
        except OSError as error:
            self._file = None
            log.error("[EAGLE][Acceptance] the log ends at step %d: %s", number, error.strerror or error)


def line_of(
    request: Request, row: RowOutcome, number: int, step: StepRecord, drafts: Sequence[int]
) -> dict[str, object]:
    """The fields of a line.

    Args:
        number: of the step in its batch. step: its record. drafts: proposed tokens, of a tree node by node.
    """
    return {
        "schema_version": SCHEMA,
        "request": request.id,
        "step": number,
        "start": step.start,
        "depth": _depth(step, drafts),
        "drafted": list(drafts),
        "parents": None if step.tree is None else list(step.tree.parents),
        "tree_ranks": None if step.tree is None else list(step.tree.ranks),
        "target": row.tokens,
        "accepted": step.n_accepted,
        "accepted_ids": row.tokens[: step.n_accepted],
        "committed": step.n_committed,
        "cut": step.cut,
        "ranks": None if step.ranks is None else list(step.ranks),
        "acceptance": step.acceptance,
    }


def _depth(step: StepRecord, drafts: Sequence[int]) -> int:
    """Drafts on the longest path, as far as is known: of a chain what was proposed."""
    if step.depth is not None:
        return step.depth
    return max(step.tree.depths) if step.tree is not None else len(drafts)
