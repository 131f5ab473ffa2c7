"""A night that is killed leaves no process behind, and what it left is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from places import ROOT
from small_notebooks import PASS, START, write_config, write_notebook

from lab.nightly import ENDING_S, run_night
from lab.options.night import NightOptions
from lab.rows import environment, runs
from lab.rows.store import read_run

pytestmark = pytest.mark.reference

# Says who it is and hangs, the first time; the second time the marker is there and it passes.
HANG_ONCE = """\
import os, time
from pathlib import Path
marker = Path({marker!r})
if not marker.exists():
    exp.write("small", "before the end", {{"n": 1}})
    marker.write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "source_hash", lambda: "one source")


def started(config: Path, out: Path, marker: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A night in a process of its own, once its notebook hangs; and all that it has started."""
    command = "from lab.rows import environment as e; e.source_hash = lambda: 'one source'; from lab.cli import main; "
    command += f"raise SystemExit(main(['nightly', {str(config)!r}, '--out', {str(out)!r}]))"
    night = subprocess.Popen([sys.executable, "-c", command], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        assert night.poll() is None
        time.sleep(0.1)
    return night, psutil.Process(night.pid).children(recursive=True)


@pytest.mark.parametrize(
    "victim",
    ["the night", *(pytest.param(name, marks=pytest.mark.slow) for name in ("the notebook's process", "the kernel"))],
)
def test_whoever_is_killed_nothing_keeps_running_and_the_night_goes_on(victim: str, tmp_path: Path) -> None:
    marker, out = tmp_path / "marker", tmp_path / "reports" / "night"
    hanging = write_notebook(tmp_path / "hanging.ipynb", START, HANG_ONCE.format(marker=str(marker)), PASS)
    config = write_config(tmp_path / "night.toml", hanging, timeout_s=300)
    night, tree = started(config, out, marker)
    kernel = psutil.Process(int(marker.read_text()))
    assert kernel in tree
    os.kill({"the night": night.pid, "the kernel": kernel.pid}.get(victim) or tree[0].pid, signal.SIGKILL)
    if victim != "the night":
        assert night.wait(60) == 3, "the job died, the night has a verdict"
    night.wait(60)
    _, alive = psutil.wait_procs(tree, timeout=ENDING_S)
    assert not alive, "a kernel may not outlive its night"

    assert run_night(NightOptions(config=config, out=out)) == 0
    assert runs.read_summary(out)["word"] == "passed"
    job = out / "jobs" / "hanging"
    assert json.loads((job / "outcome.json").read_text())["passed"] is True
    assert [row.name for row in read_run(out) if row.kind == "small"] == [], "rows of the attempt that was killed"
    [earlier] = (out / "attempts").iterdir()
    assert "before the end" in (earlier / "rows.jsonl").read_text(), "which are kept beside"


@pytest.mark.slow
def test_a_process_of_a_killed_attempt_writes_into_that_attempt(tmp_path: Path) -> None:
    marker, out = tmp_path / "marker", tmp_path / "reports" / "night"
    hanging = write_notebook(tmp_path / "hanging.ipynb", START, HANG_ONCE.format(marker=str(marker)), PASS)
    night, _ = started(write_config(tmp_path / "night.toml", hanging, timeout_s=300), out, marker)
    try:
        [attempt] = (out / "attempts").iterdir()
        assert (attempt / "rows.jsonl").exists()
        assert not (out / "jobs" / "hanging").exists(), "its place in the run is taken when it has ended"
    finally:
        night.terminate()
        night.wait(60)
    assert (out / "jobs" / "hanging" / "rows.jsonl").exists()
