"""The child process of `lab.night.notebook`: one notebook through papermill, one kernel, one answer.

Started as `python -m lab.night.notebook_child FOLDER`; reads `request.json` there and writes `answer.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lab.night.experiment import PROGRESS_FILE
from lab.night.notebook import EXECUTED_FILE, KERNEL, without_colour
from lab.night.orphans import end_with
from lab.night.parameters import TAG, read_notebook


def run_child(scratch: Path) -> None:
    """Executes the notebook that `request.json` in `scratch` names, and writes `answer.json` beside it."""
    request = json.loads((scratch / "request.json").read_text(encoding="utf-8"))
    end_with(request["parent"])
    # Should nobody be left to end it at its limit, the alarm's default action does; its kernel then ends with it.
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    _describe_kernel(scratch)
    signal.signal(signal.SIGTERM, _stop)
    answer = _execute(request)
    unfinished = scratch / "answer.part"
    unfinished.write_text(json.dumps(answer), encoding="utf-8")
    unfinished.replace(scratch / "answer.json")


def _describe_kernel(scratch: Path) -> None:
    """The kernel specification that Jupyter finds: this interpreter, in a process that ends with this one."""
    argv = [sys.executable, "-m", "lab.night.kernel", str(os.getpid()), "-f", "{connection_file}"]
    described = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (scratch / "kernels" / KERNEL / "kernel.json").write_text(json.dumps(described), encoding="utf-8")


def _stop(signal_number: int, frame: object) -> None:
    """Unwinds through papermill, which saves the notebook as far as it came and ends the kernel."""
    raise SystemExit(128 + signal_number)


def _execute(request: dict[str, Any]) -> dict[str, Any]:
    import nbformat
    import papermill
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    from nbclient.exceptions import CellControlSignal, DeadKernelError
    from traitlets.config import Config

    out_dir = Path(request["out_dir"])
    interpreter = KernelSpecManager().get_kernel_spec(KERNEL).argv[0]
    if interpreter != sys.executable:
        return {"status": "unusable", "error": f"kernel {KERNEL!r} would run {interpreter}, not {sys.executable}"}
    notebook = nbformat.from_dict(read_notebook(Path(request["source"])))
    progress = _Progress(out_dir, notebook, injects=bool(request["parameters"]))
    executed = str(out_dir / EXECUTED_FILE).replace("{", "{{").replace("}", "}}")  # papermill formats its paths
    try:
        done = papermill.execute_notebook(
            notebook,
            executed,
            request["parameters"],
            kernel_name=KERNEL,
            language="python",
            progress_bar=False,
            start_timeout=120,
            cwd=str(out_dir),
            on_cell_start=progress.cell,
            config=Config({"KernelManager": {"transport": "ipc", "ip": request["sockets"]}}),
        )
    except papermill.PapermillExecutionError as error:
        return {
            "status": "raised",
            "cell": progress.in_source(error.cell_index),
            "error": f"{error.ename}: {error.evalue}",
            "traceback": without_colour("\n".join(error.traceback)),
        }
    except (DeadKernelError, NoSuchKernel, CellControlSignal, RuntimeError) as error:
        return {"status": "died", "cell": progress.index, "error": f"the kernel ended by itself ({error})"}
    return _ran_through(done, progress)


def _ran_through(notebook: Any, progress: _Progress) -> dict[str, Any]:
    """`sys.exit(0)` half-way leaves cells without a count; that is not a finished notebook."""
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            number = progress.in_source(index)
            return {"status": "raised", "cell": number, "error": f"the notebook stopped before cell {number}"}
    return {"status": "finished"}


class _Progress:
    """Writes one `cell` event to `progress.jsonl` as each cell starts; cells are numbered as in the source, from 0."""

    def __init__(self, out_dir: Path, notebook: Any, *, injects: bool) -> None:
        self._path = out_dir / PROGRESS_FILE
        tagged = [index for index, cell in enumerate(notebook.cells) if TAG in cell.metadata.get("tags", [])]
        self._injected_at = tagged[0] + 1 if injects else len(notebook.cells) + 1
        self._n_cells = sum(cell.cell_type == "code" for cell in notebook.cells) + injects
        self._n_started = 0
        self.index: int | None = None

    def in_source(self, index: int) -> int:
        """The number in the source of cell `index` of the executed notebook, which has a cell more."""
        return index - 1 if index >= self._injected_at else index

    def cell(self, cell: Any, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self._n_started += 1
        self.index = self.in_source(cell_index)
        event = {"event": "cell", "index": self.index, "n_started": self._n_started, "n_cells": self._n_cells}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    run_child(Path(sys.argv[1]))
