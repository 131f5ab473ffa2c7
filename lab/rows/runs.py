"""Runs on disk: the files of a run folder, and which earlier runs may be compared with this one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.errors import ExperimentError, LabError
from lab.rows.environment import Environment, checkout
from lab.rows.store import Row, read_run
from lab.rows.stored.files import read_json
from lab.rows.stored.forms import Form, IdentityForm, PlanForm, SummaryForm, fault_of
from lab.rows.stored.moments import is_to_come, moment_of
from lab.rows.values import refuse_newer

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
ENVIRONMENT_FILE = "environment.json"
SUMMARY_SCHEMA = 1
# Earlier nights beyond these say little about how today's machine varies.
MAX_SPREAD_NIGHTS = 20


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
    path, fault, remedy = run_dir / RUN_FILE, "is not a run folder", "give a folder under reports/"
    return _of_form(_content(path, fault, remedy), PlanForm, path, fault, remedy)


def read_summary(run_dir: Path, form: type[Form] = IdentityForm) -> dict[str, Any]:
    """A finished run's summary.

    Args:
        form: what of it has to be there and right; as given, what a comparison needs.

    Raises:
        ExperimentError: the folder holds no finished run.
        NotComparable: a newer version of the lab wrote it.
    """
    path, fault = run_dir / SUMMARY_FILE, "holds no finished run"
    remedy = f"give the folder under reports/ that has a {SUMMARY_FILE}"
    summary = _content(path, fault, remedy)
    refuse_newer(f"{SUMMARY_FILE} of {run_dir.name!r}", summary, SUMMARY_SCHEMA)
    return _of_form(summary, form, path, fault, remedy)


def read_whole_summary(run_dir: Path) -> dict[str, Any]:
    """A finished run's summary with all that its page is drawn from.

    Raises:
        ExperimentError, NotComparable: as `read_summary`.
    """
    return read_summary(run_dir, SummaryForm)


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
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise _unusable(path, fault, str(error), remedy) from error
    if not isinstance(content, dict):
        raise _unusable(path, fault, "not a JSON object", remedy)
    return content


def _of_form(content: dict[str, Any], form: type[Form], path: Path, fault: str, remedy: str) -> dict[str, Any]:
    why = fault_of(content, form)
    if why:
        raise _unusable(path, fault, why, remedy)
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
    return Runs(sorted(found, key=lambda pair: (moment_of(pair[1]["started_at"]), pair[0].name)), left_out)


def committed_runs() -> list[tuple[Path, dict[str, Any]]]:
    """Finished runs among the reference files of the checkout, oldest first."""
    folders = ((checkout() or Path.cwd()) / "reports" / "reference").glob("*/")
    found = [run for folder in folders for run in runs_under(folder).found]
    return sorted(found, key=lambda pair: (moment_of(pair[1]["started_at"]), pair[0].name))


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
    alike = _alike(run_dir, fingerprint, config_hash)
    return [path for path, began in alike if moment_of(began) < moment_of(started_at)][-most:]


def later_runs(run_dir: Path, fingerprint: str, config_hash: str, started_at: str) -> dict[Path, str]:
    """Runs that `comparable_runs` would give had they not begun later, by what they say, each with that reason."""
    return {
        path: f"it says that it began at {began}, {_than(began)}, so it is not among the earlier ones"
        for path, began in _alike(run_dir, fingerprint, config_hash)
        if moment_of(began) >= moment_of(started_at)
    }


def _than(began: str) -> str:
    return "which is still to come: a clock was moved" if is_to_come(began) else "and not before this run"


def _alike(run_dir: Path, fingerprint: str, config_hash: str) -> list[tuple[Path, str]]:
    """Runs beside `run_dir` of the same machine and configuration with the moment they began, oldest first."""
    return [
        (path, summary["started_at"])
        for path, summary in runs_under(run_dir.parent).found
        if path.resolve() != run_dir.resolve()
        and (summary["fingerprint"], summary["config_hash"]) == (fingerprint, config_hash)
    ]


def job_seconds(runs: list[Path]) -> dict[str, float]:
    """How long each job took in the latest run that finished it."""
    return {
        job["id"]: float(job["seconds"])
        for run in runs
        for job in read_summary(run).get("jobs", [])
        if job["status"] == "finished"
    }
