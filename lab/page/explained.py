"""What a notebook says of itself, for the page: its question, its explanation, and the words beside each figure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lab.night.notebook import notebook_parts
from lab.night.parameters import notebooks_folder

# A figure's name as a notebook's cell gives it, up to what only a run fills in.
_NAMED = re.compile(r"exp\.(?:figure|explore)\(\s*f?\"([^\"{]+)")
_SHOWS_A_TABLE = "figures.show("
_HEADING = re.compile(r"<h(\d)[^>]*>(.*?)</h\1>", re.DOTALL)
_ANCHOR = re.compile(r'<a class="anchor-link".*?</a>', re.DOTALL)


@dataclass(frozen=True)
class Explanation:
    """A notebook in words, as HTML that was stored with it.

    Attributes:
        question: its first heading, plain text. about: the text beneath that heading.
        beside: for each later text, how the names of the figures begin that it goes with; it stands before the first.
    """

    question: str = ""
    about: str = ""
    beside: tuple[tuple[tuple[str, ...], str], ...] = ()

    def before(self, figure: str, shown: set[str]) -> str:
        """The text that goes with a figure; empty where it was `shown` already, and added to that where it was not."""
        for names, text in self.beside:
            if text not in shown and figure.startswith(names):
                shown.add(text)
                return text
        return ""


def explanation_of(notebook: str, executed: Path) -> Explanation:
    """Of the packaged notebook of that name, else of the executed one; nothing where neither is there.

    Raises:
        ExperimentError: the executed one cannot be read.
    """
    packaged = notebooks_folder() / f"{notebook}.ipynb"
    path = packaged if packaged.exists() else executed
    return _explanation(path) if path.exists() else Explanation()


def _explanation(path: Path) -> Explanation:
    question, about, beside = "", "", list[tuple[tuple[str, ...], str]]()
    text = ""
    for part in notebook_parts(path):
        if part["kind"] == "markdown":
            text = _ANCHOR.sub("", str(part["html"]))
            heading = _HEADING.search(text)
            if heading and heading.group(1) == "1" and not question:
                question, about = _plain(heading.group(2)), text[heading.end() :].strip()
                text = ""
        elif text and (names := tuple(_NAMED.findall(str(part["source"])))):
            beside.append((names, _HEADING.sub(r"<h3>\2</h3>", text)))
            text = ""
        elif _SHOWS_A_TABLE in str(part["source"]):  # that the text goes with, and which only the notebook's page has
            text = ""
    return Explanation(question, about, tuple(beside))


def _plain(html: str) -> str:
    from html import unescape

    return unescape(re.sub(r"<[^>]+>", "", html)).strip()
