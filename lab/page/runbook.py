"""The runbook's sections that a page's remedies lead to, shown on the page itself, so that it needs no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.rows.environment import checkout

RUNBOOK = "runbook.md"
_LINK = re.compile(r"<a href=\"[^\"]*\">(.*?)</a>", re.DOTALL)


@dataclass(frozen=True)
class RunbookSection:
    """One section: its anchor, its heading, and its text as HTML without links, which lead to other files."""

    anchor: str
    heading: str
    html: str


def runbook_path() -> Path:
    """The runbook of the checkout, else the one inside the installed package."""
    root = checkout()
    return (root / "docs" if root else Path(__file__).resolve().parents[1] / "_docs") / RUNBOOK


def anchors() -> dict[str, str]:
    """Every section of the runbook by its anchor: its heading and its text, as Markdown."""
    text = runbook_path().read_text(encoding="utf-8")
    return {anchor_of(part.splitlines()[0]): part for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def sections_for(wanted: Iterable[str]) -> list[RunbookSection]:
    """The sections of these anchors, each once, in the runbook's order; none where there is no runbook."""
    from nbconvert.filters import markdown2html_mistune

    if not runbook_path().exists():
        return []
    asked, found = set(wanted), []
    for anchor, part in anchors().items():
        if anchor in asked:
            heading, _, text = part.partition("\n")
            found.append(RunbookSection(anchor, heading, _LINK.sub(r"\1", markdown2html_mistune(text))))
    return found
