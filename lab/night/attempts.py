"""The jobs of a night, one after the other, each in a folder of its attempt; a failing one does not stop the next."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from lab.errors import RunFailed
from lab.night import jobs
from lab.night.jobs import Job
from lab.night.notebook import NotebookOutcome, run_notebook
from lab.night.plan import Plan
from lab.night.progress import NightProgress
from lab.rows.maker import RowMaker
from lab.rows.store import ROWS_FILE, Row, RowWriter

ATTEMPTS_FOLDER = "attempts"


def run_jobs(plan: Plan, lock: int) -> None:
    """Runs every job of the part that has not finished under the same hash; records each outcome.

    Args:
        lock: the open file of the night's lock, which each notebook's process holds as well.
    """
    expected, budget, began = plan.expected_s(), plan.config.budget, dict[int, float]()
    with NightProgress([job.id for job in plan.due], expected) as progress:
        any_ran = False
        for job in plan.due:
            done = jobs.finished_outcome(job, plan.run_dir)
            if done is not None and not (job.reads_run and any_ran):
                progress.ended(job.id, f"{outcome_words(done)}, finished before", 0.0)
                continue
            any_ran = True
            progress.began(job.id)
            now = time.monotonic()
            spent_s = now - began.setdefault(job.part, now)
            left_s = math.inf if budget is None or job.reads_run else budget.part_s - spent_s
            try:
                outcome = run_job(plan, job, progress, lock, left_s, expected.get(job.id, 0.0))
            except (
                OSError,
                RunFailed,
            ) as error:  # a full disk, say: the next job may have room, and the night a verdict
                outcome = NotebookOutcome("unusable", time.monotonic() - now, error=str(error))
            progress.ended(job.id, outcome_words(outcome), outcome.seconds)


def run_job(
    plan: Plan, job: Job, progress: NightProgress, lock: int, left_s: float = math.inf, expected_s: float = 0.0
) -> NotebookOutcome:
    """One job into a folder of this attempt, which takes the job's place in the run when the attempt has ended.

    So what a process of an attempt that was killed may still write goes nowhere else. Earlier attempts are kept.

    Args:
        left_s: of the part's budget; a job that takes longer, as far as known, is not begun.
    """
    place, attempts = job.folder(plan.run_dir), plan.run_dir / ATTEMPTS_FOLDER
    set_aside(place, attempts)
    folder = next_attempt(attempts, job.id)
    folder.mkdir(parents=True)
    try:
        outcome = _attempt(plan, job, progress, folder, lock, left_s, expected_s)
    finally:
        place.parent.mkdir(exist_ok=True)
        folder.rename(place)
    jobs.record(job, plan.run_dir, outcome)
    return outcome


def _attempt(
    plan: Plan, job: Job, progress: NightProgress, folder: Path, lock: int, left_s: float, expected_s: float
) -> NotebookOutcome:
    parameters = {**job.parameters, "run_dir": os.path.relpath(plan.run_dir, folder), "job": job.id}
    if left_s <= expected_s:
        why = (
            f"not begun: it takes about {expected_s:.0f} s, and {max(left_s, 0.0):.0f} s of the part's budget are left"
        )
        outcome = NotebookOutcome("unusable", 0.0, error=why)
    else:
        outcome = run_notebook(
            job.source,
            folder,
            parameters,
            timeout_s=min(job.timeout_s, left_s),
            on_progress=lambda event: progress.event(job.id, event),
            held=(lock,),
        )
    if outcome.status != "finished":
        with RowWriter(folder / ROWS_FILE) as writer:
            writer.write(unfinished_row(plan, job, outcome))
    return outcome


def set_aside(folder: Path, attempts: Path) -> None:
    """Moves an earlier attempt out of the way."""
    if folder.exists():
        attempts.mkdir(exist_ok=True)
        folder.rename(next_attempt(attempts, folder.name))


def next_attempt(attempts: Path, job: str) -> Path:
    """The folder of the job's next attempt: the number after the highest."""
    numbers = [path.name.removeprefix(f"{job}.") for path in attempts.glob(f"{job}.*")]
    return attempts / f"{job}.{1 + max((int(number) for number in numbers if number.isdecimal()), default=0)}"


def unfinished_row(plan: Plan, job: Job, outcome: NotebookOutcome) -> Row:
    """The row that keeps a job that did not finish from passing unseen."""
    maker = RowMaker(plan.run_dir.name, job.id, plan.machine.fingerprint, job.notebook)
    return maker.missing("job", job.id, outcome_words(outcome))


def outcome_words(outcome: NotebookOutcome) -> str:
    """One outcome for people."""
    if outcome.status == "finished":
        return "finished" if outcome.passed else "finished, but a gate failed or is missing"
    where = f" in cell {outcome.cell}" if outcome.cell is not None else ""
    return f"{outcome.status}{where}: {outcome.error}"
