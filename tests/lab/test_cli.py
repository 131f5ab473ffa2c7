"""The command line refuses in three parts with the right exit code, and never with a traceback."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from places import ROOT
from small_notebooks import PASS, START, write_config, write_notebook
from stored_runs import store

from eagle3core.errors import ConfigError
from lab import cli
from lab.errors import GateFailed, RunFailed
from lab.options.examples import CHAPTERS, EXAMPLES

pytestmark = pytest.mark.reference


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "COMMAND is missing"),
        (("nihgtly",), "no command 'nihgtly' (did you mean 'nightly'?)"),
        (("nightly", "--bogus"), "unrecognized arguments: --bogus"),
        (("nightly", "no.toml"), "no.toml cannot be read"),
        (("nightly", "--target", "x"), "--target was given without --draft"),
        (("run", "no_such"), "no notebook 'no_such'"),
        (("run", "00_environment", "-p", "repeat=3"), "unknown parameter 'repeat' (did you mean 'repeats'?)"),
        (("run", "00_environment", "-p", "repeats=many"), "parameter 'repeats' is 'many', a str"),
        (("report", "no_such_folder"), "holds no finished run"),
        (("compare", "a", "b"), "holds no finished run"),
    ],
)
def test_wrong_usage_exits_two_with_what_is_allowed_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, *arguments)
    assert code == 2
    assert what in err
    assert "\n  allowed: " in err
    assert "\n  do: " in err
    assert "Traceback" not in err
    assert not out
    assert not list(tmp_path.iterdir())


def test_an_unknown_key_of_a_configuration_exits_two_and_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = write_notebook(tmp_path / "small.ipynb", START, PASS)
    code, _, err = said(capsys, "nightly", str(write_config(tmp_path / "c.toml", source, timeout=3)))
    assert code == 2
    assert "c.toml: job.0.timeout: unknown key" in err
    assert "timeout_s" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunFailed("w", "a", "d"), 3),
        (GateFailed("w", "a", "d"), 1),
        (ConfigError("w", "a", "d"), 2),
        (KeyboardInterrupt(), 3),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("lab.nightly.run_night", fail)
    got, _, err = said(capsys, "nightly")
    assert got == code
    assert err.startswith("eagle3lab: ")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("a bug"), "unforeseen: ZeroDivisionError: a bug"),
        (OSError(errno.ENOSPC, "No space left", "/somewhere/rows.jsonl"), "No space left: rows.jsonl"),
        (MemoryError(), "memory is used up"),
        (RecursionError("too deep"), "unforeseen: RecursionError"),
    ],
)  # fmt: skip
def test_what_nobody_foresaw_ends_with_three_and_is_not_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("lab.nightly.run_night", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, _, err = said(capsys, "nightly")
    assert code == 3, "1 is a gate's"
    assert words in err
    assert "/somewhere" not in err
    assert "\n  allowed: " in err
    assert "\n  do: " in err
    if "unforeseen" in words:
        [kept] = tmp_path.glob("eagle3lab-*.traceback.txt")
        assert kept.name in err
        assert "in fail" in kept.read_text()


def test_python_m_lab_is_the_command_and_help_is_short() -> None:
    done = subprocess.run([sys.executable, "-m", "lab", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in ("nightly", "run", "notebooks", "report", "compare", "doctor", "train", "taps"):
        assert f"\n    {command}" in done.stdout
    assert len(done.stdout.splitlines()) < 50
    assert all(len(line) < 100 for line in done.stdout.splitlines()[:-1])
    assert "4 undecided" in " ".join(done.stdout.split())


def test_help_shows_every_command_in_one_group_and_an_example_of_each() -> None:
    shown = [name for _, names in CHAPTERS for name in names]
    assert sorted(shown) == sorted({command.name.partition(" ")[0] for command in cli.COMMANDS})
    assert set(EXAMPLES) == {command.name for command in cli.COMMANDS}
    assert all(example.startswith(name) for name, example in EXAMPLES.items())


def test_compare_prints_the_worst_first_and_exits_one_when_something_is_slower(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, after = store(tmp_path, "a", value=30.0), store(tmp_path, "b", started="2026-01-02", value=10.0)
    code, out, _ = said(capsys, "compare", str(before), str(after))
    assert code == 1
    assert "slower" in out
    assert said(capsys, "compare", str(after), str(before))[0] == 0


def test_compare_refuses_runs_of_unequal_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before, after = store(tmp_path, "a"), store(tmp_path, "b", fingerprint="other")
    code, _, err = said(capsys, "compare", str(before), str(after))
    assert code == 2
    assert "allowed: two runs with the same machine fingerprint" in err


def test_notebooks_are_listed_with_their_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "notebooks")
    assert code == 0
    assert "90_nightly: " in out


HANG = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(300)"


@pytest.mark.slow
def test_a_night_told_to_stop_ends_its_kernel_and_exits_three(tmp_path: Path) -> None:
    source = write_notebook(tmp_path / "hanging.ipynb", START, HANG, PASS)
    night = subprocess.Popen(
        [sys.executable, "-m", "lab", "run", str(source), "--out", str(tmp_path / "reports" / "r")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    note = tmp_path / "reports" / "r" / "attempts" / "hanging.1" / "pid"
    deadline = time.monotonic() + 300  # a kernel starts in seconds, on a busy machine in a minute
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    kernel = int(note.read_text())
    assert psutil.pid_exists(kernel)
    night.terminate()
    _, err = night.communicate(timeout=300)
    assert night.returncode == 3
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not psutil.pid_exists(kernel)
