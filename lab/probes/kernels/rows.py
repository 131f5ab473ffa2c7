"""What a benchmark of the kernels wrote: `python -m lab.probes.kernels.bench`, rows of the lab's one form.

Rows of kind `ceiling`, `kernel_proof` and `kernel` are read, and the machine's record of each run; those of
`kernel_setting`, a setting beside the default, are not. A run may have been
stopped at any moment, so a torn last line is left out with a note.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3core.kernels import Case
from lab.errors import ExperimentError, NotComparable, RunFailed
from lab.probes.ceilings import known_gb_per_s
from lab.probes.kernels.roofline import Cell, Proof, shape_text
from lab.rows.committed import committed_files
from lab.rows.maker import machines_of
from lab.rows.store import Row, nested, read_rows

FILE = "kernels.jsonl"
WANTED = "python3 -m lab.probes.kernels.bench --out " + FILE
CEILING, READ, KERNEL, PROOF, SETTING = "ceiling", "read", "kernel", "kernel_proof", "kernel_setting"


@dataclass
class Bench:
    """One file of benchmark rows.

    Attributes:
        name: of the file, folder included.
        gpu: the machine all rows come from; empty when there is none.
        gb_per_s: read ceiling measured in the run; None when it was not.
        commits, drivers: of the rows, in order of appearance.
        notes: what was left out, and why.
        missing: by (kind, op), why a run left it out.
    """

    name: str
    gpu: str = ""
    gb_per_s: float | None = None
    cells: list[Cell] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    drivers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(self, op: str) -> list[Cell]:
        """The op's cells; of several with one shape the last."""
        return list({shape_text(cell.shape): cell for cell in self.cells if cell.op == op}.values())

    def proof(self, op: str) -> Proof | None:
        """The op's last proof."""
        return next((proof for proof in reversed(self.proofs) if proof.op == op), None)

    @property
    def held_to_gb_per_s(self) -> float | None:
        """The read rate that small kernels are held to: the one known of this GPU, else the run's own, if any."""
        return known_gb_per_s(self.gpu) or self.gb_per_s

    def line(self) -> str:
        """Where the numbers come from, for people."""
        ceiling = f"{self.gb_per_s:.0f} GB/s read ceiling" if self.gb_per_s else "no ceiling measured"
        ceiling += "" if known_gb_per_s(self.gpu) else ", none known of this GPU"
        commit = ", ".join(commit[:12] for commit in self.commits) or "unknown"
        driver = ", ".join(self.drivers) or "unknown"
        text = f"{self.name}: {self.gpu or 'unknown GPU'}, driver {driver}, commit {commit}, {ceiling}"
        return "; ".join([text, *self.notes])


def reference_files() -> list[Path]:
    """The committed benchmark files, newest last."""
    return committed_files(FILE)


def read_bench(path: Path) -> Bench:
    """The rows of one file.

    Raises:
        ExperimentError: there is no such file.
        NotComparable: its rows come from different GPUs, or were written by a newer version of the lab.
        RunFailed: a line that is not the last is no row, or a row lacks what a benchmark's has.
    """
    if not path.is_file():
        raise ExperimentError(
            f"{path.name} cannot be read: no such file", "a file of benchmark rows", f"make one on a GPU: {WANTED}"
        )
    bench = Bench(f"{path.parent.name}/{path.name}")
    rows = read_rows(path)
    for row in rows:
        try:
            _take(bench, row)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFailed(
                f"{path.name}: {row.kind} {row.name} is no benchmark row: {type(error).__name__}: {error}",
                "rows as the benchmark writes them",
                f"remove that line if it was edited by hand, or measure again: {WANTED}",
            ) from error
    _one_machine(bench, rows)
    return bench


def _take(bench: Bench, row: Row) -> None:
    if row.kind == "warning":
        bench.notes.append("the last line was cut short and is left out")
    elif row.kind in (KERNEL, PROOF) and row.status == "missing":
        bench.missing[row.kind, row.name] = row.reason or "missing in the benchmark's file"
    elif row.kind == CEILING and row.status == "measured":
        bench.gb_per_s = float(row.values["gb_per_s"])  # type: ignore[arg-type]
    elif row.kind == PROOF and row.status == "measured":
        bench.proofs.append(_proof(row))
    elif row.kind == KERNEL and row.status == "measured":
        bench.cells.append(_cell(row))


def _proof(row: Row) -> Proof:
    values = nested(row.values)
    faults, n_cases = values["faults"], int(values["n_cases"])
    passed = values["verdict"] == "passed" and not faults and n_cases > 0
    reason = "" if passed else "; ".join(map(str, faults[:3])) or f"verdict {values['verdict']!r}, {n_cases} cases"
    return Proof(row.name, passed, reason, n_cases)


def _cell(row: Row) -> Cell:
    values, shape = nested(row.values), nested(row.parameters).get("shape")
    if shape is None:
        raise ValueError("no shape")
    if values["time_us"] <= 0 or values["floor_us"] <= 0:
        raise ValueError(f"time_us {values['time_us']}, floor_us {values['floor_us']}: both must be above 0")
    return Cell(
        op=row.name, shape=shape, us=float(values["time_us"]), floor_us=float(values["floor_us"]),
        bytes=int(values["n_bytes"]), flops=int(values.get("n_flops", 0)),
        dependent_passes=int(values.get("dependent_passes", 1)), peers=_times(values.get("libraries_us")),
        quoted={name: us for name, us in _times(values.get("quoted_us")).items() if us is not None},
        is_complete=values.get("is_complete") is True, us_p10=values.get("time_us_p10"),
        us_p90=values.get("time_us_p90"), timer=row.timer,
    )  # fmt: skip


def _times(found: dict[str, Any] | None) -> dict[str, float | None]:
    return {name: None if us is None else float(us) for name, us in (found or {}).items()}


def _one_machine(bench: Bench, rows: Sequence[Row]) -> None:
    gpus = list(dict.fromkeys(str(row.parameters["gpu"]) for row in rows if row.parameters.get("gpu")))
    if len(gpus) > 1:
        raise NotComparable(
            f"{bench.name} has rows of {' and '.join(gpus)}",
            "one GPU a file",
            "keep each GPU's rows in a file of its own",
        )
    bench.gpu = gpus[0] if gpus else ""
    machines = machines_of(rows).values()
    bench.commits = list(dict.fromkeys(machine.commit for machine in machines if machine.commit))
    drivers = (gpu.driver for machine in machines for gpu in machine.gpus)
    bench.drivers = list(dict.fromkeys(driver for driver in drivers if driver))


def plain_shape(case: Case) -> dict[str, Any]:
    """A case as JSON has it; a torch dtype, or another object, by its text."""
    whole: dict[str, Any] = json.loads(json.dumps(dict(case), default=str))
    return whole
