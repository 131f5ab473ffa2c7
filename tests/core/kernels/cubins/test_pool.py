"""Jobs in processes: each has a result whatever becomes of its process, and nothing is left of a pool that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pool_jobs
import pytest

from eagle3core.kernels.cubins import pool as pool_module
from eagle3core.kernels.cubins.pool import Pool

pytestmark = pytest.mark.reference

NAMES = ("a", "b", "odd", "c", "d", "e")


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    status = Path("/proc", str(pid), "stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(holds, patience_s: float = 20.0) -> bool:
    """Whether a condition comes to hold in time."""
    end = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def written_pids(folder: Path, patience_s: float = 20.0) -> list[int]:
    """What the two jobs of `last_long` write of themselves; a file is there before it is full."""
    files = [folder / name for name in "ab"]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), patience_s)
    return [int(file.read_text()) for file in files]


def test_every_job_has_one_result_and_processes_share_them(tmp_path: Path) -> None:
    with Pool(pool_jobs.write, [(tmp_path, name) for name in NAMES], 2) as pool:
        results = list(pool.results())
    assert sorted(result.index for result in results) == list(range(6))
    assert all(result.failure is None and result.seconds >= 0 for result in results)
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES)
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("job", "words"), [(pool_jobs.refuse, "ValueError: odd is ? very long"), (pool_jobs.be_killed, "signal 9")]
)
def test_a_job_that_goes_wrong_is_told_and_the_others_are_done(job, words: str, tmp_path: Path) -> None:
    with Pool(job, [(tmp_path, name) for name in NAMES], 2) as pool:
        failed = {NAMES[result.index]: result.failure for result in pool.results() if result.failure is not None}
    assert list(failed) == ["odd"]
    assert words in failed["odd"]
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES) - {"odd"}


def test_a_process_that_cannot_begin_leaves_its_reason_with_every_job(tmp_path: Path) -> None:
    with Pool(pool_jobs.write, [(tmp_path, "a"), (tmp_path, "b")], 2, imports=["no_such_module"]) as pool:
        results = list(pool.results())
    assert [result.index for result in results] == [0, 1]
    assert all("No module named 'no_such_module'" in (result.failure or "") for result in results)


def test_a_pool_that_is_closed_ends_its_processes_whatever_they_are_at(tmp_path: Path) -> None:
    with Pool(pool_jobs.last_long, [(tmp_path, "a"), (tmp_path, "b")], 2):
        pids = written_pids(tmp_path)
        assert all(map(is_alive, pids))
    assert wait_until(lambda: not any(map(is_alive, pids)))


PROGRAM = """
    import signal, sys
    from pathlib import Path
    import pool_jobs
    from eagle3core.kernels.cubins.pool import Pool
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what runs behind a shell's back
    folder = Path(sys.argv[1])
    with Pool(pool_jobs.{job}, [(folder, name) for name in "ab"], 2) as pool:
        print(len(list(pool.results())))
"""


def program(job: str, folder: Path, script: Path) -> subprocess.Popen[str]:
    """A script without a guard around what it does, as people write them, that uses a pool."""
    script.write_text(textwrap.dedent(PROGRAM.format(job=job)))
    paths = [str(Path(pool_jobs.__file__).parent), str(Path(pool_module.__file__).parents[3])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(script), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_a_script_without_a_guard_for_its_main_module_runs_once(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    out, errors = program("write", made, tmp_path / "script.py").communicate(timeout=60)
    assert out == "2\n", errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_program_that_is_interrupted_or_killed(number: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    running = program("last_long", made, tmp_path / "script.py")
    pids = written_pids(made, 60)
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert running.returncode != 0
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert wait_until(lambda: not any(map(is_alive, pids)))
