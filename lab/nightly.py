"""One night, top to bottom: load, look at the machine, run each notebook in its own process, judge, remember, show.

prepare -> begin -> run_jobs -> conclude -> report -> exit code and one JSON line
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, RunFailed
from lab.night import jobs
from lab.night.archive import write_pack
from lab.night.jobs import Job, NightConfig
from lab.night.notebook import NotebookOutcome, run_notebook
from lab.night.parts import unpack
from lab.night.plan import Plan, one_notebook, pair_parameters, prepare, show_plan
from lab.night.progress import NightProgress
from lab.night.summary import conclude
from lab.options.night import NightOptions, RunOptions
from lab.page import report
from lab.rows import environment
from lab.rows.maker import RowMaker
from lab.rows.runs import ENVIRONMENT_FILE, RUN_FILE, SUMMARY_FILE, read_plan
from lab.rows.store import ROWS_FILE, Row, RowWriter, utc_now

ATTEMPTS_FOLDER = "attempts"
LOCK_FILE = ".lock"


def run_night(options: NightOptions, config: NightConfig | None = None, *, gate_required: bool = True) -> int:
    """Runs a whole night and gives its exit code: 0 passed, 1 a gate failed, 3 something could not run, 4 undecided.

    Args:
        config: used in place of the file that `options` names.
        gate_required: a night that judged no gate has shown nothing, and is not called passed.

    Raises:
        ExperimentError: the configuration or an option cannot be used; nothing was started.
        RunFailed: no GPU though one is required, another night is running, or the disk refused the rows.
    """
    if options.resume_from:
        unpack_into(options)
    plan = prepare(options, config, gate_required=gate_required)
    if options.dry_run:
        show_plan(plan)
        return EXIT_PASSED
    with only_night(plan.run_dir):
        begin(plan)
        run_jobs(plan)
        code = conclude_night(plan) if plan.part.is_last else conclude_part(plan)
        if options.pack is not None:
            write_pack(plan.run_dir, options.pack)
    return code


def unpack_into(options: NightOptions) -> None:
    """Lays packed parts into the folder of `--out`.

    Raises:
        ExperimentError: no such folder was named, nothing may be written (--dry-run), or the archive is not a run.
    """
    if options.out is None or options.dry_run:
        raise ExperimentError(
            "--resume-from was given with --dry-run or without --out",
            "--resume-from FILE.tar --out DIR",
            "name a new folder for the run",
        )
    with only_night(options.out):
        unpack(options.resume_from, options.out)


def run_one(options: RunOptions) -> int:
    """Runs one notebook as a night of a single job."""
    config = one_notebook(options.notebook, options.settings, options.timeout_s)
    places = NightOptions(target=options.target, draft=options.draft, prompts=options.prompts, out=options.out)
    return run_night(places, config, gate_required=False)


# ---- Begin: the folder says what it is before any work.


@contextmanager
def only_night(run_dir: Path) -> Iterator[None]:
    """Holds the lock of the reports folder, so that two nights do not disturb each other's timings.

    The kernel releases it when the process ends, however it ends.

    Raises:
        RunFailed: another night holds it.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (run_dir.parent / LOCK_FILE).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise RunFailed(
                f"another night is running in {run_dir.parent.name}/: {lock.read().strip() or 'unknown'}",
                "one night at a time for each reports folder",
                "wait for it to end, or give --out in another folder if the machine is free",
            ) from error
        lock.truncate(0)
        lock.write(f"run {run_dir.name}, process {os.getpid()}, since {utc_now()}")
        lock.flush()
        yield


def begin(plan: Plan) -> None:
    """Writes the plan and the environment; a resumed run keeps its own."""
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    started = str(read_plan(plan.run_dir)["started_at"]) if (plan.run_dir / RUN_FILE).exists() else utc_now()
    content = {
        "run": plan.run_dir.name,
        "started_at": started,
        "argv": plan.machine.argv,
        "config_hash": plan.config_hash,
        "fingerprint": plan.machine.fingerprint,
        "strict_undecided": plan.strict_undecided,
        "gate_required": plan.gate_required,
        "pair": shown_pair(plan.config),
        "gates": [gate.model_dump() for gate in plan.config.gate if gate.pair in (None, plan.config.pair.name)],
        "jobs": [
            {"id": job.id, "notebook": job.notebook, "hash": job.hash, "reads_run": job.reads_run} for job in plan.jobs
        ],
    }
    write_json(plan.run_dir / RUN_FILE, content)
    if not (plan.run_dir / ENVIRONMENT_FILE).exists():
        with RowWriter(plan.run_dir / ROWS_FILE) as writer:
            writer.write(environment_row(plan))
        write_json(plan.run_dir / ENVIRONMENT_FILE, plan.machine.model_dump())


def shown_pair(config: NightConfig) -> dict[str, str]:
    """The pair for people, absolute folders cut to their names; nothing where no notebook takes one."""
    if not pair_parameters(config):
        return {}
    given = config.pair.model_dump(exclude_none=True)
    pair = {"pair" if key == "name" else key: environment.shown_path(text) for key, text in given.items()}
    return pair | ({"prompts": environment.shown_path(config.prompts)} if config.prompts else {})


def environment_row(plan: Plan) -> Row:
    """The one row of kind "environment": the whole record as JSON text."""
    return RowMaker(plan.run_dir.name, "night", plan.machine.fingerprint, "nightly").machine(plan.machine)


# ---- The jobs: a failing one does not stop the next.


def run_jobs(plan: Plan) -> None:
    """Runs every job of the part that has not finished under the same hash; records each outcome."""
    expected, budget, began = plan.expected_s(), plan.config.budget, time.monotonic()
    with NightProgress([job.id for job in plan.due], expected) as progress:
        any_ran = False
        for job in plan.due:
            done = jobs.finished_outcome(job, plan.run_dir)
            if done is not None and not (job.reads_run and any_ran):
                progress.ended(job.id, f"{outcome_words(done)}, finished before", 0.0)
                continue
            any_ran = True
            progress.began(job.id)
            left_s = math.inf if budget is None or job.reads_run else budget.part_s - (time.monotonic() - began)
            outcome = run_job(plan, job, progress, left_s, expected.get(job.id, 0.0))
            progress.ended(job.id, outcome_words(outcome), outcome.seconds)


def run_job(
    plan: Plan, job: Job, progress: NightProgress, left_s: float = math.inf, expected_s: float = 0.0
) -> NotebookOutcome:
    """One job into an empty folder; what an earlier attempt left there is kept under `attempts/`.

    Args:
        left_s: of the part's budget; a job that takes longer, as far as known, is not begun.
    """
    folder = job.folder(plan.run_dir)
    set_aside(folder, plan.run_dir / ATTEMPTS_FOLDER)
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
        )
    if outcome.status != "finished":
        with RowWriter(folder / ROWS_FILE) as writer:
            writer.write(unfinished_row(plan, job, outcome))
    jobs.record(job, plan.run_dir, outcome)
    return outcome


def set_aside(folder: Path, attempts: Path) -> None:
    """Moves an earlier attempt out of the way under the next free number."""
    if not folder.exists():
        return
    attempts.mkdir(exist_ok=True)
    number = 1 + sum(1 for _ in attempts.glob(f"{folder.name}.*"))
    folder.rename(attempts / f"{folder.name}.{number}")


def unfinished_row(plan: Plan, job: Job, outcome: NotebookOutcome) -> Row:
    """The row that keeps a job that did not finish from passing unseen."""
    maker = RowMaker(plan.run_dir.name, job.id, plan.machine.fingerprint, job.notebook)
    return maker.missing("job", job.id, outcome_words(outcome))


def outcome_words(outcome: NotebookOutcome) -> str:
    """One outcome for people."""
    if outcome.status == "finished":
        return "passed" if outcome.passed else "finished, but a gate failed or is missing"
    where = f" in cell {outcome.cell}" if outcome.cell is not None else ""
    return f"{outcome.status}{where}: {outcome.error}"


# ---- The end.


def conclude_night(plan: Plan) -> int:
    """Judges the whole run, writes summary and page, and tells them; the exit code."""
    summary = conclude(plan.run_dir, now=utc_now())
    write_json(plan.run_dir / SUMMARY_FILE, summary)
    page = report.render(plan.run_dir)
    print(f"{summary['sentence']}\nReport: {page}", file=sys.stderr)
    print(last_line(summary, page), flush=True)
    return int(summary["exit_code"])


def conclude_part(plan: Plan) -> int:
    """Tells what a part's jobs came to; the night is judged after the last part."""
    outcomes = {job.id: jobs.finished_outcome(job, plan.run_dir) for job in plan.due}
    unfinished = [job for job, outcome in outcomes.items() if outcome is None]
    failed = [job for job, outcome in outcomes.items() if outcome is not None and not outcome.passed]
    code = EXIT_COULD_NOT_RUN if unfinished else EXIT_GATE_FAILED if failed else EXIT_PASSED
    brief = {"run": plan.run_dir.name, "part": str(plan.part), "exit_code": code, "n_jobs": len(outcomes)}
    print(json.dumps({**brief, "unfinished": unfinished, "failed": failed}), flush=True)
    return code


def write_json(path: Path, content: Any) -> None:
    """Writes a whole file or none.

    Raises:
        RunFailed: the file system refused it.
    """
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise RunFailed(
            f"{path.name} could not be written: {error.strerror or error}",
            "a file system with room for the report; the rows written before are safe",
            "free some space, then run the same command with the same --out to go on",
        ) from error


def last_line(summary: dict[str, Any], page: Path) -> str:
    """The night for machines, as one JSON line."""
    counts = {word: sum(gate["word"] == word for gate in summary["gates"]) for word in ("pass", "fail", "missing")}
    brief = {key: summary[key] for key in ("run", "word", "exit_code", "sentence", "seconds", "n_rows", "n_missing")}
    return json.dumps({**brief, "gates": counts, "since": summary["since"]["words"], "report": str(page)})
