"""What was run and how it ended, one JSON line a run, appended and never rewritten; and the row of green micro runs.

A run counts for one code, one configuration, one kind of GPU and one geometry. Only a whole line that says "green"
counts as green; a line that cannot be read may have been a red run of any of them, so it breaks every row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lab.errors import RunFailed
from lab.probes.gates.config import GatesConfig, RunKind
from lab.rows.environment import Environment
from lab.rows.store import utc_now

# What a measured number depends on: the engine, how it is timed, the pairs and these gates.
MEASURING = ("eagle3core", "lab/probes/bench", "lab/pairs", "lab/probes/gates")
SUFFIXES = {".py", ".json", ".toml", ".yaml"}
Result = Literal["green", "red", "incomplete", "broke"]


@dataclass(frozen=True)
class Key:
    """What runs must have in common to be counted together.

    Attributes:
        code: hash of the engine's and the bench's source. config: of the configuration. gpu: name of the GPU, or of
            the CPU. geometry: of the pair.
    """

    code: str
    config: str
    gpu: str
    geometry: str

    def __str__(self) -> str:
        return f"code {self.code}, configuration {self.config}, {self.gpu}, {self.geometry}"


class Entry(BaseModel):
    """One run.

    Attributes:
        result: "green" if every gate passed, "red" if one failed, "incomplete" if one was missing, "broke" if the run
            ended in an error.
        why: the gates that did not pass, or the error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: str
    mode: RunKind
    result: Result
    code: str
    config: str
    gpu: str
    geometry: str
    why: list[str] = []

    @property
    def key(self) -> Key:
        """What it counts for."""
        return Key(self.code, self.config, self.gpu, self.geometry)


@dataclass(frozen=True)
class Damaged:
    """A line that is no whole entry."""

    line: int


@dataclass(frozen=True)
class GreenRow:
    """How far the newest micro runs have come.

    Attributes:
        n_green: newest micro runs in a row that were green. n_wanted: how many there must be.
        broken_by: what stands before them, in words; empty if they go back to the first run.
    """

    n_green: int
    n_wanted: int
    broken_by: str

    @property
    def is_long_enough(self) -> bool:
        """Whether full runs are allowed."""
        return self.n_green >= self.n_wanted

    def __str__(self) -> str:
        told = f"{min(self.n_green, self.n_wanted)} of {self.n_wanted} green micro runs in a row"
        return told if self.is_long_enough or not self.broken_by else f"{told}; before them {self.broken_by}"


def key_of(config: GatesConfig, environment: Environment) -> Key:
    """The key of a run now."""
    on_gpu = config.device == "cuda" and environment.gpus
    machine = environment.gpus[0].name if on_gpu else environment.cpu
    return Key(code_hash(), config.hash, machine, config.geometry)


def code_hash(root: Path | None = None) -> str:
    """Twelve hex digits over every source and data file that a measured number depends on."""
    root = root or Path(__file__).resolve().parents[3]
    digest = hashlib.sha256()
    for folder in MEASURING:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def entry_of(key: Key, mode: RunKind, result: Result, why: Sequence[str]) -> Entry:
    """The entry of a run that ended now."""
    return Entry(
        time=utc_now(), mode=mode, result=result, code=key.code, config=key.config, gpu=key.gpu,
        geometry=key.geometry, why=list(why),
    )  # fmt: skip


def append(path: Path, entry: Entry) -> None:
    """Add a line. What stands in the file stays; a half line before it is ended first, so that this one is whole.

    Raises:
        RunFailed: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(entry.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunFailed(
            f"the result {entry.result!r} could not be written to {path.name}: {error.strerror or error}",
            "a file that can be appended to",
            "name another with --state; the run does not count",
        ) from error


def read(path: Path) -> list[Entry | Damaged]:
    """Every line of a state file, oldest first; an absent file has none.

    Raises:
        RunFailed: the file is there and cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise RunFailed(
            f"{path.name} cannot be read: {error.strerror or error}", "a readable file", "name another with --state"
        ) from error
    # A last line without its end is whole all the same if it is an object: no part of an object is one.
    return [_parsed(line, i) for i, line in enumerate(lines, start=1) if line.strip()]


def green_row(entries: Sequence[Entry | Damaged], key: Key, n_wanted: int) -> GreenRow:
    """The newest micro runs of `key`, back to the first that was not green."""
    n_green = 0
    for entry in reversed(entries):
        if isinstance(entry, Damaged):
            return GreenRow(n_green, n_wanted, f"line {entry.line}, which cannot be read and may have been a red run")
        if entry.mode != "micro" or entry.key != key:
            continue
        if entry.result != "green":
            why = f": {'; '.join(entry.why[:3])}" if entry.why else ""
            return GreenRow(n_green, n_wanted, f"the run of {entry.time}, {entry.result}{why}")
        n_green += 1
    return GreenRow(n_green, n_wanted, _what_changed(entries, key) if n_green < n_wanted else "")


def _what_changed(entries: Sequence[Entry | Damaged], key: Key) -> str:
    """The newest micro run of another key, and in what it differs."""
    for entry in reversed(entries):
        if isinstance(entry, Entry) and entry.mode == "micro" and entry.key != key:
            differing = [
                f"{name} {getattr(entry, name)} (now {getattr(key, name)})"
                for name in ("code", "config", "gpu", "geometry")
                if getattr(entry, name) != getattr(key, name)
            ]
            return f"the run of {entry.time} was of another {', '.join(differing)}"
    return ""


def _parsed(line: bytes, number: int) -> Entry | Damaged:
    try:
        return Entry.model_validate(json.loads(line))
    except (ValueError, ValidationError):
        return Damaged(number)


def require_green(path: Path, key: Key, n_wanted: int) -> GreenRow:
    """The row of green micro runs.

    Raises:
        RunFailed: it is not long enough; what is missing, and what broke it.
    """
    row = green_row(read(path), key, n_wanted)
    if not row.is_long_enough:
        n_missing = n_wanted - row.n_green
        raise RunFailed(
            f"a full run was asked for after {row}",
            f"the newest {n_wanted} micro runs green, for {key}",
            f"make the {n_missing} missing: eagle3lab gates micro --repeat {n_missing} with the same --state",
        )
    return row
