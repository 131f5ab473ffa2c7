"""No kernel of the engine touches memory that is not its own: a short run of the whole engine under memcheck.

A planted slot past the last comes first; where memcheck does not see that, it must not vouch for the rest.
Source: Compute Sanitizer documentation.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.probes.proofs.check import Check, Verdict
from lab.probes.sanitizer.command import located
from lab.probes.sanitizer.processes import Run
from lab.probes.sanitizer.report import CLEAN, FOUND, INCOMPLETE, Outcome

PART = "memory"
LIMIT_S = 90.0
_PROGRAM = "lab.probes.proofs.watched_run"


@dataclass
class MemoryAccess:
    """Checks of the shipped pair; they need a GPU and compute-sanitizer.

    Args:
        watch: runs the program with further arguments under memcheck.
    """

    watch: Callable[[tuple[str, ...]], Outcome] = field(default_factory=lambda: under_memcheck)
    _plant_found: bool = False

    def checks(self) -> list[Check]:
        """The plant first."""
        judged = {
            "finds a planted slot past the last": self._finds,
            "short run of the whole engine": self._is_clean,
        }
        return [Check(PART, f"shipped {name}", {"pair": "shipped"}, partial(judge)) for name, judge in judged.items()]

    def _finds(self) -> Verdict:
        outcome = self.watch(("--plant",))
        self._plant_found = outcome.verdict == FOUND
        n_errors = outcome.summary.errors if outcome.summary else 0
        words = f"found, {n_errors} errors" if self._plant_found else f"NOT found: {outcome.verdict}"
        return Verdict(self._plant_found, "; ".join([words, *outcome.reasons[:1]]), {"errors": n_errors})

    def _is_clean(self) -> Verdict:
        if not self._plant_found:
            return Verdict(None, "memcheck did not find the planted slot")
        outcome = self.watch(())
        values = {"engines": outcome.cases, "kernels": outcome.launches, "verdict": outcome.verdict}
        if outcome.verdict == CLEAN:
            detail = f"clean: {outcome.cases} engines, at least {outcome.launches} kernels, tokens equal"
            return Verdict(True, detail, values)
        held = None if outcome.verdict == INCOMPLETE else False
        return Verdict(held, f"{outcome.verdict}: {'; '.join(outcome.reasons[:3])}", values)


def under_memcheck(arguments: tuple[str, ...]) -> Outcome:
    """The program under memcheck, in a process of its own.

    Raises:
        BackendUnavailable: compute-sanitizer is not installed.
    """
    with tempfile.TemporaryDirectory() as logs:
        run = Run(located(), Path(logs), time.monotonic() + LIMIT_S, jobs=1)
        return run.watch("engine", "memcheck", [_PROGRAM, *arguments])
