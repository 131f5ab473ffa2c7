"""The notebook of acceptance keeps a log and its lengths; a later run with a changed draft fails against them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import cli
from lab.acceptance.golden.file import read_golden
from lab.nightly import run_one
from lab.options.night import RunOptions
from lab.rows.runs import read_summary
from lab.rows.store import read_run

pytestmark = pytest.mark.reference

SETTINGS = ("n_prompts=2", "max_new_tokens=16", "ks=[3]", "n_reference_prompts=1", "uneven_k=0", "device=cpu")
GATE = "golden acceptance lengths"


def gates_of(run: Path) -> dict[str, str]:
    return {gate["name"]: gate["word"] for gate in read_summary(run)["gates"]}


@pytest.mark.slow
def test_a_run_is_kept_and_told_and_a_planted_bug_is_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, kept = tmp_path / "reports" / "first", tmp_path / "reports" / "second", tmp_path / "kept.json"
    assert run_one(RunOptions(notebook="31_acceptance", settings=(*SETTINGS, "keep_log=true"), out=first)) == 0
    assert GATE not in gates_of(first), "sixteen tokens of two prompts have no golden length"
    assert cli.main(["golden", str(first), "--out", str(kept), "--tolerance", "0.05"]) == 0
    [golden] = read_golden(kept)
    [row] = [row for row in read_run(first) if row.kind == "acceptance"]
    assert golden.length == pytest.approx(row.number("acceptance_length"), abs=1e-6)
    capsys.readouterr()
    assert cli.main(["inspect", "run", str(first), "--what-if", "chain-1"]) == 0
    assert "jobs/31_acceptance/acceptance.jsonl: 2 requests, " in capsys.readouterr().out
    against = (*SETTINGS, f"golden={kept}", "fault=tap_order")
    assert run_one(RunOptions(notebook="31_acceptance", settings=against, out=second)) == 1
    assert gates_of(second)[GATE] == "fail"
    [judged] = [row for row in read_run(second) if row.kind == "golden_length"]
    assert judged.values["is_within"] is False
    assert judged.parameters["fault"] == "tap_order"
