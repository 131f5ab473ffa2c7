"""Runs on disk: the files of a run folder, and which earlier runs may be compared with this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
ENVIRONMENT_FILE = "environment.json"
# Earlier nights beyond these say little about today's machine.
MAX_NIGHTS = 20


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
    """
    remedy = f"give the folder under reports/ that has a {SUMMARY_FILE}"
    return _content(run_dir / SUMMARY_FILE, "holds no finished run", remedy)


def _content(path: Path, fault: str, remedy: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"{path.parent.name!r} {fault}: {path.name}: {error}"
        raise ExperimentError(what, "a run folder made by `eagle3lab nightly`", remedy) from error
    return content


def runs_under(reports: Path) -> list[tuple[Path, dict[str, Any]]]:
    """All finished runs of a reports folder with their summaries, oldest first."""
    found = [(path.parent, read_summary(path.parent)) for path in reports.glob(f"*/{SUMMARY_FILE}")]
    return sorted(found, key=lambda pair: (str(pair[1].get("started_at")), pair[0].name))


def comparable_runs(
    run_dir: Path, fingerprint: str, config_hash: str, started_at: str, most: int = MAX_NIGHTS
) -> list[Path]:
    """The latest `most` runs beside `run_dir`, earlier, on the same machine, equally configured; oldest first."""
    return [
        path
        for path, summary in runs_under(run_dir.parent)
        if path.resolve() != run_dir.resolve()
        and summary.get("fingerprint") == fingerprint
        and summary.get("config_hash") == config_hash
        and str(summary.get("started_at")) < started_at
    ][-most:]


def job_seconds(runs: list[Path]) -> dict[str, float]:
    """How long each job took in the latest run that finished it."""
    seconds: dict[str, float] = {}
    for run in runs:
        for job in read_summary(run).get("jobs", []):
            if job.get("status") == "finished":
                seconds[job["id"]] = float(job["seconds"])
    return seconds
