"""The list of requirements is complete, and neither it nor the runbook names what is not there."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from eagle3core import EngineConfig, SpeculativeConfig
from lab.cli import parsed
from lab.parity.faults import FAULTS

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parent.parent
LIST = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")

REQUIREMENTS = [f"R-{number:02d}" for number in range(1, 160)]
CONTRADICTIONS = [f"1.X-{number}" for number in range(1, 27)]
AREAS = [
    "tree",
    "acceptance",
    "context preparation",
    "attention",
    "feed-forward and LM head",
    "active slots",
    "host glue",
    "partial-cache verification",
]
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PLAN = re.findall(r"^- \*([a-z ]+)\*: ", LIST, flags=re.MULTILINE)


class Row(NamedTuple):
    """One line of the list."""

    id: str
    what: str
    state: str
    note: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        """File and function of each test it names."""
        return NAMED_TEST.findall(self.note)

    @property
    def plan(self) -> list[str]:
        """Parts of the plan it names."""
        return [part for part in re.findall(r"\*([^*]+)\*", self.note) if part in PLAN]


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table line of a document, headers and rulers included."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]


ROWS = [Row(*cells) for cells in table_rows(LIST) if re.fullmatch(r"R-\d+|1\.X-\d+", cells[0])]


@cache
def functions_of(path: str) -> set[str]:
    """Names of the tests that a file defines; none when there is no such file."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_requirement_and_every_contradiction_has_one_row_in_order() -> None:
    assert [row.id for row in ROWS] == [*REQUIREMENTS, *CONTRADICTIONS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_says_what_it_is_about_and_how_far_it_is(row: Row) -> None:
    assert row.what
    assert row.state in ("built", "part", "deviation", "not built")
    if row.state != "not built":
        assert row.tests, "what is built is shown by a test"
    if row.state in ("part", "not built"):
        assert row.plan, f"what is missing belongs to one of {PLAN}"
    if row.state == "not built":
        assert not row.tests, "a test that shows something makes it part"
    if row.state == "deviation":
        assert NAMED_TEST.sub("", row.note).replace("<br>", "").strip(), "a deviation has a reason"


@pytest.mark.parametrize("row", [row for row in ROWS if row.tests], ids=lambda row: row.id)
def test_every_named_test_exists_and_is_named_once_a_row(row: Row) -> None:
    missing = [f"{path}::{name}" for path, name in row.tests if name not in functions_of(path)]
    assert missing == []
    assert len(set(row.tests)) == len(row.tests)
    assert row.note.count("::test_") == len(row.tests), "a name that is not written as `tests/file.py::test_name`"


def test_every_number_that_code_and_documents_quote_is_in_the_list() -> None:
    places = [*(ROOT / "eagle3core").rglob("*.py"), *(ROOT / "lab").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    quoted = {
        number for path in places for number in re.findall(r"\bR-\d+\b|\b1\.X-\d+\b", path.read_text(encoding="utf-8"))
    }
    assert "R-03" in quoted, "the engine quotes the list"
    assert quoted <= {*REQUIREMENTS, *CONTRADICTIONS}


def test_every_row_of_the_mapping_is_built_planned_or_declined() -> None:
    start = LIST.index("(1.X-25)\n")
    answers = {cells[0]: cells[1] for cells in table_rows(LIST[start:])[2:]}
    assert list(answers) == AREAS
    states = {row.id: row.state for row in ROWS}
    for area, answer in answers.items():
        assert re.match(r"(built|planned in \*|not needed, because )", answer), area
        assert set(re.findall(r"\*([^*]+)\*", answer)) <= set(PLAN), area
        numbers = re.findall(r"R-\d+", answer)
        assert numbers or answer.startswith("not needed"), f"{area} is answered by no requirement"
        if answer.startswith("built"):
            assert states[numbers[0]] in ("built", "part", "deviation"), area


def quoted_in_runbook() -> list[str]:
    """Everything the runbook sets in code style, its line breaks removed."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", RUNBOOK)]


def test_the_runbook_covers_the_four_failures_of_the_list() -> None:
    headings = re.findall(r"^## \d\. (.+)$", RUNBOOK, flags=re.MULTILINE)
    for words in ("draft did not load", "off at run time", "Truncated or repeated", "slow"):
        assert sum(words in heading for heading in headings) == 1, words
    for section in re.split(r"^## \d\. ", RUNBOOK, flags=re.MULTILINE)[1:]:
        assert re.search(r"^1\. .+^2\. ", section, flags=re.MULTILINE | re.DOTALL), "a failure has a list of checks"


def test_the_runbook_names_only_what_the_code_has() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "eagle3core").rglob("*.py"))
    codes = quoted_in_runbook()
    names = {code.split("=")[0] for code in codes if re.fullmatch(r"EAGLE3?_[A-Z_]+(=\d)?|[\w:]*::\w+|BASE_\w+", code)}
    prefixes = {code for code in codes if code.startswith("[EAGLE]")}
    assert len(names) >= 9
    assert len(prefixes) >= 3
    assert {name for name in names | prefixes if name not in source} == set()
    fields = {
        kind.__name__: {field.name for field in dataclasses.fields(kind)} for kind in (EngineConfig, SpeculativeConfig)
    }
    settings = [found for code in codes for found in re.findall(r"((?:Engine|Speculative)Config)\((\w+)=", code)]
    assert settings
    assert all(name in fields[kind] for kind, name in settings), settings


def test_the_runbooks_commands_can_be_typed() -> None:
    typed = [code.split()[1:] for code in quoted_in_runbook() if code.startswith("eagle3lab ")]
    assert len(typed) >= 4
    for words in typed:
        parsed(words)
        if words[0] == "run":
            assert (ROOT / "notebooks" / f"{words[1]}.ipynb").is_file(), words[1]
        for fault in re.findall(r"fault=(\w+)", " ".join(words)):
            assert fault in FAULTS
