"""What a disk or a limit refuses costs the job that met it, not the night's verdict nor the jobs after it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from small_notebooks import FAIL, PASS, START, write_config, write_notebook

from lab import cli
from lab.errors import RunFailed
from lab.night import attempts
from lab.night.notebook import NotebookOutcome, run_notebook
from lab.nightly import run_night
from lab.options.night import NightOptions
from lab.rows import environment, runs

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def _one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "source_hash", lambda: "one source")


def config_of(folder: Path, *cells: str, extra: str = "") -> Path:
    books = [write_notebook(folder / f"job{i}.ipynb", START, cell) for i, cell in enumerate(cells)]
    return write_config(folder / "night.toml", *books, extra=extra, timeout_s=60)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return line


@pytest.mark.slow
def test_a_disk_that_was_full_for_one_job_is_no_end_of_the_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_for_the_first(source: Path, *given: Any, **options: Any) -> NotebookOutcome:
        if source.stem == "job0":
            raise OSError(errno.ENOSPC, "No space left on device")
        return run_notebook(source, *given, **options)

    monkeypatch.setattr(attempts, "run_notebook", full_for_the_first)
    config, out = config_of(tmp_path, PASS, PASS), tmp_path / "reports" / "night"
    assert run_night(NightOptions(config=config, out=out)) == 3
    line = last_line(capsys)
    assert (line["word"], line["gates"]) == ("incomplete", {"pass": 1, "fail": 0, "missing": 0})
    jobs = {job["id"]: job["status"] for job in runs.read_summary(out)["jobs"]}
    assert jobs == {"job0": "not run", "job1": "finished"}

    def noted(source: Path, *given: Any, **options: Any) -> NotebookOutcome:
        begun.append(source.stem)
        return run_notebook(source, *given, **options)

    begun: list[str] = []
    monkeypatch.setattr(attempts, "run_notebook", noted)
    finished = out / "jobs" / "job1" / "rows.jsonl"
    before = finished.read_bytes()
    assert run_night(NightOptions(config=config, out=out)) == 0, "with room, the same command goes on"
    assert begun == ["job0"], "what had finished is not run again"
    assert finished.read_bytes() == before


@pytest.mark.parametrize(("cell", "code"), [(PASS, 3), pytest.param(FAIL, 1, marks=pytest.mark.slow)])
def test_a_page_that_cannot_be_written_leaves_the_verdict_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cell: str, code: int
) -> None:
    def refuse(run_dir: Path) -> Path:
        raise RunFailed("index.html could not be written: No space left on device", "room", "make some")

    monkeypatch.setattr("lab.page.report.render", refuse)
    assert run_night(NightOptions(config=config_of(tmp_path, cell), out=tmp_path / "reports" / "night")) == code
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["exit_code"] == code
    assert "not drawn: index.html could not be written" in said.err


def test_each_part_of_a_night_that_runs_whole_has_its_own_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def limit_of(*_: Any, timeout_s: float, **__: Any) -> NotebookOutcome:
        given.append(timeout_s)
        return NotebookOutcome("died", 0.0, error="not the point")

    monkeypatch.setattr(attempts, "run_notebook", limit_of)
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(attempts.time, "monotonic", lambda: float(next(clock)))
    second = tmp_path / "job1.ipynb"
    extra = f'\n[[job]]\nnotebook = "{second}"\npart = 2\ntimeout_s = 600\n[budget]\npart_s = 100\nnight_s = 200\n'
    config = config_of(tmp_path, PASS, extra=extra)
    write_notebook(second, START, PASS)
    run_night(NightOptions(config=config, out=tmp_path / "reports" / "night"))
    assert given == [60, 100], "of the job's own limit and a part's budget the smaller, each part from its own start"


def test_an_out_that_is_a_file_is_refused_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for out in (notes, notes / "below"):
        assert cli.main(["nightly", str(config_of(tmp_path, PASS)), "--out", str(out)]) == 2
        assert "'notes.txt' is a file" in capsys.readouterr().err
    assert notes.read_text() == "mine"
