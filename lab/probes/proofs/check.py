"""Checks: one statement each, judged one after the other until the time is up, each into a row at once."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3core.errors import BackendUnavailable, ConfigError, KernelLimit
from lab.errors import ExperimentError
from lab.rows.environment import Environment
from lab.rows.maker import RowMaker
from lab.rows.store import Row

KIND = "proof"
CANNOT_RUN = (BackendUnavailable, ConfigError, KernelLimit, ExperimentError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        held: None where nothing could be judged, and `detail` says why.
        detail: one line for people.
        values: for the row.
    """

    held: bool | None
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A statement and how to judge it.

    Attributes:
        part: of the command. name: of the statement within it. parameters: for the row.
        judge: does the work; raises when it cannot.
    """

    part: str
    name: str
    parameters: dict[str, Any]
    judge: Callable[[], Verdict]

    @property
    def label(self) -> str:
        """The name of its row."""
        return f"{self.part}/{self.name}"


@dataclass(frozen=True)
class Finding:
    """A check with its verdict and what it took."""

    check: Check
    verdict: Verdict
    seconds: float

    @property
    def word(self) -> str:
        """held, FAILED or missing."""
        return {True: "held", False: "FAILED", None: "missing"}[self.verdict.held]

    def line(self) -> str:
        """One line of the table."""
        return f"{self.word:7s} {self.check.label:44s} {self.seconds:6.1f} s  {self.verdict.detail}"

    def row(self, run: str, environment: Environment) -> Row:
        """The finding as the lab stores it; what could not be judged has its reason and no numbers."""
        maker = RowMaker(run, KIND, environment.fingerprint)
        if self.verdict.held is None:
            return maker.missing(KIND, self.check.label, self.verdict.detail, self.check.parameters)
        values: dict[str, Any] = {"held": self.verdict.held, "detail": self.verdict.detail, "took_s": self.seconds}
        return maker.measured(KIND, self.check.label, {**values, **self.verdict.values}, self.check.parameters)


class TimeLimit:
    """Seconds that checks may begin in."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._clock = seconds, clock
        self._start = clock()

    @property
    def is_over(self) -> bool:
        """Whether no further check may begin."""
        return self._clock() - self._start >= self.seconds


def run_checks(checks: Iterable[Check], limit: TimeLimit, tell: Callable[[Finding], None]) -> list[Finding]:
    """Judge `checks` in order and `tell` each finding at once, so that a stop loses nothing that was found.

    A check that cannot run here is missing with its reason. Any other error is a failure of what is proven; after one,
    a CUDA context may be beyond use, and then every later check fails with the device's own words.
    """
    findings = []
    for check in checks:
        start = time.perf_counter()
        verdict = Verdict(None, f"the time limit of {limit.seconds:.0f} s was reached before it")
        if not limit.is_over:
            verdict = _judged(check)
        finding = Finding(check, verdict, time.perf_counter() - start)
        findings.append(finding)
        tell(finding)
        gc.collect()  # an engine's graphs and caches, before the next one is planned and made
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return findings


def _judged(check: Check) -> Verdict:
    try:
        with torch.no_grad():
            return check.judge()
    except CANNOT_RUN as error:
        return Verdict(None, _first_line(error))
    except Exception as error:  # whatever the engine does wrong is the finding
        traceback.print_exc()
        return Verdict(False, f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
