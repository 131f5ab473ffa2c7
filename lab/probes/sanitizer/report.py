"""What compute-sanitizer's text says of one run, and the verdict that follows from it.

A run is clean only if the tool reached its summary, counted nothing, and the program under it ended well with right
numbers; silence is a failure. A run of kernels that racecheck cannot judge as they are written is at best clean in
another form (`form`), which is another verdict. Source: Compute Sanitizer documentation, release 2025.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KIND = "sanitizer"  # of a row
CLEAN, CLEAN_IN_FORM, FOUND, FAILED, INCOMPLETE = "clean", "clean in form", "found", "failed", "incomplete"

_ERRORS = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?\s*$", re.MULTILINE)
_HAZARDS = re.compile(
    r"^=+ RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", re.MULTILINE
)
# Lines of a log that place a record on the host, end it or sum up: not what to show first.
_NOT_SHOWN = re.compile(r"^=+\s*$|COMPUTE-SANITIZER|SUMMARY:|Host Frame|Saved host backtrace")
_SHOWN_LINES = 6
# The tool's own failures, which may come with a summary of 0 errors. "Device not supported" is what it says where the
# driver offers no debugging interface.
_OWN_FAILURES = ("Device not supported", "Internal Sanitizer Error", "terminated before first instrumented API call")


@dataclass(frozen=True)
class Summary:
    """What the tool counted: errors of any kind, and for racecheck its hazards with their warnings."""

    errors: int
    hazards: int = 0
    warnings: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.errors or self.hazards or self.warnings)


@dataclass(frozen=True)
class Outcome:
    """One card under one tool.

    Attributes:
        verdict: clean; clean in form (clean, in another form than the engine's); found (the tool reported something);
            failed (the tool or the program did, or numbers are off); incomplete (stopped by a limit).
        reasons: of any verdict but clean, first things first.
        launches: kernels launched; 0 where the program did not get to its end.
        in_form: those of them in another form than the engine's.
    """

    op: str
    tool: str
    verdict: str
    seconds: float
    cases: int = 0
    launches: int = 0
    in_form: int = 0
    summary: Summary | None = None
    reasons: list[str] = field(default_factory=list)

    def values(self) -> dict[str, Any]:
        """The outcome as the values of a row of kind `sanitizer`."""
        summary = self.summary
        return {
            "verdict": self.verdict, "n_cases": self.cases, "n_launches": self.launches, "n_in_form": self.in_form,
            "n_errors": summary.errors if summary else None, "n_hazards": summary.hazards if summary else None,
            "n_warnings": summary.warnings if summary else None, "took_s": round(self.seconds, 1),
            "reasons": self.reasons,
        }  # fmt: skip

    def line(self) -> str:
        """The outcome for people."""
        counted = "no summary"
        if self.summary:
            counted = f"{self.summary.errors} errors"
            if self.tool == "racecheck":
                counted += f", {self.summary.hazards} hazards ({self.summary.warnings} warnings)"
        text = f"{self.op:>20} {self.tool:9} {self.verdict:13} {self.cases:3} cases {self.launches:4} kernels"
        return "\n".join([f"{text}  {counted}, {self.seconds:.0f} s", *(f"{'':22}{reason}" for reason in self.reasons)])


def summary_of(text: str, tool: str) -> Summary | None:
    """The tool's summary; None where it printed none."""
    errors = [int(n) for n in _ERRORS.findall(text)]
    if tool != "racecheck":
        return Summary(sum(errors)) if errors else None
    found = [tuple(map(int, groups)) for groups in _HAZARDS.findall(text)]
    if not found:
        return None
    hazards, hard, soft = (sum(column) for column in zip(*found, strict=True))
    return Summary(hard + sum(errors), hazards, soft)


def judged(
    op: str, tool: str, text: str, code: int | None, result: Mapping[str, Any] | None, seconds: float
) -> Outcome:
    """The outcome of a run from the tool's log, its exit code (None: stopped by a limit) and what the program wrote."""
    summary = summary_of(text, tool)
    result = result or {}
    reasons = [line for line in text.splitlines() if line.startswith("=") and not _NOT_SHOWN.search(line)]
    reasons = [line.lstrip("= ") for line in reasons][:_SHOWN_LINES]
    own = [words for words in _OWN_FAILURES if words in text]
    if code is None:
        verdict, reasons = INCOMPLETE, [f"stopped after {seconds:.0f} s", *reasons]
    elif own or summary is None:
        verdict, reasons = FAILED, [f"the tool gave no verdict, exit code {code}", *reasons]
    elif not summary.is_clean:
        verdict = FOUND
    elif not result:
        verdict, reasons = FAILED, [f"the program did not reach its end, exit code {code}", *reasons]
    elif result["faults"]:
        verdict, reasons = FAILED, list(result["faults"])[:_SHOWN_LINES]
    elif code or not result["launches"]:
        verdict, reasons = FAILED, [f"exit code {code} after {result['launches']} kernels", *reasons]
    elif result.get("in_form"):
        words = f"{result['in_form']} of the kernels are not as the engine runs them, which racecheck cannot follow"
        verdict, reasons = CLEAN_IN_FORM, [f"{words}: shown by the plants that are named _as_written"]
    else:
        verdict, reasons = CLEAN, []
    cases, launches, in_form = (result.get(name, 0) for name in ("cases", "launches", "in_form"))
    return Outcome(op, tool, verdict, seconds, cases, launches, in_form, summary, reasons)
