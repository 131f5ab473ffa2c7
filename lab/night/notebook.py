"""Runs one notebook in one process of its own, and tells what became of it; reads executed ones for the report.

papermill alone is no safe runner: it ignores unknown parameters, has no total time limit, shares a process with its
caller, and ends 1 for every fault. So `run_notebook` checks first (see `lab.night.parameters`), starts
`lab.night.notebook_child`, the one file that knows papermill, with a private kernel specification and runtime folder,
watches its progress, and ends the whole tree at the limit. The executed notebook is kept whatever happens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from lab.errors import ExperimentError
from lab.night.experiment import OUT_VARIABLE, OUTCOME_FILE, PROGRESS_FILE, SOURCE_VARIABLE
from lab.night.parameters import check_parameters, read_notebook, read_parameters

EXECUTED_FILE = "executed.ipynb"
KERNEL = "python3"
# How long a child that was told to stop may take to save the notebook before it is ended.
_GRACE_S = 5.0
_POLL_S = 0.1

Status = Literal["finished", "raised", "died", "timeout", "unusable"]


@dataclass(frozen=True)
class NotebookOutcome:
    """What became of one notebook.

    `finished`: every cell ran and `Experiment.finish` left an outcome; `passed` says whether its gates held.
    `raised`: a cell raised, or the notebook stopped early. `died`: its kernel or its process ended by itself.
    `timeout`: the total limit was reached. `unusable`: it could not be started at all.
    """

    status: Status
    seconds: float
    passed: bool | None = None
    cell: int | None = None
    error: str | None = None
    traceback: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The outcome as JSON-ready values."""
        return asdict(self)


def run_notebook(
    source: Path,
    out_dir: Path,
    parameters: dict[str, Any],
    *,
    timeout_s: float,
    on_progress: Callable[[dict[str, Any]], None] = lambda event: None,
    held: tuple[int, ...] = (),
) -> NotebookOutcome:
    """Executes `source` with `parameters` into `out_dir`, which holds the executed notebook afterwards.

    Args:
        timeout_s: limit for the whole notebook, kernel start included, in seconds.
        held: open files that the child keeps open as long as it lives, such as the night's lock.
        on_progress: called with each event of `progress.jsonl` as it appears: `cell` (index, n_cells) and `say` (text).

    Raises:
        ExperimentError: an unknown or mistyped parameter, or no readable notebook; nothing was started.
    """
    resolved = check_parameters(read_parameters(source), parameters)
    out_dir.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="nb-"))  # short: a Unix socket's path has at most 107 characters
    try:
        request = {
            "source": str(source.resolve()),
            "out_dir": str(out_dir.resolve()),
            "sockets": str(scratch / "runtime" / "k"),
            "parameters": {name: resolved[name] for name in parameters},
            "parent": os.getpid(),
            "limit_s": timeout_s + 2 * _GRACE_S,
        }
        (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
        child = _start_child(scratch, source, out_dir, held)
        status = _watch(child, out_dir / PROGRESS_FILE, began + timeout_s, on_progress)
        answer = _answer(scratch, child, status, timeout_s)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _judged(answer, out_dir, time.monotonic() - began)


def _start_child(scratch: Path, source: Path, out_dir: Path, held: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """The child process: same interpreter, own kernel specification, own runtime folder, one thread for OpenMP."""
    specification = scratch / "kernels" / KERNEL
    specification.mkdir(parents=True)
    (scratch / "runtime").mkdir(mode=0o700)
    root = str(Path(__file__).resolve().parents[2])
    environ = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    environ |= {
        SOURCE_VARIABLE: str(source.resolve()),
        OUT_VARIABLE: str(out_dir.resolve()),
        "JUPYTER_PATH": str(scratch),
        "JUPYTER_RUNTIME_DIR": str(scratch / "runtime"),
        "IPYTHONDIR": str(scratch / "ipython"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    with (scratch / "child.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lab.night.notebook_child", str(scratch)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=held,
        )


def _watch(
    child: subprocess.Popen[bytes], progress: Path, deadline: float, on_progress: Callable[[dict[str, Any]], None]
) -> Literal["ended", "timeout"]:
    """Passes progress on until the child ends or the deadline comes; whatever is left of the tree is ended."""
    seen, started = progress.stat().st_size if progress.exists() else 0, set[psutil.Process]()
    try:
        while True:
            started |= _children_of(child)
            ended = child.poll() is not None
            seen = _pass_on(progress, seen, on_progress)
            if ended:
                return "ended"
            if time.monotonic() > deadline:
                return "timeout"
            time.sleep(_POLL_S)
    finally:
        _end_tree(child, started)


def _children_of(child: subprocess.Popen[bytes]) -> set[psutil.Process]:
    """What the child has started and is running now; remembered, for who started it is forgotten when it ends."""
    try:
        return set(psutil.Process(child.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _pass_on(progress: Path, seen: int, on_progress: Callable[[dict[str, Any]], None]) -> int:
    """Reports the whole lines after byte `seen`; gives the new position."""
    if not progress.exists():
        return seen
    with progress.open("rb") as stream:
        stream.seek(seen)
        fresh = stream.read()
    whole = fresh[: fresh.rfind(b"\n") + 1]
    for line in whole.splitlines():
        on_progress(json.loads(line))
    return seen + len(whole)


def _end_tree(child: subprocess.Popen[bytes], started: set[psutil.Process]) -> None:
    """Ends the child and everything it started; a child that is asked first saves the notebook as far as it came."""
    tree = started | _children_of(child)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for process in tree:
        # psutil compares start times, so a reused process number is never signalled.
        if process.is_running():
            process.kill()
    psutil.wait_procs(tree, timeout=_GRACE_S)


def _answer(scratch: Path, child: subprocess.Popen[bytes], ended: str, timeout_s: float) -> dict[str, Any]:
    """What the child said of itself, or what its end says of it."""
    path = scratch / "answer.json"
    said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if ended == "timeout":
        return {**said, "status": "timeout", "error": f"the notebook did not end within {timeout_s:g} s"}
    if said:
        return said
    log = (scratch / "child.log").read_text(encoding="utf-8", errors="replace").strip()
    code = child.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return {"status": "died", "error": f"the notebook's process ended with {how}", "traceback": log[-4000:] or None}


def _judged(answer: dict[str, Any], out_dir: Path, seconds: float) -> NotebookOutcome:
    """The outcome, with the notebook's own verdict on its gates where it came to its end."""
    outcome = out_dir / OUTCOME_FILE
    if answer["status"] == "finished":
        if not outcome.exists():
            error = "the notebook came to its end without calling finish(), so nothing says whether it passed"
            return NotebookOutcome("raised", seconds, error=error)
        passed = bool(json.loads(outcome.read_text(encoding="utf-8"))["passed"])
        return NotebookOutcome("finished", seconds, passed=passed)
    return NotebookOutcome(
        answer["status"],
        seconds,
        cell=answer.get("cell"),
        error=answer.get("error"),
        traceback=answer.get("traceback"),
    )


# ---- For the report: an executed notebook as plain parts.


def without_colour(text: str) -> str:
    """`text` without the colour codes of a terminal."""
    from nbconvert.filters import strip_ansi

    return str(strip_ansi(text))


def notebook_parts(path: Path) -> list[dict[str, Any]]:
    """The cells of an executed notebook for a page: `kind`, `source` or `html`, and `outputs` as (form, text) pairs.

    Forms: "html" and "svg" go in as they are, "text" and "error" are plain text without colour codes.
    """
    from nbconvert.filters import markdown2html_mistune

    parts: list[dict[str, Any]] = []
    for cell in read_notebook(path)["cells"]:
        source = _joined(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append({"kind": "markdown", "html": markdown2html_mistune(source)})
        elif cell["cell_type"] == "code" and source.strip():
            outputs = [pair for output in cell.get("outputs", []) if (pair := _output(output))]
            parts.append({"kind": "code", "source": source, "outputs": _merged(outputs)})
    return parts


def _merged(outputs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Printed text that arrived in several messages as one block."""
    merged: list[tuple[str, str]] = []
    for form, text in outputs:
        if merged and form == merged[-1][0] == "text":
            merged[-1] = (form, merged[-1][1].rstrip("\n") + "\n" + text)
        else:
            merged.append((form, text))
    return merged


def _output(output: dict[str, Any]) -> tuple[str, str] | None:
    kind = output["output_type"]
    if kind == "stream":
        return "text", without_colour(_joined(output["text"]))
    if kind == "error":
        return "error", without_colour("\n".join(output["traceback"]))
    data = output.get("data", {})
    for mime, form in (("text/html", "html"), ("image/svg+xml", "svg"), ("text/plain", "text")):
        if mime in data:
            return form, _joined(data[mime])
    return None


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def declared(source: Path) -> set[str]:
    """Names of the parameters a notebook declares.

    Raises:
        ExperimentError: it has none of the two that tell it where to write.
    """
    names = {spec.name for spec in read_parameters(source)}
    if not {"run_dir", "job"} <= names:
        raise ExperimentError(
            f"{source.name} does not declare the parameters run_dir and job",
            'run_dir: str = "" and job: str = "" in its parameters cell',
            "add both; they say where its results go",
        )
    return names
