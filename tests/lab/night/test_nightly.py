"""A night with real kernels: failures are told apart, later jobs run, finished ones are not run again."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_notebooks import FAIL, KILL, PASS, RAISE, START, write_config, write_notebook
from stored_runs import plan

from lab.errors import ExperimentError, RunFailed
from lab.nightly import only_night, run_night, run_one
from lab.options.night import NightOptions, RunOptions
from lab.rows import environment, runs
from lab.rows.store import read_rows, read_run

pytestmark = pytest.mark.reference

FILL_THE_DISK = """\
import resource, signal, sys
sys.dont_write_bytecode = True  # bytecode of what is imported late would be cut too, and stay so for other tests
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with an OSError, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
for number in range(100):
    exp.write('small', f'row {number}', {'n': number})
"""


@dataclass
class Night:
    code: int
    run: Path
    printed: str
    config: Path

    @property
    def summary(self) -> dict[str, Any]:
        return runs.read_summary(self.run)

    def job(self, name: str) -> dict[str, Any]:
        return next(job for job in self.summary["jobs"] if job["id"] == name)


def run(config: Path, out: Path, **options: Any) -> Night:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = run_night(NightOptions(config=config, out=out, **options))
    return Night(code, out, printed.getvalue(), config)


@pytest.fixture(scope="module", autouse=True)
def _one_source() -> Iterator[None]:
    """The hash of the source is part of a job's identity; here nothing but the test may decide what runs again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "source_hash", lambda: "one source")
        yield


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    folder = tmp_path_factory.mktemp("night")
    cells = {"first": PASS, "killed": KILL, "full": FILL_THE_DISK, "raising": RAISE}
    notebooks = [write_notebook(folder / "nb" / f"{name}.ipynb", START, cell) for name, cell in cells.items()]
    last = write_notebook(folder / "nb" / "last.ipynb", START, "exp.write('small', 'last', {'n': 1})", PASS)
    extra = f'\n[[job]]\nnotebook = "{last}"\nreads_run = true\n'
    config = write_config(folder / "night.toml", *notebooks, extra=extra, timeout_s=60)
    return run(config, folder / "reports" / "one")


def test_a_night_in_which_something_could_not_run_ends_with_three(night: Night) -> None:
    assert night.code == 3
    assert night.summary["word"] == "incomplete"
    assert "3 jobs of 5 did not finish: killed, full, raising" in night.summary["sentence"]


def test_each_failure_is_told_apart_and_the_jobs_after_it_ran(night: Night) -> None:
    words = {name: night.job(name)["status"] for name in ("first", "killed", "full", "raising", "last")}
    expected = {"first": "finished", "killed": "died", "full": "raised", "raising": "raised", "last": "finished"}
    assert words == expected
    assert night.job("raising")["error"] == "ValueError: the reason it gave"
    assert night.job("raising")["cell"] == 2


def test_a_killed_kernel_keeps_the_rows_before_it_and_leaves_a_missing_one(night: Night) -> None:
    rows = read_rows(night.run / "jobs" / "killed" / "rows.jsonl")
    assert [(row.kind, row.name, row.status) for row in rows] == [
        ("small", "before the end", "measured"),
        ("job", "killed", "missing"),
    ]
    assert "the kernel ended by itself" in str(rows[1].reason)


def test_a_disk_that_fills_up_loses_no_row_and_says_how_many_are_safe(night: Night) -> None:
    rows = read_rows(night.run / "jobs" / "full" / "rows.jsonl")
    written = [row.name for row in rows if row.kind == "small"]
    assert written == [f"row {number}" for number in range(len(written))]
    assert len(written) > 2
    assert f"the {len(written)} rows before it are safe" in night.job("full")["error"]


def test_rows_hold_no_absolute_path(night: Night) -> None:
    for row in read_run(night.run):
        assert str(night.run.parent.parent) not in row.line()
        assert str(Path.home()) + "/" not in row.line() or Path.home() == Path("/")


def test_the_last_line_on_stdout_is_the_night_in_json(night: Night) -> None:
    last = json.loads(night.printed.splitlines()[-1])
    assert (last["run"], last["word"], last["exit_code"]) == ("one", "incomplete", 3)
    assert last["gates"] == {"pass": 2, "fail": 0, "missing": 0}
    assert Path(last["report"]).exists()


@pytest.mark.slow  # with two jobs in test_could_not_run.py
def test_the_same_out_again_runs_only_what_did_not_finish_and_what_reads_it(night: Night) -> None:
    jobs = night.run / "jobs"
    before = {name: (jobs / name / "executed.ipynb").stat().st_mtime_ns for name in ("first", "raising", "last")}
    rows = read_rows(night.run / "rows.jsonl")
    again = run(night.config, night.run)
    after = {name: (jobs / name / "executed.ipynb").stat().st_mtime_ns for name in before}
    assert {name for name in before if after[name] != before[name]} == {"raising", "last"}
    assert sorted(path.name for path in (night.run / "attempts").iterdir()) == [
        "full.1",
        "killed.1",
        "last.1",
        "raising.1",
    ]
    assert again.code == 3
    assert read_rows(night.run / "rows.jsonl") == rows
    assert [row.name for row in read_rows(jobs / "killed" / "rows.jsonl")].count("before the end") == 1


def one(source: Path, out: Path, *settings: str) -> RunOptions:
    return RunOptions(notebook=str(source), settings=settings, out=out)


def test_a_file_is_found_from_where_the_command_was_typed_and_one_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = "exp.gate('read', open(rows).read() == 'mine', value=1, threshold=1)"
    source = write_notebook(tmp_path / "reading.ipynb", START, read, PASS, parameters='rows: str = ""')
    out = tmp_path / "reports" / "read"
    with pytest.raises(ExperimentError) as caught:
        run_one(one(source, out, "rows=mine.jsonl"))
    assert "rows 'mine.jsonl' does not exist" in caught.value.what
    assert not out.exists()
    (tmp_path / "mine.jsonl").write_text("mine")
    assert run_one(one(source, out, "rows=mine.jsonl")) == 0
    assert str(tmp_path) not in (out / "jobs" / "reading" / "job.json").read_text()


def test_a_failed_gate_ends_with_one_and_a_parameter_is_taken_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gate = "exp.gate('n is 4', n == 4, value=n, threshold=4)"
    source = write_notebook(tmp_path / "gated.ipynb", START, gate, PASS, parameters="n: int = 4")
    assert run_one(one(source, tmp_path / "reports" / "five", "n=5")) == 1
    summary = runs.read_summary(tmp_path / "reports" / "five")
    assert summary["sentence"].startswith("Failed: 1 gate of 2 failed: n is 4 (gated)")
    assert [gate["word"] for gate in summary["gates"]] == ["fail", "pass"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("m=1", "unknown parameter 'm'"),
        ("n", "has no '='"),
        ("n=x", "'n' is 'x', a str"),
        ("n=-1", "parameter 'n' is -1"),
        ("least=-1", "parameter 'least' is -1"),
        ("least=Infinity", "parameter 'least' is inf"),
        ("target=x", "--target PATH"),
    ],
)
def test_a_bad_setting_is_refused_and_leaves_no_folder(tmp_path: Path, setting: str, said: str) -> None:
    source = write_notebook(
        tmp_path / "small.ipynb", START, PASS, parameters='n: int = 4\nleast: float = 0.0\ntarget: str = ""'
    )
    with pytest.raises(ExperimentError) as caught:
        run_one(one(source, tmp_path / "reports" / "x", setting))
    assert said in str(caught.value)
    assert not (tmp_path / "reports").exists()


# ---- Without a kernel.


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "night.toml", write_notebook(tmp_path / "small.ipynb", START, FAIL))


def test_a_dry_run_shows_the_jobs_and_writes_nothing(tmp_path: Path, config: Path) -> None:
    shown = run(config, tmp_path / "reports" / "dry", dry_run=True)
    assert shown.code == 0
    assert "  1. small: time not known yet; {}" in shown.printed
    assert "together" not in shown.printed
    config.write_text(config.read_text() + "estimate_s = 75\n")
    shown = run(config, tmp_path / "reports" / "dry", dry_run=True)
    assert "  1. small: 1 min 15 s; {}\ntogether 1 min 15 s expected" in shown.printed
    assert not (tmp_path / "reports").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_requiring_a_gpu_where_there_is_none_could_not_run(tmp_path: Path, config: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        run(config, tmp_path / "reports" / "gpu", require_gpu=True)
    assert caught.value.exit_code == 3
    assert "there is no GPU: torch" in caught.value.what


def test_one_of_target_and_draft_alone_is_refused(tmp_path: Path, config: Path) -> None:
    with pytest.raises(ExperimentError, match="--target was given without --draft"):
        run(config, tmp_path / "reports" / "x", target=tmp_path)


def test_a_pair_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    source = write_notebook(tmp_path / "paired.ipynb", START, PASS, parameters='target: str = ""\ndraft: str = ""')
    config = write_config(tmp_path / "night.toml", source)
    with pytest.raises(ExperimentError, match="does not exist"):
        run(config, tmp_path / "reports" / "x", target=tmp_path / "no", draft=tmp_path / "no")


def test_two_nights_of_one_reports_folder_do_not_overlap(tmp_path: Path) -> None:
    with only_night(tmp_path / "reports" / "one"):
        with pytest.raises(RunFailed) as caught, only_night(tmp_path / "reports" / "two"):
            raise AssertionError("the second night got the lock")
        assert "another night is running in reports/: run one, process" in caught.value.what
    with only_night(tmp_path / "reports" / "two"):
        pass


def test_an_out_folder_with_other_things_in_it_is_refused(tmp_path: Path, config: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ExperimentError, match="holds files that are not a run"):
        run(config, tmp_path / "mine")


def test_a_run_folder_of_another_machine_cannot_be_gone_on_with(tmp_path: Path, config: Path) -> None:
    plan(tmp_path / "theirs", "another machine")
    with pytest.raises(ExperimentError, match="holds a run of another machine"):
        run(config, tmp_path / "theirs")


def test_on_a_terminal_the_last_line_is_the_address_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "night.toml", write_notebook(tmp_path / "nb" / "one.ipynb", START, PASS))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    run_night(NightOptions(config=config, out=tmp_path / "reports" / "one"))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1] == f"Report: {tmp_path / 'reports' / 'one' / 'index.html'}"
