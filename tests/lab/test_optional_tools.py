"""What a machine may lack is asked for only where it is needed, and then in three parts."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.reference

WITHOUT = "import sys; sys.modules[{tool!r}] = None; from lab.cli import main; sys.exit(main(sys.argv[1:]))"


def without(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line on a machine that has no such package."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(tool=tool), *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_without_greenlet_the_help_is_shown_and_the_emulator_says_what_it_lacks(tmp_path: Path) -> None:
    shapes, out = tmp_path / "shapes.json", tmp_path / "rows.jsonl"
    assert without("greenlet", "sweep", "--help").returncode == 0
    product = {"tag": "BASE_QKV", "m": 1, "n": 64, "k": 64, "weight_rows": 64, "epilogue": "none", "dtype": "bf16"}
    shapes.write_text(json.dumps(product) + "\n")
    refused = without("greenlet", "sweep", "gemm", "--shapes", str(shapes), "--device", "cpu", "--out", str(out))
    assert refused.returncode == 3, "could not run here; what was typed is right"
    assert "greenlet is not installed" in refused.stderr
    assert "\n  allowed: greenlet" in refused.stderr
    assert "\n  do: pip install greenlet" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_what_only_tests_need_is_no_dependency_of_a_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[\[><=]", line)[0] for line in project["dependencies"]}
    for_tests = {re.split(r"[\[><=]", line)[0] for line in project["optional-dependencies"]["dev"]}
    assert "pytest" in for_tests
    assert needed & for_tests == set()
    imported = {
        alias.name.split(".")[0]
        for package in ("lab", "eagle3core")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported & for_tests == set()
