"""The list of requirements is complete, and no page names or links what is not there."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_engines import new_tokens, random_prompts, tiny_engine, write_tiny_pair

from eagle3core import EngineConfig, SpeculativeConfig
from lab.cli import parsed
from lab.parity.faults import FAULTS

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parent.parent
LIST = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

REQUIREMENTS = [f"R-{number:02d}" for number in range(1, 170)]
CONTRADICTIONS = [f"1.X-{number}" for number in range(1, 28)]
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
STATES = ("built", "part", "deviation", "not built")
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


def test_every_row_says_what_it_is_about_how_far_it_is_and_by_which_tests() -> None:
    wrong = [f"{row.id}: {fault}" for row in ROWS for fault in faults_of(row)]
    assert not wrong, "\n".join(wrong)


def faults_of(row: Row) -> list[str]:
    """What a row leaves unsaid, and the tests it names that are not there."""
    reason = NAMED_TEST.sub("", row.note).replace("<br>", "").strip()
    rules = {
        "says nothing": not row.what,
        f"state {row.state!r} is none of {STATES}": row.state not in STATES,
        "what is built is shown by a test": row.state != "not built" and not row.tests,
        f"what is missing belongs to one of {PLAN}": row.state in ("part", "not built") and not row.plan,
        "a test that shows something makes it part": row.state == "not built" and bool(row.tests),
        "a deviation has a reason": row.state == "deviation" and not reason,
        "names a test twice": len(set(row.tests)) != len(row.tests),
        "a test is named as `tests/file.py::test_name`": row.note.count("::test_") != len(row.tests),
    }
    gone = [f"{path}::{name} is gone" for path, name in row.tests if name not in functions_of(path)]
    return [fault for fault, is_so in rules.items() if is_so] + gone


def test_a_row_that_says_too_little_is_found() -> None:
    here = "`tests/test_requirements.py::test_a_row_that_says_too_little_is_found`"
    assert faults_of(Row("R-01", "a tree", "built", here)) == []
    assert faults_of(Row("R-01", "a tree", "built", "")) == ["what is built is shown by a test"]
    assert faults_of(Row("R-01", "a tree", "deviation", here)) == ["a deviation has a reason"]
    assert faults_of(Row("R-01", "", "part", here + here)) == [
        "says nothing",
        f"what is missing belongs to one of {PLAN}",
        "names a test twice",
    ]
    assert faults_of(Row("R-01", "a tree", "built", "`tests/gone.py::test_it`")) == ["tests/gone.py::test_it is gone"]


def numbers_in(paths: Iterable[Path]) -> set[str]:
    """Requirement numbers that files quote."""
    return {
        number for path in paths for number in re.findall(r"\bR-\d+\b|\b1\.X-\d+\b", path.read_text(encoding="utf-8"))
    }


def test_every_number_that_is_quoted_is_in_the_list() -> None:
    places = [path for room in ("eagle3core", "lab", "tests") for path in (ROOT / room).rglob("*.py")]
    assert numbers_in(places) <= {*REQUIREMENTS, *CONTRADICTIONS}


def test_of_the_pages_only_the_list_quotes_numbers() -> None:
    others = [page for page in PAGES if page.name != "requirements.md"]
    assert [f"{page.name}: {number}" for page in others for number in sorted(numbers_in([page]))] == []


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as they are made on the web from their words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            there = (page.parent / name).resolve() if name else page
            if not (link.startswith("https://") or (there.exists() and (not anchor or anchor in anchors_of(there)))):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_every_page_that_code_names_is_there() -> None:
    files = [path for room in ("eagle3core", "lab", "notebooks", "tools") for path in (ROOT / room).rglob("*.*")]
    files = [path for path in [*files, *ROOT.glob("*.toml")] if path.suffix in (".py", ".ipynb", ".toml")]
    named = {name for path in files for name in re.findall(r"docs/\w+\.md", path.read_text(encoding="utf-8"))}
    assert {name for name in named if not (ROOT / name).is_file()} == set()


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


def test_the_runbook_names_only_what_an_engine_and_a_response_have(tmp_path: Path) -> None:
    engine = tiny_engine(write_tiny_pair(tmp_path), 2)
    (response,) = engine.generate(random_prompts([5]), new_tokens(4))
    named = re.findall(r"`(engine|response)((?:\.\w+)+)`", RUNBOOK)
    assert len(named) >= 4
    for name, path in named:
        found: Any = {"engine": engine, "response": response}[name]
        for attribute in path[1:].split("."):
            assert hasattr(found, attribute), f"{name}{path}"
            found = getattr(found, attribute)


def test_the_runbooks_commands_can_be_typed() -> None:
    typed = [code.split()[1:] for code in quoted_in_runbook() if code.startswith("eagle3lab ")]
    assert len(typed) >= 4
    for words in typed:
        parsed(words)
        if words[0] == "run":
            assert (ROOT / "notebooks" / f"{words[1]}.ipynb").is_file(), words[1]
        for fault in re.findall(r"fault=(\w+)", " ".join(words)):
            assert fault in FAULTS
