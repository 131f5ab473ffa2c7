"""What a lamp needs before it runs the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from lab.doctor.draft.lamp import Finding

if TYPE_CHECKING:
    from lab.doctor.draft.case import Case

Look = Callable[["Case"], Finding]


def runs(lamp: str) -> Callable[[Look], Look]:
    """A detector that is asked only where there are prompts, and a head that the engine takes."""

    def made(look: Look) -> Look:
        @wraps(look)
        def asked(case: Case) -> Finding:
            if not case.prompts:
                return Finding(lamp, "unknown", "no prompts: the engine has nothing to run")
            if case.refusals:
                return Finding(lamp, "unknown", f"the engine refuses the head: {case.refusals[0].what}")
            return look(case)

        return asked

    return made
