"""The page of two runs side by side: numbers, curves overlaid, rows that moved, and what differs around them.

Two runs of different machines are shown as well, without a word of faster or slower: the page says why.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from lab.errors import NotComparable
from lab.night.jobs import recorded
from lab.page import first_screen
from lab.page.all_runs import PAGE, machine_name
from lab.page.findings.finding import Night
from lab.page.first_screen import Figure
from lab.page.overlaid import overlaid
from lab.page.report import page_text, write_page
from lab.page.sections import MAX_TABLE_ROWS
from lab.rows.comparison import worst_first
from lab.rows.environment import shown_path
from lab.rows.history import Comparison, compare_runs
from lab.rows.runs import read_environment, read_whole_summary
from lab.rows.store import JOBS_FOLDER, Row, read_run
from lab.rows.verdict import WORST_FIRST

# Parts of the table of rows, and the words of each.
_PARTS = (
    ("moved", ("slower", "faster")),
    ("missing from one of them", ("missing",)),
    ("unsure", ("unsure",)),
    ("the same", ("same",)),
)


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    Attributes:
        link: its page, as seen from the page of both; empty where it has none.
        facts: of its machine, its software and its jobs' parameters, text by label.
    """

    name: str
    link: str
    word: str
    sentence: str
    started_at: str
    seconds: float
    machine: str
    numbers: list[Figure]
    facts: dict[str, str]
    rows: list[Row]


@dataclass(frozen=True)
class Fact:
    """One line of the environments side by side."""

    label: str
    before: str
    after: str


def render_two(before: Path, after: Path, out: Path) -> NotComparable | None:
    """Writes the page of two runs; gives why their numbers cannot be compared, None where they can.

    Raises:
        ExperimentError: a folder holds no finished run, or its rows cannot be read.
        RunFailed: the file system refused the page.
    """
    sides = [_side(folder, out) for folder in (before, after)]
    try:
        compared, refusal = compare_runs(before, after), None
    except NotComparable as error:
        compared, refusal = Comparison([], []), error
    changes = worst_first(compared.changes)
    counts = Counter(change.verdict.word for change in changes)
    parts = [(title, [each for each in changes if each.verdict.word in words]) for title, words in _PARTS]
    shown = [(title, own[:MAX_TABLE_ROWS], len(own)) for title, own in parts if own]
    content = page_text(
        "two_runs.html",
        sides=sides,
        refusal=refusal,
        counts=[(word, counts[word]) for word in WORST_FIRST if counts[word]],
        also=compared.moved,
        figures=overlaid(*((side.name, side.rows) for side in _told_apart(sides))),
        parts=shown,
        facts=_facts(*sides),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, content)
    return refusal


def _told_apart(sides: list[Side]) -> list[Side]:
    """Both, with names that differ: runs of two reports folders may have one."""
    if sides[0].name != sides[1].name:
        return sides
    return [replace(side, name=f"{side.name} ({label})") for side, label in zip(sides, "AB", strict=True)]


def _side(folder: Path, out: Path) -> Side:
    summary, rows, machine = read_whole_summary(folder), read_run(folder), read_environment(folder)
    page = folder.resolve() / PAGE
    facts = dict(machine.lines())
    facts.pop("Packages", None)
    facts |= {name: version or "absent" for name, version in machine.packages.items()}
    for job in summary["jobs"]:
        content, _ = recorded(folder / JOBS_FOLDER / job["id"])
        for name, value in (content["parameters"] if content else {}).items():
            facts[f"{job['id']}: {name}"] = shown_path(value) if isinstance(value, str) else str(value)
    return Side(
        name=folder.resolve().name,
        link=Path(os.path.relpath(page, out.resolve().parent)).as_posix() if page.exists() else "",
        word=summary["word"],
        sentence=summary["sentence"],
        started_at=summary["started_at"],
        seconds=summary["seconds"],
        machine=machine_name(machine),
        numbers=first_screen.numbers(Night(summary, rows)),
        facts=facts,
        rows=rows,
    )


def _facts(before: Side, after: Side) -> tuple[list[Fact], list[Fact]]:
    """What differs, and what is alike."""
    labels = dict.fromkeys([*before.facts, *after.facts])
    facts = [Fact(label, before.facts.get(label, "–"), after.facts.get(label, "–")) for label in labels]
    differing = [fact for fact in facts if fact.before != fact.after]
    return differing, [fact for fact in facts if fact.before == fact.after]
