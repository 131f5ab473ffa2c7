"""A sweep's file: one JSON object a cell, added as it is measured; the same command goes on where it stopped.

All rows of a file come from one kind of GPU and one timer, since the times in it are compared with each other. A torn
last line, which a killed run leaves, is taken out before anything is added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError, NotComparable

KIND = "sweep"
FILES = {"gemm": "sweep_gemm.jsonl", "attention": "sweep_fmha.jsonl"}
# What a row is: a setting beside the default, both again in a decision, another order of sums, tiles counted, the
# kernel beside its plain reference, a run.
SCREEN, DECIDE, JOINT, TILES, AGAINST, MICRO = "screen", "decide", "joint", "tiles", "against", "micro"
Row = dict[str, Any]


@dataclass
class SweepFile:
    """Rows of one file.

    Attributes:
        name: of the file, folder included. gpu, timer: of all rows; empty while there are none.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    gpu: str = ""
    timer: str = ""

    def of(self, op: str, phase: str | None = None) -> list[Row]:
        """Rows of one operation, of one phase or all."""
        return [row for row in self.rows if row["op"] == op and phase in (None, row["phase"])]

    def line(self) -> str:
        """Where the numbers come from, for people."""
        commits = list(dict.fromkeys(str(row.get("commit") or "unknown")[:12] for row in self.rows))
        drivers = list(dict.fromkeys(str((row.get("versions") or {}).get("driver") or "none") for row in self.rows))
        driver, commit = ", ".join(drivers), ", ".join(commits)
        return f"{self.name}: {len(self.rows)} rows, {self.gpu}, driver {driver}, commit {commit}, timer: {self.timer}"


def cell_of(row: Mapping[str, Any]) -> str:
    """Tells cells apart: operation, phase, regime, shape and setting."""
    parts = [row["op"], row["phase"], row["regime"], row["shape"], row["setting"]]
    return json.dumps(parts, sort_keys=True)


def read_sweep(path: Path) -> SweepFile:
    """The rows of a file.

    Raises:
        ExperimentError: there is no such file, or a line that is not the last is no row of a sweep.
        NotComparable: rows of two kinds of GPU, or of two timers.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ExperimentError(
            f"{path.name} cannot be read: {error.strerror}", "rows of a sweep", "make them: `eagle3lab sweep gemm|fmha`"
        ) from error
    rows = [_parsed(line, path, number) for number, line in enumerate(lines[:-1], start=1) if line.strip()]
    found = SweepFile(f"{path.parent.name}/{path.name}", [row for row in rows if row["kind"] == KIND])
    for name in ("gpu", "timer"):
        values = list(dict.fromkeys(str(row[name]) for row in found.rows))
        if len(values) > 1:
            raise NotComparable(
                f"{found.name} has rows of {name} {' and '.join(map(repr, values))}",
                f"one {name} a file: its times are compared with each other",
                "keep the rows of each in a file of its own",
            )
        setattr(found, name, values[0] if values else "")
    return found


def _parsed(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
        missing = [name for name in ("kind", "op", "phase", "regime", "shape", "setting", "gpu", "timer")
                   if name not in row]  # fmt: skip
        reason = f"it lacks {', '.join(missing)}" if missing else ""
    except (ValueError, TypeError) as error:
        row, reason = {}, str(error)
    if reason:
        raise ExperimentError(
            f"line {number} of {path.name} is no row of a sweep: {reason}",
            "one JSON object a line, as `eagle3lab sweep` writes them",
            "remove that line if it was edited by hand, or begin a new file",
        )
    return dict(row)


class SweepWriter:
    """Adds rows to a file, and knows the cells that are there already.

    Args:
        about: of this machine: gpu, timer, versions, commit; in every row.

    Raises:
        NotComparable: the file has rows of another GPU or another timer.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self.about = path, dict(about)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _without_torn_line(path)
        self.file = read_sweep(path) if path.exists() else SweepFile(f"{path.parent.name}/{path.name}")
        for name in ("gpu", "timer"):
            before = getattr(self.file, name)
            if before and before != about[name]:
                raise NotComparable(
                    f"{path.name} holds rows of {name} {before!r}; this is {about[name]!r}",
                    f"rows of one {name} a file",
                    "name another file with --out",
                )
            setattr(self.file, name, about[name])
        self._known = {cell_of(row): row for row in self.file.rows}

    @property
    def rows(self) -> list[Row]:
        """All rows, old and new."""
        return self.file.rows

    def has(self, cell: Mapping[str, Any]) -> bool:
        """Whether a cell was measured before."""
        return cell_of(cell) in self._known

    def missing(self, cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those that were not."""
        return [cell for cell in cells if not self.has(cell)]

    def write(self, cell: Mapping[str, Any], **values: Any) -> None:
        """One more row, on disk before the next is measured."""
        # Through JSON once, so that rows just written and rows read compare alike.
        row: Row = json.loads(json.dumps({"kind": KIND, **cell, **values, **self.about}, default=str))
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        self.file.rows.append(row)
        self._known[cell_of(row)] = row


def _without_torn_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    whole, newline, torn = text.rpartition("\n")
    if torn:
        path.write_text(whole + newline, encoding="utf-8")
