"""What was run and how it ended, one row a run, appended and never rewritten; and the row of green micro runs.

A run counts for one code, one configuration, one kind of GPU and one geometry. Only a whole line that says "green"
counts as green; a line that cannot be read may have been a red run of any of them, so it breaks every row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, cast, get_args

from lab.errors import RunFailed
from lab.probes.gates.config import GatesConfig, RunKind
from lab.rows.environment import UNKNOWN, Environment
from lab.rows.maker import RowMaker
from lab.rows.store import Damaged, Row, RowWriter, read_lines, utc_now

KIND = "gate_run"
# What a measured number depends on: the engine, how it is timed, the pairs and these gates.
MEASURING = (
    "eagle3core", "lab/probes/bench", "lab/probes/ceilings.py", "lab/pairs", "lab/probes/gates", "lab/rows/clock.py"
)  # fmt: skip
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


@dataclass(frozen=True)
class Entry:
    """One run, as its row says.

    Attributes:
        time: when it ended. mode: its kind.
        result: "green" if every gate passed, "red" if one failed, "incomplete" if one was missing, "broke" if the run
            ended in an error.
        why: the gates that did not pass, or the error.
        environment: the machine's fingerprint.
    """

    time: str
    mode: RunKind
    result: Result
    key: Key
    why: tuple[str, ...] = ()
    environment: str = UNKNOWN

    def row(self) -> Row:
        """The run as the lab stores it."""
        maker = RowMaker("gates", "gates", self.environment)
        row = maker.measured(KIND, self.mode, {"result": self.result, "why": list(self.why)}, asdict(self.key))
        return row.model_copy(update={"recorded_at": self.time})


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
    machine = environment.gpus[0].name if on_gpu else environment.cpu or UNKNOWN
    return Key(code_hash(), config.hash, machine, config.geometry)


def code_hash(root: Path | None = None) -> str:
    """Twelve hex digits over every source and data file that a measured number depends on."""
    root = root or Path(__file__).resolve().parents[3]
    digest = hashlib.sha256()
    for folder in MEASURING:
        place = root / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def entry_of(key: Key, mode: RunKind, result: Result, why: Sequence[str], environment: str = UNKNOWN) -> Entry:
    """The entry of a run that ended now."""
    return Entry(utc_now(), mode, result, key, tuple(why), environment)


def append(path: Path, entry: Entry) -> None:
    """Add a row. What stands in the file stays; a half line before it is ended first, so that this one is whole.

    Raises:
        RunFailed: the file cannot be written.
    """
    try:
        with RowWriter(path, keeps_torn=True) as writer:
            writer.write(entry.row())
    except RunFailed as error:
        raise RunFailed(
            f"the result {entry.result!r} could not be written: {error.what}",
            error.allowed,
            "name another file with --state; the run does not count",
        ) from error


def read(path: Path) -> list[Entry | Damaged]:
    """Every line of a state file, oldest first; an absent file has none.

    Raises:
        RunFailed: the file is there and cannot be read.
    """
    return [_entry(line, number) for number, line in read_lines(path)]


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
                f"{name} {getattr(entry.key, name)} (now {getattr(key, name)})"
                for name in ("code", "config", "gpu", "geometry")
                if getattr(entry.key, name) != getattr(key, name)
            ]
            return f"the run of {entry.time} was of another {', '.join(differing)}"
    return ""


def _entry(row: Row | Damaged, number: int) -> Entry | Damaged:
    """A line as an entry; what is not wholly one may have been a red run, so it counts as damaged."""
    if isinstance(row, Damaged):
        return row
    names, result, why = [one.name for one in fields(Key)], row.values.get("result"), row.values.get("why")
    known = {name: row.parameters.get(name) for name in names}
    is_whole = (
        row.kind == KIND
        and row.status == "measured"
        and row.name in get_args(RunKind)
        and result in get_args(Result)
        and isinstance(why, list)
        and all(isinstance(value, str) for value in known.values())
    )
    if not is_whole:
        return Damaged(number, f"no row of kind {KIND}")
    key = Key(**{name: str(value) for name, value in known.items()})
    reasons = tuple(map(str, why if isinstance(why, list) else []))
    return Entry(row.recorded_at or UNKNOWN, cast(RunKind, row.name), cast(Result, result), key, reasons,
                 row.environment)  # fmt: skip


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
