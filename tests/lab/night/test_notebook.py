"""One notebook in one process: what became of it is told apart, and nothing of it stays behind."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_notebooks import PASS, START, write_notebook

from lab.errors import ExperimentError
from lab.night.notebook import NotebookOutcome, notebook_parts, run_notebook
from lab.rows import environment
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "environment.json").write_text(environment.collect().model_dump_json())
    return folder


def execute(run_dir: Path, job: str, *cells: str, timeout_s: float = 60, **given: object) -> NotebookOutcome:
    source = write_notebook(run_dir / f"{job}.ipynb", *cells, parameters="n: int = 1  # things")
    given = {"run_dir": "../..", "job": job, **given}
    return run_notebook(source, run_dir / "jobs" / job, given, timeout_s=timeout_s)


def test_a_notebook_runs_with_its_parameters_in_this_interpreter_and_is_kept(run_dir: Path) -> None:
    seen = "import sys, os\nexp.write('seen', 'kernel', {'n': n, 'python': sys.executable, 'folder': os.getcwd()})"
    source = write_notebook(run_dir / "good.ipynb", START, seen, "exp.say('half-way')", PASS, parameters="n: int = 1")
    events: list[dict[str, object]] = []
    out = run_dir / "jobs" / "good"
    given = {"run_dir": "../..", "job": "good", "n": 7}
    outcome = run_notebook(source, out, given, timeout_s=60, on_progress=events.append)
    assert (outcome.status, outcome.passed) == ("finished", True)
    row = next(row for row in read_rows(out / "rows.jsonl") if row.kind == "seen")
    assert row.values == {"n": 7, "python": sys.executable, "folder": str(out)}
    assert "half-way" in [event.get("text") for event in events]
    assert max(event["n_started"] for event in events if event["event"] == "cell") == events[0]["n_cells"]
    assert sorted(path.name for path in out.iterdir()) == [
        "executed.ipynb",
        "outcome.json",
        "progress.jsonl",
        "rows.jsonl",
    ]
    assert any(
        "half-way" in text for part in notebook_parts(out / "executed.ipynb") for _, text in part.get("outputs", [])
    )


def test_an_unknown_or_mistyped_parameter_is_refused_before_anything_is_started(run_dir: Path) -> None:
    with pytest.raises(ExperimentError, match=r"unknown parameter 'm'"):
        execute(run_dir, "refused", PASS, m=1)
    with pytest.raises(ExperimentError, match=r"parameter 'n' is 'x', a str"):
        execute(run_dir, "refused", PASS, n="x")
    assert not (run_dir / "jobs" / "refused").exists()


def test_a_raising_cell_is_named_with_its_error(run_dir: Path) -> None:
    outcome = execute(run_dir, "raising", START, "value = 1\nvalue / 0", PASS)
    assert (outcome.status, outcome.error) == ("raised", "ZeroDivisionError: division by zero")
    source = json.loads((run_dir / "raising.ipynb").read_text())
    assert "value / 0" in source["cells"][outcome.cell]["source"]
    assert "value / 0" in str(outcome.traceback)
    assert "\x1b[" not in str(outcome.traceback)


class ClockOfTheCell:
    """A clock whose hour passes when `sign` is written, so that no limit depends on how fast a kernel starts."""

    sleep = staticmethod(time.sleep)

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def monotonic(self) -> float:
        return 3600.0 if self.sign.exists() else 0.0


def test_the_time_limit_ends_the_whole_tree_and_keeps_what_was_printed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_dir / "jobs" / "hanging"
    monkeypatch.setattr("lab.night.notebook.time", ClockOfTheCell(folder / "hangs"))
    begins = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}')\nprint('so far')"
    )
    outcome = execute(run_dir, "hanging", begins, "open('hangs', 'w')\ntime.sleep(300)", timeout_s=60)
    assert outcome.status == "timeout"
    assert outcome.error == "the notebook did not end within 60 s"
    assert not [pid for pid in (folder / "pids").read_text().split() if psutil.pid_exists(int(pid))]
    assert "so far" in (folder / "executed.ipynb").read_text()


@pytest.mark.slow
def test_leaving_early_or_without_an_outcome_is_not_finishing(run_dir: Path) -> None:
    left = execute(run_dir, "leaving", START, "import sys\nsys.exit(0)", PASS)
    assert left.status in ("raised", "died")
    silent = execute(run_dir, "silent", START)
    assert silent.status == "raised"
    assert "without calling finish()" in str(silent.error)
