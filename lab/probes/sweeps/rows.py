"""A sweep's file: one row a cell, added as it is measured; the same command goes on where it stopped.

All cells of a file come from one kind of GPU and one timer, since the times in it are compared with each other. A torn
last line, which a killed run leaves, is taken out before anything is added.

Whoever chooses, bakes or draws works on cells: a row with its regime's key, its shape and its setting as dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError, NotComparable
from lab.rows import environment
from lab.rows.environment import Environment
from lab.rows.maker import RowMaker, machines_of
from lab.rows.store import Row, RowWriter, block, nested, read_rows, utc_now

KIND = "sweep_cell"
FILES = {"gemm": "sweep_gemm.jsonl", "attention": "sweep_fmha.jsonl"}
# What a cell is: a setting beside the default, both again in a decision, another order of sums, tiles counted, the
# kernel beside its plain reference, a run.
SCREEN, DECIDE, JOINT, TILES, AGAINST, MICRO = "screen", "decide", "joint", "tiles", "against", "micro"
Cell = dict[str, Any]


@dataclass
class SweepFile:
    """Cells of one file.

    Attributes:
        name: of the file, folder included. gpu, timer: of all cells; empty while there are none.
        machines: records of the runs that measured them.
    """

    name: str
    cells: list[Cell] = field(default_factory=list)
    gpu: str = ""
    timer: str = ""
    machines: list[Environment] = field(default_factory=list)

    def of(self, op: str, phase: str | None = None) -> list[Cell]:
        """Cells of one operation, of one phase or all."""
        return [cell for cell in self.cells if cell["op"] == op and phase in (None, cell["phase"])]

    def line(self) -> str:
        """Where the numbers come from, for people."""
        commits = dict.fromkeys((machine.commit or "unknown")[:12] for machine in self.machines)
        drivers = dict.fromkeys((gpu.driver or "none") for machine in self.machines for gpu in machine.gpus)
        driver, commit = ", ".join(drivers) or "none", ", ".join(commits) or "unknown"
        return f"{self.name}: {len(self.cells)} rows, {self.gpu}, driver {driver}, commit {commit}, timer: {self.timer}"


def identity(cell: Mapping[str, Any]) -> str:
    """Tells cells apart: operation, phase, regime, shape and setting."""
    parts = [cell["op"], cell["phase"], cell["regime"], cell["shape"], cell["setting"]]
    return json.dumps(parts, sort_keys=True)


def cell_of(row: Row) -> Cell:
    """A row as whoever chooses, bakes or draws sees it; a block is a dictionary.

    Raises:
        ExperimentError: it lacks what tells cells apart.
    """
    parameters = nested(row.parameters)
    lacks = [name for name in ("op", "phase", "gpu") if name not in parameters] + ([] if row.timer else ["timer"])
    if lacks:
        raise ExperimentError(
            f"the {KIND} row {row.name!r} lacks {', '.join(lacks)}",
            "rows as `eagle3lab sweep` writes them",
            "remove that line if it was edited by hand, or begin a new file",
        )
    blocks: Cell = {name: parameters.get(name, {}) for name in ("key", "shape", "setting")}
    return {
        "op": parameters["op"], "phase": parameters["phase"], "regime": row.name, **blocks, **nested(row.values),
        "gpu": parameters["gpu"], "timer": row.timer,
    }  # fmt: skip


def row_of(maker: RowMaker, cell: Mapping[str, Any], values: Mapping[str, Any], timer: str) -> Row:
    """The row of a cell; what is a dictionary becomes a block. `cell_of` gives both back."""
    parameters: dict[str, Any] = {"op": cell["op"], "phase": cell["phase"]}
    for name in ("key", "shape", "setting"):
        parameters |= block(name, cell[name])
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= block(name, value) if isinstance(value, Mapping) else {name: value}
    # Through JSON once, so that rows just written and rows read compare alike.
    plain = json.loads(json.dumps({"values": flat, "parameters": parameters}, default=str))
    return maker.measured(KIND, cell["regime"], plain["values"], plain["parameters"], timer=timer)


def read_sweep(path: Path) -> SweepFile:
    """The cells of a file.

    Raises:
        ExperimentError: there is no such file, or a row is no cell of a sweep.
        RunFailed: a line that is not the last is no row.
        NotComparable: cells of two kinds of GPU, or of two timers.
    """
    if not path.is_file():
        raise ExperimentError(
            f"{path.name} cannot be read: no such file", "rows of a sweep", "make them: `eagle3lab sweep gemm|fmha`"
        )
    rows = read_rows(path)
    found = SweepFile(f"{path.parent.name}/{path.name}", [cell_of(row) for row in rows if row.kind == KIND])
    found.machines = list(machines_of(rows).values())
    for name in ("gpu", "timer"):
        values = list(dict.fromkeys(str(cell[name]) for cell in found.cells))
        if len(values) > 1:
            raise NotComparable(
                f"{found.name} has rows of {name} {' and '.join(map(repr, values))}",
                f"one {name} a file: its times are compared with each other",
                "keep the rows of each in a file of its own",
            )
        setattr(found, name, values[0] if values else "")
    return found


class SweepWriter:
    """Adds rows to a file, and knows the cells that are there already.

    Args:
        gpu, timer: of this machine; in every row.

    Raises:
        NotComparable: the file has rows of another GPU or another timer.
    """

    def __init__(self, path: Path, gpu: str, timer: str) -> None:
        self.path, self.gpu, self.timer = path, gpu, timer
        self._rows = RowWriter(path)
        self._maker: RowMaker | None = None
        self.file = read_sweep(path)
        for name, now in (("gpu", gpu), ("timer", timer)):
            before = getattr(self.file, name)
            if before and before != now:
                raise NotComparable(
                    f"{path.name} holds rows of {name} {before!r}; this is {now!r}",
                    f"rows of one {name} a file",
                    "name another file with --out",
                )
            setattr(self.file, name, now)
        self._known = {identity(cell) for cell in self.file.cells}

    @property
    def cells(self) -> list[Cell]:
        """All cells, old and new."""
        return self.file.cells

    def has(self, cell: Mapping[str, Any]) -> bool:
        """Whether a cell was measured before."""
        return identity(cell) in self._known

    def missing(self, cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those that were not."""
        return [cell for cell in cells if not self.has(cell)]

    def write(self, cell: Mapping[str, Any], **values: Any) -> None:
        """One more row, on disk before the next is measured; before the first of a run, the machine's."""
        if self._maker is None:
            machine = environment.collect()
            self._maker = RowMaker(f"sweep-{utc_now()}", "sweep", machine.fingerprint, shared={"gpu": self.gpu})
            self._rows.write(self._maker.machine(machine))
            self.file.machines.append(machine)
        row = row_of(self._maker, cell, values, self.timer)
        self._rows.write(row)
        self.file.cells.append(cell_of(row))
        self._known.add(identity(self.file.cells[-1]))
