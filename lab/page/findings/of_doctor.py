"""Causes of low acceptance that the doctor of draft heads found, with what mending each would give."""

from __future__ import annotations

from dataclasses import replace

from lab.page.findings.finding import Finding, Level, Night, as_sentence, number
from lab.page.findings.remedies import remedy_of
from lab.rows.store import Row

GATE = "no known cause of low acceptance"
MOST_CAUSES = 2  # further ones may only follow from these


def causes(night: Night) -> list[Finding]:
    """The first red lamps, in the order in which the doctor puts them."""
    red = sorted((row for row in night.of("draft_lamp") if row.values.get("colour") == "red"), key=_place)
    return [_cause(night, row) for row in red[:MOST_CAUSES]]


def _place(row: Row) -> float:
    return number(row, "place")


def _cause(night: Night, row: Row) -> Finding:
    name, before, after = row.name.replace("_", " "), row.number("before"), row.number("after")
    gain = "" if before is None or after is None else f"; mended, {before:.2f} becomes {after:.2f}"
    return Finding(
        "cause of low acceptance", Level.FAILED, f"Of the draft head, {name}: {row.values['said']}{gain}.", row.job,
        night.figure(row.job, "draft-lamps", "acceptance"), f"acceptance is low for a known cause, {name}",
        replace(remedy_of(GATE), text=f"{as_sentence(str(row.values['change']))}."), night.failed({row.job}, GATE),
    )  # fmt: skip
