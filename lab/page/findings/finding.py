"""One finding, and the night that rules look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from lab.page.findings.remedies import Remedy, remedy_of
from lab.rows.store import Row


class Level(IntEnum):
    """How much a reader has to care; the smaller, the worse."""

    FAILED = 0
    NOT_JUDGED = 1
    WARNED = 2
    MOVED = 3
    TOLD = 4


@dataclass(frozen=True)
class Finding:
    """One sentence of what a night found.

    Attributes:
        kind: name of the rule that found it.
        sentence: for people, whole.
        job, figure: where the page shows it; without a figure the job's section.
        short: the finding as the headline says it; empty where it has no place there.
        remedy: what to do; None where nothing is wrong.
        gates: (job, name) of gates that need no sentence of their own beside this one.
        section: of the page, for what is of no job.
    """

    kind: str
    level: Level
    sentence: str
    job: str = ""
    figure: str = ""
    short: str = ""
    remedy: Remedy | None = None
    gates: frozenset[tuple[str, str]] = frozenset()
    section: str = "gates"


@dataclass(frozen=True)
class Night:
    """What rules look at.

    Attributes:
        summary: content of the run's summary. rows: all that could be read.
        figures: names of the figures of each job, in their order.
    """

    summary: Mapping[str, Any]
    rows: list[Row]
    figures: Mapping[str, list[str]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Row]:
        """The measured rows of a kind."""
        return [row for row in self.rows if row.kind == kind and row.status == "measured"]

    def gates(self, word: str) -> list[Mapping[str, Any]]:
        """The gates of that word."""
        return [gate for gate in self.summary["gates"] if gate["word"] == word]

    def figure(self, job: str, *names: str) -> str:
        """The first of a job's figures whose name begins with one of `names`; empty without one."""
        known = self.figures.get(job, [])
        return next((figure for name in names for figure in known if figure.startswith(name)), "")

    def failed(self, jobs: set[str], *starts: str) -> frozenset[tuple[str, str]]:
        """Failed gates of these jobs whose names begin so."""
        named = [(str(gate["job"]), str(gate["name"])) for gate in self.gates("fail")]
        return frozenset((job, name) for job, name in named if job in jobs and name.startswith(starts))


def number(row: Row, name: str) -> float:
    """The row's value of that name, 0 where it has none: for values that the row's kind always has."""
    return row.number(name) or 0.0


def as_sentence(text: str) -> str:
    """`text` with a capital at its beginning; words of code, with a dot or an underscore in them, stay as they are."""
    first = text.partition(" ")[0]
    return text if set("._`=/") & set(first.rstrip(".,:")) else f"{text[:1].upper()}{text[1:]}"


def warned(kind: str, level: Level, sentence: str, **more: Any) -> Finding:
    """A finding with the remedy that stands in the table under its rule's name."""
    return Finding(kind, level, sentence, remedy=remedy_of(kind), **more)
