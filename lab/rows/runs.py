"""Runs on disk: the files of a run folder, and which earlier runs may be compared with this one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.errors import ExperimentError, LabError
from lab.rows.environment import Environment
from lab.rows.store import Row, read_run
from lab.rows.values import number_of, refuse_newer

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
ENVIRONMENT_FILE = "environment.json"
SUMMARY_SCHEMA = 1
# Earlier nights beyond these say little about how today's machine varies.
MAX_SPREAD_NIGHTS = 20
# A night's summary takes some hundred KiB; what is larger than this was not written by a night.
_MOST_BYTES = 64 << 20
# What tells which runs may be compared, and in which order they stand.
_IDENTITY = ("fingerprint", "config_hash", "started_at")


@dataclass(frozen=True)
class Runs:
    """Finished runs of a reports folder.

    Attributes:
        found: folder and summary, oldest first.
        left_out: folders whose summary cannot be used, each with the reason.
    """

    found: list[tuple[Path, dict[str, Any]]]
    left_out: dict[Path, str]


def read_plan(run_dir: Path) -> dict[str, Any]:
    """What the run set out to do (`run.json`).

    Raises:
        ExperimentError: the folder is not a run.
    """
    return _content(run_dir / RUN_FILE, "is not a run folder", "give a folder under reports/")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """A finished run's summary.

    Raises:
        ExperimentError: the folder holds no finished run.
        NotComparable: a newer version of the lab wrote it.
    """
    remedy = f"give the folder under reports/ that has a {SUMMARY_FILE}"
    summary = _content(run_dir / SUMMARY_FILE, "holds no finished run", remedy)
    refuse_newer(f"{SUMMARY_FILE} of {run_dir.name!r}", summary, SUMMARY_SCHEMA)
    lacking = [key for key in _IDENTITY if not isinstance(summary.get(key), str)]
    if lacking:
        raise _unusable(run_dir / SUMMARY_FILE, "holds no finished run", f"no {', '.join(lacking)}", remedy)
    return summary


def read_environment(run_dir: Path) -> Environment:
    """The record of the machine that a run ran on.

    Raises:
        ExperimentError: the folder has none that can be read.
    """
    path, fault = run_dir / ENVIRONMENT_FILE, "has no record of its machine"
    remedy = 'give a folder under reports/; a notebook run by hand takes run_dir = ""'
    try:
        return Environment.model_validate(_content(path, fault, remedy))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise _unusable(path, fault, why, remedy) from error


def _content(path: Path, fault: str, remedy: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, fault, str(error), remedy) from error
    if not isinstance(content, dict):
        raise _unusable(path, fault, "not a JSON object", remedy)
    return content


def _unusable(path: Path, fault: str, why: str, remedy: str) -> ExperimentError:
    what = f"{path.parent.name!r} {fault}: {path.name}: {why}"
    return ExperimentError(what, "a run folder made by `eagle3lab nightly` or `eagle3lab run`", remedy)


def runs_under(reports: Path) -> Runs:
    """All finished runs of a reports folder; one that cannot be read stops nobody who asks for the others."""
    found, left_out = [], {}
    for path in sorted(reports.glob(f"*/{SUMMARY_FILE}")):
        try:
            found.append((path.parent, read_summary(path.parent)))
        except LabError as error:
            left_out[path.parent] = error.what
    return Runs(sorted(found, key=lambda pair: (pair[1]["started_at"], pair[0].name)), left_out)


def read_nights(runs: Iterable[Path]) -> tuple[list[tuple[Path, list[Row]]], dict[Path, str]]:
    """Folder and rows of each run, in the order given, and why those were left out that cannot be read."""
    found, left_out = [], {}
    for path in runs:
        try:
            read_environment(path)
            found.append((path, read_run(path)))
        except LabError as error:
            left_out[path] = error.what
    return found, left_out


def left_out_words(left_out: dict[Path, str]) -> list[str]:
    """A sentence for each night that could not be read."""
    return [f"night {path.name} is left out: {why}" for path, why in left_out.items()]


def comparable_runs(
    run_dir: Path, fingerprint: str, config_hash: str, started_at: str, most: int = MAX_SPREAD_NIGHTS
) -> list[Path]:
    """The latest `most` runs beside `run_dir`, earlier, on the same machine, equally configured; oldest first."""
    return [
        path
        for path, summary in runs_under(run_dir.parent).found
        if path.resolve() != run_dir.resolve()
        and summary["fingerprint"] == fingerprint
        and summary["config_hash"] == config_hash
        and summary["started_at"] < started_at
    ][-most:]


def job_seconds(runs: list[Path]) -> dict[str, float]:
    """How long each job took in the latest run that finished it."""
    seconds: dict[str, float] = {}
    for run in runs:
        for job in read_summary(run).get("jobs", []):
            took = number_of(job.get("seconds"))
            if job.get("status") == "finished" and took is not None:
                seconds[job["id"]] = took
    return seconds
