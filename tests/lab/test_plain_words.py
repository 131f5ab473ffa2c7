"""Numbers of requirements stay in docs/requirements.md, docstrings and tests: a person at run time never meets one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.reference

NUMBER = re.compile(r"\bR-\d+")


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every string of a module that may be shown: all but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def shown_texts() -> Iterator[tuple[str, str]]:
    """(place, text) of every string that a run may show."""
    for package in ("eagle3core", "lab", "tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from ((f"{path.relative_to(ROOT)}:{line}", text) for line, text in texts_of(path))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield from ((f"{path.name}, cell {i}", "".join(cell["source"])) for i, cell in enumerate(cells))
    for path in [*sorted(ROOT.glob("*.toml")), *sorted((ROOT / "lab" / "page" / "templates").iterdir())]:
        lines = path.read_text(encoding="utf-8").splitlines()
        yield from ((f"{path.name}:{i}", line.partition(" #")[0]) for i, line in enumerate(lines, start=1))


def test_no_text_that_a_run_may_show_holds_a_requirement_number() -> None:
    offenders = [f"{place}: {found.group()}" for place, text in shown_texts() if (found := NUMBER.search(text))]
    assert not offenders, "\n".join(offenders)


def test_the_search_sees_messages_and_leaves_docstrings_alone(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    lines = ('"""R-01."""', "def f(x):", '    """R-02."""', '    raise ValueError(f"R-03: {x}")', 'C(source="R-04")')
    path.write_text("\n".join(lines), encoding="utf-8")
    assert sorted(line for line, text in texts_of(path) if NUMBER.search(text)) == [4, 5]
