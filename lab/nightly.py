"""One night, top to bottom: load, look at the machine, run each notebook in its own process, judge, remember, show.

prepare -> begin -> run_jobs -> conclude -> report -> exit code and one JSON line
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, LabError, RunFailed
from lab.night import jobs
from lab.night.archive import write_pack
from lab.night.attempts import run_jobs
from lab.night.jobs import NightConfig
from lab.night.parts import unpack
from lab.night.plan import Plan, check_place, pair_parameters, pair_paths, prepare, show_plan
from lab.night.settings import one_notebook
from lab.night.summary import conclude
from lab.options.night import NightOptions, RunOptions
from lab.page import report
from lab.rows import environment
from lab.rows.gates import gates_of
from lab.rows.maker import RowMaker
from lab.rows.runs import ENVIRONMENT_FILE, RUN_FILE, SUMMARY_FILE, read_plan
from lab.rows.store import ROWS_FILE, Row, RowWriter, read_rows, utc_now
from lab.rows.stored.moments import ClockWatch

LOCK_FILE = ".lock"
# How long notebooks of a night that was killed may take to end.
ENDING_S = 3.0


def run_night(options: NightOptions, config: NightConfig | None = None, *, gate_required: bool = True) -> int:
    """Runs a whole night and gives its exit code: 0 passed, 1 a gate failed, 3 something could not run, 4 undecided.

    Args:
        config: used in place of the file that `options` names.
        gate_required: a night that judged no gate has shown nothing, and is not called passed.

    Raises:
        ExperimentError: the configuration or an option cannot be used; nothing was started.
        RunFailed: no GPU though one is required, another night is running, or the disk refused the rows.
    """
    clock = ClockWatch()
    with ExitStack() as until_the_end:
        lock = None
        if options.resume_from:
            out = new_folder(options)
            lock = until_the_end.enter_context(only_night(out))
            unpack(options.resume_from, out)
        plan = prepare(options, config, gate_required=gate_required)
        if options.dry_run:
            show_plan(plan)
            return show_pair(plan)
        if lock is None:
            lock = until_the_end.enter_context(only_night(plan.run_dir))
        begin(plan)
        run_jobs(plan, lock)
        code = conclude_night(plan, clock) if plan.part.is_last else conclude_part(plan)
        if options.pack is not None:
            write_pack(plan.run_dir, options.pack)
        return code


def show_pair(plan: Plan) -> int:
    """Looks at the night's pair without loading it; 3 if it could not be loaded, which is then said in full."""
    paths = pair_paths(plan.config)
    if not {"target", "draft"} <= set(paths):
        return EXIT_PASSED
    from lab.doctor import examine_pair

    meanings = {str(job.parameters.get("norm_output", "")) for job in plan.config.job}
    return examine_pair(paths["target"], paths["draft"], norm_output=next((m for m in sorted(meanings) if m), None))


def new_folder(options: NightOptions) -> Path:
    """The folder that packed parts are laid into.

    Raises:
        ExperimentError: none was named, it is a file, or nothing may be written (--dry-run).
    """
    if options.out is None or options.dry_run:
        raise ExperimentError(
            "--resume-from was given with --dry-run or without --out",
            "--resume-from FILE.tar --out DIR",
            "name a new folder for the run",
        )
    check_place(options.out)
    return options.out


def run_one(options: RunOptions) -> int:
    """Runs one notebook as a night of a single job."""
    config = one_notebook(options.notebook, options.settings, options.timeout_s)
    places = NightOptions(target=options.target, draft=options.draft, prompts=options.prompts, out=options.out)
    return run_night(places, config, gate_required=False)


# ---- Begin: the folder says what it is before any work.


@contextmanager
def only_night(run_dir: Path) -> Iterator[int]:
    """Holds the lock of the reports folder, so that two nights do not disturb each other's timings; gives its number.

    The kernel releases it when the last process that holds it ends, however it ends: this one, or a notebook of it.

    Raises:
        RunFailed: another night holds it.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (run_dir.parent / LOCK_FILE).open("a+", encoding="utf-8") as lock:
        try:
            _take(lock)
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
        yield lock.fileno()


def _take(lock: IO[str]) -> None:
    """The lock; notebooks of a night that was killed a moment ago may hold it until they have ended as well.

    Raises:
        BlockingIOError: it is still held after that moment.
    """
    last = time.monotonic() + ENDING_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > last:
                raise
        time.sleep(0.05)


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


# ---- The end.


def conclude_night(plan: Plan, clock: ClockWatch) -> int:
    """Judges the whole run, writes summary and page, and tells them, and what was left out; the exit code.

    Raises:
        RunFailed: what the night itself wrote is gone, or cannot be read.
    """
    try:
        summary = conclude(plan.run_dir, now=utc_now(), clock=clock.words())
    except ExperimentError as error:  # no wrong usage: the folder was right when the night began
        raise RunFailed(
            f"the night could not be judged: {error.what}",
            "a run folder that stays where it is while its night runs",
            "see that its disk is there, then run the same command with the same --out to go on",
        ) from error
    try:
        write_json(plan.run_dir / SUMMARY_FILE, summary)
        where = str(page := report.render(plan.run_dir))
    except (LabError, OSError) as error:  # the verdict is told all the same; a run without its page is incomplete
        page, where = plan.run_dir, f"not drawn: {error}"
        summary["exit_code"] = summary["exit_code"] or EXIT_COULD_NOT_RUN
    told = [summary["sentence"], *summary["clock"], *summary["since"]["left_out"], f"Report: {where}"]
    print("\n".join(told), file=sys.stderr)
    if not sys.stdout.isatty():  # for whatever reads it; people have had the sentence, and the report's address last
        print(last_line(summary, page), flush=True)
    return int(summary["exit_code"])


def conclude_part(plan: Plan) -> int:
    """Tells what a part's jobs came to; the night is judged after the last part."""
    words = {
        job.id: {gate.word for gate in gates_of(read_rows(job.folder(plan.run_dir) / ROWS_FILE))} for job in plan.due
    }
    unfinished = [job.id for job in plan.due if jobs.finished_outcome(job, plan.run_dir) is None]
    failed, not_judged = ([job for job, own in words.items() if word in own] for word in ("fail", "missing"))
    code = EXIT_GATE_FAILED if failed else EXIT_COULD_NOT_RUN if unfinished or not_judged else EXIT_PASSED
    counted = {"part": str(plan.part), "exit_code": code, "n_jobs": len(plan.due)}
    left = {"unfinished": unfinished, "failed": failed, "not_judged": not_judged}
    tell_summary({"command": "nightly", "run": plan.run_dir.name, **counted, **left})
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
