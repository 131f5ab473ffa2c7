"""The last line of a command: words on a terminal, one JSON object where standard output goes elsewhere."""

from __future__ import annotations

import ast
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from lab.ending import words_of

pytestmark = pytest.mark.reference
# The bookkeeping bench is made to be read by programs, and a measured start is told to the process that waits for it.
OF_THEIR_OWN = {"lab/probes/kernels/bookkeeping.py", "lab/probes/start/first_request.py"}
COMMAND = (sys.executable, "-m", "lab", "rows", "upgrade")


def on_a_terminal(command: tuple[str, ...]) -> str:
    """Standard output of a command whose standard output is a terminal."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stdin=subprocess.DEVNULL) as child:
            child.wait(timeout=60)
        return os.read(ours, 65536).decode().replace("\r\n", "\n")
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_gets_words_and_a_file_gets_json(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("", encoding="utf-8")
    command = (*COMMAND, str(rows))
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(piped.stdout.splitlines()[-1])["command"] == "rows upgrade"
    last = on_a_terminal(command).splitlines()[-1]
    assert last == "rows upgrade: files 1, changed 0, state to be written with --write"


def test_a_summary_in_words_is_short_and_leaves_no_braces() -> None:
    assert words_of({"command": "prove", "built": 12}) == "prove: built 12"
    assert words_of({"command": "x"}) == "x: done"
    summary = {
        "command": "speed", "n_rows": 31, "wrong_tokens": [], "over": {"a": 1.23456, "b": 2.0}, "passed": None,
        "is_whole": True, "failed": ["p", "q", "r", "s", "t"], "first": {"n": {"deep": 1}},
    }  # fmt: skip
    assert words_of(summary) == (
        "speed: rows 31, wrong tokens none, over (a 1.235; b 2), passed unknown, is whole yes, "
        "failed (p; q; r; 2 more), first (n (deep 1))"
    )


def test_no_command_prints_json_by_itself() -> None:
    printed = []
    for path in sorted((ROOT / "lab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if is_print and any(ast.unparse(given).startswith("json.dumps(") for given in node.args):
                printed.append(path.relative_to(ROOT).as_posix())
    assert set(printed) <= OF_THEIR_OWN
