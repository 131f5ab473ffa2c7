"""What a benchmark of the kernels wrote: `python -m lab.probes.kernels.bench`, one JSON object a line.

Lines of kind `ceiling`, `proof` and `kernel` are read; others (`sweep`) are counted. A run may have been stopped at any
moment, so a torn last line is left out with a note.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError, NotComparable, RunFailed
from lab.probes.kernels.roofline import Cell, Proof, shape_text
from lab.rows import environment

FILE = "kernels.jsonl"
WANTED = "python3 -m lab.probes.kernels.bench --out " + FILE


@dataclass
class Bench:
    """One file of benchmark rows.

    Attributes:
        name: of the file, folder included.
        gpu: the machine all rows come from; empty when there is none.
        gb_per_s: read ceiling measured in the run; None when it was not.
        commits, drivers: of the rows, in order of appearance.
        notes: what was left out, and why.
    """

    name: str
    gpu: str = ""
    gb_per_s: float | None = None
    cells: list[Cell] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    drivers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of(self, op: str) -> list[Cell]:
        """The op's cells; of several with one shape the last."""
        return list({shape_text(cell.shape): cell for cell in self.cells if cell.op == op}.values())

    def proof(self, op: str) -> Proof | None:
        """The op's last proof."""
        return next((proof for proof in reversed(self.proofs) if proof.op == op), None)

    def line(self) -> str:
        """Where the numbers come from, for people."""
        ceiling = f"{self.gb_per_s:.0f} GB/s read ceiling" if self.gb_per_s else "no ceiling measured"
        commit = ", ".join(commit[:12] for commit in self.commits) or "unknown"
        driver = ", ".join(self.drivers) or "unknown"
        text = f"{self.name}: {self.gpu or 'unknown GPU'}, driver {driver}, commit {commit}, {ceiling}"
        return "; ".join([text, *self.notes])


def reference_files() -> list[Path]:
    """The committed benchmark files, newest last."""
    root = environment.checkout() or Path.cwd()
    found = (root / "reports" / "reference").glob(f"*/{FILE}")
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.as_posix()))


def read_bench(path: Path) -> Bench:
    """The rows of one file.

    Raises:
        ExperimentError: there is no such file.
        NotComparable: its rows come from different GPUs.
        RunFailed: a line that is not the last is no row.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ExperimentError(
            f"{path.name} cannot be read: {error.strerror}", "a file of benchmark rows", f"make one on a GPU: {WANTED}"
        ) from error
    bench = Bench(f"{path.parent.name}/{path.name}")
    if lines[-1].strip():
        bench.notes.append("the last line was cut short and is left out")
    rows = [_parsed(line, path, number) for number, line in enumerate(lines[:-1], start=1) if line.strip()]
    for number, row in rows:
        try:
            _take(bench, row)
        except (KeyError, TypeError, ValueError) as error:
            raise _no_row(path, number, f"{type(error).__name__}: {error}") from error
    _one_machine(bench, [row for _, row in rows])
    return bench


def _parsed(line: str, path: Path, number: int) -> tuple[int, dict[str, Any]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _no_row(path, number, str(error)) from error
    if not isinstance(row, dict) or "kind" not in row:
        raise _no_row(path, number, "no object with a kind")
    return number, row


def _no_row(path: Path, number: int, why: str) -> RunFailed:
    return RunFailed(
        f"line {number} of {path.name} is no benchmark row: {why}",
        "one JSON object a line, as the benchmark writes them",
        f"remove that line if it was edited by hand, or measure again: {WANTED}",
    )


def _take(bench: Bench, row: dict[str, Any]) -> None:
    if row["kind"] == "ceiling":
        bench.gb_per_s = float(row["gb_per_s"])
    elif row["kind"] == "proof":
        bench.proofs.append(_proof(row))
    elif row["kind"] == "kernel":
        bench.cells.append(_cell(row))


def _proof(row: dict[str, Any]) -> Proof:
    faults, n_cases = row["faults"], int(row["cases"])
    passed = row["verdict"] == "passed" and not faults and n_cases > 0
    reason = "" if passed else "; ".join(map(str, faults[:3])) or f"verdict {row['verdict']!r}, {n_cases} cases"
    return Proof(str(row["op"]), passed, reason, n_cases)


def _cell(row: dict[str, Any]) -> Cell:
    peers = {str(name): None if us is None else float(us) for name, us in (row.get("peers") or {}).items()}
    if row["us"] <= 0 or row["floor_us"] <= 0:
        raise ValueError(f"us {row['us']}, floor_us {row['floor_us']}: both must be above 0")
    return Cell(
        op=str(row["op"]), shape=dict(row["shape"]), us=float(row["us"]), floor_us=float(row["floor_us"]),
        bytes=int(row["bytes"]), flops=int(row.get("flops", 0)), dependent_passes=int(row.get("dependent_passes", 1)),
        peers=peers, quoted={str(name): float(us) for name, us in (row.get("quoted_us") or {}).items()},
        is_complete=row.get("status") == "measured", us_p10=row.get("us_p10"), us_p90=row.get("us_p90"),
    )  # fmt: skip


def _one_machine(bench: Bench, rows: Sequence[dict[str, Any]]) -> None:
    gpus = list(dict.fromkeys(str(row["gpu"]) for row in rows if row.get("gpu")))
    if len(gpus) > 1:
        raise NotComparable(
            f"{bench.name} has rows of {' and '.join(gpus)}",
            "one GPU a file",
            "keep each GPU's rows in a file of its own",
        )
    bench.gpu = gpus[0] if gpus else ""
    bench.commits = list(dict.fromkeys(str(row["commit"]) for row in rows if row.get("commit")))
    drivers = (str((row.get("versions") or {}).get("driver") or "") for row in rows)
    bench.drivers = list(dict.fromkeys(filter(None, drivers)))
