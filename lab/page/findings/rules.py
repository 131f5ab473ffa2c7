"""The table of findings: which rules look at a night's rows, and how many sentences of theirs a page shows."""

from __future__ import annotations

from collections.abc import Callable

from lab.page.findings import of_acceptance, of_doctor, of_gates, of_parity, of_speed
from lab.page.findings.finding import Finding, Level, Night, warned

MOST_SENTENCES = 8
MOST_WARNINGS = 2  # in the headline; the verdict and the sentences have them all
Rule = Callable[[Night], list[Finding]]

# In the order in which findings of one level are told: right or wrong, then what is accepted, then what it brings.
RULES: tuple[Rule, ...] = (
    of_parity.stages,
    of_parity.tokens,
    of_doctor.causes,
    of_acceptance.reference,
    of_acceptance.golden,
    of_gates.unfinished,
    of_gates.not_judged,
    of_speed.notices,
    of_acceptance.controls,
    of_gates.moved,
    of_gates.not_had,
    of_speed.speedups,
    of_speed.points,
    of_acceptance.losses,
    of_speed.spans,
    of_speed.stages,
    of_speed.depths,
)


def findings_of(night: Night) -> list[Finding]:
    """What a night found, the worst first, at most `MOST_SENTENCES`; failed gates that no rule tells stand as gates."""
    told = [finding for rule in RULES for finding in _found_by(rule, night)]
    known = frozenset(gate for finding in told for gate in finding.gates)
    found = sorted([*told, *of_gates.failed(night, known)], key=lambda finding: finding.level)
    return found[:MOST_SENTENCES]


def _found_by(rule: Rule, night: Night) -> list[Finding]:
    """What a rule finds; of rows not of their kind's form, as runs from elsewhere may have, that it cannot."""
    try:
        return rule(night)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        name = f"{rule.__module__.rpartition('.')[2].removeprefix('of_')}, {rule.__name__}"
        sentence = f"Rows could not be read for a finding ({name}): {type(error).__name__}: {error}."
        return [warned("rows not had", Level.MOVED, sentence)]


def headline_of(word: str, found: list[Finding]) -> str:
    """The verdict and what it must not hide, in a line: `Passed, but the draft slows its target down`."""
    begun = "Finished, nothing was judged" if word == "not judged" else word.capitalize()
    named = [finding for finding in found if finding.short]
    if named and named[0].level <= Level.NOT_JUDGED:
        told = named[0].short.removesuffix(f" {word}")  # "Failed: the gate 'x'", and not "failed" again
        return f"{begun}: {told}"
    warnings = [finding.short for finding in named if finding.level == Level.WARNED][:MOST_WARNINGS]
    return f"{begun}{', but' if word == 'passed' else ';'} {', and '.join(warnings)}" if warnings else begun
