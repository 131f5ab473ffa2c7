"""`eagle3lab rows upgrade FILE|DIR...`: stored rows of older forms carried over to today's, and what that changes.

Nothing is written unless --write is given, and nothing at all unless every line of every file is understood.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab.ending import tell_summary
from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.exchange import UpgradeOptions
from lab.rows.appending import open_alone
from lab.rows.carried.old_forms import KNOWN, Carrier
from lab.rows.store import RowWriter
from lab.rows.stored.files import MOST_ROWS_BYTES, decoded, read_bytes

# JSON lines of the lab that hold no rows, passed over in a folder: a night's progress, prompts, a training's losses.
NO_ROWS = ("progress.jsonl", "prompts.jsonl", "losses.jsonl")


@dataclass(frozen=True)
class Upgrade:
    """What a file becomes."""

    path: Path
    n_lines: int
    carrier: Carrier

    @property
    def is_needed(self) -> bool:
        """Whether anything changes."""
        return bool(self.carrier.changes)

    def lines(self, shown: str) -> list[str]:
        """What changes, for people."""
        if not self.is_needed:
            return [f"{shown}: {self.n_lines} rows, nothing to change"]
        head = f"{shown}: {self.n_lines} lines -> {len(self.carrier.rows)} rows"
        return [head, *(f"  {n:5d} x {words}" for words, n in self.carrier.changes.items())]

    def write(self) -> None:
        """Puts the new rows in the file's place, whole or not at all."""
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        with RowWriter(part) as writer:
            for row in self.carrier.rows:
                writer.write(row)
        part.replace(self.path)


def run(options: UpgradeOptions) -> int:
    """Shows what would change, or changes it, while no other process may add rows; 0."""
    paths = files_of(options.paths)
    with ExitStack() as until_the_end:
        if options.write:
            for path in paths:
                until_the_end.callback(os.close, open_alone(path))
        upgrades = [upgrade_of(path) for path in paths]
        for upgrade in upgrades:
            print("\n".join(upgrade.lines(_shown(upgrade.path))))
            if options.write and upgrade.is_needed:
                upgrade.write()
    n_needed = sum(upgrade.is_needed for upgrade in upgrades)
    what = "written" if options.write else "to be written with --write"
    tell_summary({"command": "rows upgrade", "files": len(upgrades), "changed": n_needed, "state": what})
    return EXIT_PASSED


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files named, and the rows' files in the folders named.

    Raises:
        ExperimentError: a path is neither.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*.jsonl") if file.name not in NO_ROWS)
        elif path.is_file():
            found.append(path)
        else:
            raise ExperimentError(f"{path.name} is neither a file nor a folder", "files of rows", "check the path")
    return list({path.resolve(): path for path in found}.values())


def upgrade_of(path: Path) -> Upgrade:
    """What a file becomes; nothing is written.

    Raises:
        ExperimentError: a line is of no known form, or is cut short.
        NotComparable: a row was written by a newer version of the lab.
    """
    carrier, n_lines = Carrier(path.stem), 0
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        n_lines += 1
        try:
            data = decoded(line)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            carrier.take(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # of pydantic as well
            raise ExperimentError(
                f"line {number} of {path.name} cannot be carried over: {' '.join(str(error).split())[:300]}",
                KNOWN,
                "mend or remove that line; no file was changed",
            ) from error
    return Upgrade(path, n_lines, carrier)


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MOST_ROWS_BYTES)
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{path.name} cannot be read: {error}", "a file of rows", "check the path") from error


def _shown(path: Path) -> str:
    here = Path.cwd()
    return path.resolve().relative_to(here).as_posix() if path.resolve().is_relative_to(here) else path.name
