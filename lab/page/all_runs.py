"""Every run of a reports folder as a line of the index: machine, pair, speed-up, acceptance length, and its past.

A run that says less than its line could show keeps its place, and the line says why; only a summary that cannot be read
at all leaves the list, and is named below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.errors import LabError
from lab.page import facts, first_screen
from lab.page.findings.finding import Night
from lab.page.first_screen import Figure
from lab.rows.environment import Environment
from lab.rows.runs import Runs, read_environment, read_plan, read_whole_summary
from lab.rows.store import read_run
from lab.rows.stored.forms import Form, Moment, Number
from lab.rows.trend import MIN_DRAWN_NIGHTS, find_steps

PAGE = "index.html"
# Rows of older runs are not read for the list: half a megabyte takes 50 ms, and every night draws the list again.
MAX_READ_RUNS = 200
MAX_SPARK_RUNS = 30  # earlier runs in one line of 160 pixels


class Told(Form):
    """What the index says of a run, out of its summary."""

    word: str
    sentence: str
    started_at: Moment
    seconds: Number
    fingerprint: str
    config_hash: str


@dataclass
class Listed:
    """A run on the index.

    Attributes:
        folder: its name under the reports folder. has_page: whether its own page is there.
        machine: GPUs, else the CPU. pair: what its jobs worked on.
        speedup, acceptance: as its first screen has them; without a value the note says why.
        why: why its numbers are not shown; empty where they are.
        past: speed-ups of the runs like it up to this one and their steps, for a sparkline; None for too few.
        codes: of the values that the filters know, by filter.
    """

    folder: str
    has_page: bool
    told: Told
    machine: str
    pair: str
    speedup: Figure
    acceptance: Figure
    why: str = ""
    past: dict[str, Any] | None = None
    codes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Filter:
    """A choice above the list: `values` of one column, each with the number of its runs."""

    name: str
    label: str
    values: list[tuple[str, int]]


def listed_runs(runs: Runs) -> tuple[list[Listed], dict[Path, str]]:
    """The runs, newest first, and why those were left out that cannot be listed."""
    listed, left_out = [], dict(runs.left_out)
    first_read = len(runs.found) - MAX_READ_RUNS
    for place, (path, summary) in enumerate(runs.found):
        try:
            told = Told.model_validate(summary)
        except ValidationError as error:
            left_out[path] = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        else:
            listed.append(_listed(path, told, is_read=place >= first_read))
    _add_pasts(listed)
    return listed[::-1], left_out


def filters_of(listed: list[Listed]) -> list[Filter]:
    """Machine, pair and verdict, each where the runs differ in it; numbers the values in every run's `codes`."""
    found = []
    for name, label in (("machine", "Machine"), ("pair", "Pair"), ("verdict", "Verdict")):
        texts = [_text(run, name) for run in listed]
        values = list(dict.fromkeys(texts))
        for run, text in zip(listed, texts, strict=True):
            run.codes[name] = values.index(text)
        if len(values) > 1:
            found.append(Filter(name, label, [(value, texts.count(value)) for value in values]))
    return found


def _text(run: Listed, name: str) -> str:
    if name == "machine":  # two machines of one name are two machines
        return f"{run.machine} · {run.told.fingerprint}"
    return (run.pair or "no pair") if name == "pair" else run.told.word


def machine_name(machine: Environment) -> str:
    """The GPUs by name, `2 × NVIDIA H200`; without one the CPU and its cores."""
    names = [gpu.name for gpu in machine.gpus]
    counted = [f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    return ", ".join(counted) or (f"{machine.cpu}, {machine.n_cores} cores" if machine.cpu else "unknown machine")


def _listed(path: Path, told: Told, *, is_read: bool) -> Listed:
    machine, pair, why = "unknown machine", "", ""
    none = Figure("", "", "")
    numbers = [none, none]
    try:
        machine = machine_name(read_environment(path))
        if is_read:
            rows, plan = read_run(path), read_plan(path)
            pair = ", ".join(facts.pairs_measured(path, plan, rows))
            numbers = first_screen.numbers(Night(read_whole_summary(path), rows))
        else:
            why = f"only the {MAX_READ_RUNS} newest runs are read for this list"
    except LabError as error:
        why = error.what
    return Listed(path.name, (path / PAGE).exists(), told, machine, pair, numbers[0], numbers[1], why)


def _add_pasts(listed: list[Listed]) -> None:
    """Gives each run the speed-ups of runs like it, oldest first: of its machine, its configuration and its pair."""
    series: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for run in listed:
        if not run.speedup.value:
            continue
        own = series.setdefault((run.told.fingerprint, run.told.config_hash, run.pair), [])
        own.append((run.folder, run.speedup.number))
        names, values = zip(*own[-MAX_SPARK_RUNS:], strict=True)
        if len(values) >= MIN_DRAWN_NIGHTS:
            steps = [step.as_dict() for step in find_steps(values, names, "higher")]
            run.past = {"values": values, "steps": steps}
