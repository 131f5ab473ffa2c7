"""One run's outcome, read from what it left on disk: gates, jobs, changes since the previous run, one verdict.

The night calls it when all jobs are over; `90_nightly` calls it while the run still goes on; nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, EXIT_UNDECIDED, ExperimentError
from lab.night.experiment import Experiment
from lab.night.jobs import OUTCOME_KEYS, recorded
from lab.night.notices import notices_of
from lab.rows import history, trend
from lab.rows.gates import GateResult, Threshold, gates_of, judge
from lab.rows.runs import (
    MAX_SPREAD_NIGHTS,
    RUN_FILE,
    SUMMARY_SCHEMA,
    committed_runs,
    comparable_runs,
    later_runs,
    left_out_words,
    read_nights,
    read_plan,
    read_summary,
    runs_under,
)
from lab.rows.store import JOBS_FOLDER, Row, read_run
from lab.rows.verdict import WORST_FIRST

Night = tuple[Path, list[Row]]


def conclude(run_dir: Path, *, now: str, clock: str = "", running: str = "") -> dict[str, Any]:
    """The summary of a run: verdict word and sentence, exit code, gates, jobs, and what moved since the run before.

    An earlier night that cannot be read, or that by its clock is no earlier one, is left out and named. How long the
    run took is what its jobs took, none of it by the clock of the day.

    Args:
        now: the present moment, ISO-8601 UTC.
        clock: a sentence where this machine's clock was moved meanwhile.
        running: id of a job that is still going on and calls this itself; it is left out of the verdict.
    """
    plan, rows = read_plan(run_dir), read_run(run_dir)
    jobs = [_job(run_dir, planned) for planned in plan["jobs"] if planned["id"] != running]
    thresholds = [Threshold.model_validate(gate) for gate in plan["gates"]]
    gates = gates_of(rows) + judge(thresholds, rows)
    nights, left_out = _earlier(run_dir, plan)
    since = _since(run_dir, rows, nights[-MAX_SPREAD_NIGHTS:]) | {"left_out": left_out}
    word, code = _word(gates, jobs, since, strict=plan["strict_undecided"], gate_required=plan["gate_required"])
    summary: dict[str, Any] = {
        "schema_version": SUMMARY_SCHEMA,
        "run": run_dir.name,
        "word": word,
        "exit_code": code,
        "sentence": "",
        "started_at": plan["started_at"],
        "finished_at": now,
        "seconds": sum(job["seconds"] for job in jobs),
        "fingerprint": plan["fingerprint"],
        "config_hash": plan["config_hash"],
        "gates": [gate.as_dict() for gate in gates],
        "jobs": jobs,
        "n_rows": len(rows),
        "n_missing": sum(row.status == "missing" for row in rows),
        "n_not_asked": sum(row.status == "not asked" for row in rows),
        "notices": notices_of(rows),
        "clock": [clock] if clock else [],
        "since": since,
        "nights": _series([*nights, (run_dir, rows)]),
    }
    if nights:
        since["flipped"] = history.flipped_gates(read_summary(nights[-1][0]), summary)
    summary["sentence"] = _sentence(word, gates, jobs, since, summary["notices"])
    return summary


def _job(run_dir: Path, planned: dict[str, Any]) -> dict[str, Any]:
    content, why = recorded(run_dir / JOBS_FOLDER / planned["id"])
    base = {"id": planned["id"], "notebook": planned["notebook"]}
    if content is not None and content["hash"] != planned.get("hash", content["hash"]):
        content, why = None, "its results are of another source, pair or parameters than this night's"
    if content is None:
        status, error = ("unusable", why) if why else ("not run", "not run")
        return {**base, "status": status, "seconds": 0.0, "passed": None, "error": error, "cell": None}
    return {**base, **{key: content["outcome"][key] for key in OUTCOME_KEYS}}


def _earlier(run_dir: Path, plan: dict[str, Any]) -> tuple[list[Night], list[str]]:
    """Comparable nights, oldest first, and a sentence for each run beside this one that is left out."""
    keys = (plan["fingerprint"], plan["config_hash"], plan["started_at"])
    paths = comparable_runs(run_dir, *keys, most=trend.MAX_DRAWN_NIGHTS - 1)
    nights, unread = read_nights(paths)
    beside = {path: why for path, why in runs_under(run_dir.parent).left_out.items() if path.name != run_dir.name}
    return nights, left_out_words(beside | unread | later_runs(run_dir, *keys))


def _since(run_dir: Path, rows: list[Row], earlier: list[Night]) -> dict[str, Any]:
    """What moved since the latest comparable run; `previous` is None when there is none."""
    nothing: dict[str, Any] = {"previous": None, "n_earlier": 0, "words": {}, "changes": [], "moved": [], "flipped": []}
    if not earlier:
        return nothing
    nights, previous = [own for _, own in earlier], earlier[-1][0]
    found = history.changes(nights[-1], rows, nights)
    return {
        "previous": previous.name,
        "n_earlier": len(earlier),
        "words": dict(Counter(change.verdict.word for change in found)),
        "changes": [change.as_dict() for change in sorted(found, key=_place)],
        "moved": history.moved_environment(previous, run_dir),
        "flipped": [],
    }


def _series(nights: list[Night]) -> list[dict[str, Any]]:
    """What is drawn over the nights, this run the last one."""
    return [series.as_dict() for series in trend.series_of([(path.name, rows) for path, rows in nights])]


def _place(change: history.Change) -> tuple[int, float]:
    """By word, then by how far it moved."""
    ratio = change.verdict.ratio
    return WORST_FIRST.index(change.verdict.word), -abs(ratio - 1) if ratio is not None else 0.0


def _word(
    gates: list[GateResult], jobs: list[dict[str, Any]], since: dict[str, Any], *, strict: bool, gate_required: bool
) -> tuple[str, int]:
    """The verdict and its exit code, the worst first. A run that set no gate and had to set none has proven nothing: it
    is "not judged", and no failure.

    Args:
        strict: what moved since the run before counts as well: a number that is certainly slower fails, as in
            `compare`; one that is unsure or missing, or no run to compare with, leaves the night undecided.
    """
    if any(gate.word == "fail" for gate in gates) or (strict and since["words"].get("slower")):
        return "failed", EXIT_GATE_FAILED
    if (gate_required and not gates) or any(gate.word == "missing" for gate in gates) or _not_finished(jobs):
        return "incomplete", EXIT_COULD_NOT_RUN
    if strict and (since["previous"] is None or since["words"].get("unsure") or since["words"].get("missing")):
        return "undecided", EXIT_UNDECIDED
    return ("passed" if gates else "not judged"), EXIT_PASSED


def _not_finished(jobs: list[dict[str, Any]]) -> list[str]:
    return [job["id"] for job in jobs if job["status"] != "finished"]


def job_word(job: dict[str, Any], gates: list[dict[str, Any]]) -> str:
    """A job's outcome in a word: how it ended, or the worst of the gates it set. "finished" means that all held."""
    words = {gate["word"] for gate in gates if gate["job"] == job["id"]}
    if job["status"] != "finished":
        return str(job["status"])
    return "gate failed" if "fail" in words else "gate not judged" if "missing" in words else "finished"


def _sentence(
    word: str, gates: list[GateResult], jobs: list[dict[str, Any]], since: dict[str, Any], notices: list[str]
) -> str:
    """The verdict in one sentence, worst first; what speculation costs is said even where every gate held."""
    n_slower = since["words"].get("slower", 0)
    failed = [f"{gate.name} ({gate.job})" if gate.job else gate.name for gate in gates if gate.word == "fail"]
    missing = [gate.name for gate in gates if gate.word == "missing"]
    unfinished = _not_finished(jobs)
    parts = []
    if failed:
        parts.append(f"{_n(len(failed), 'gate')} of {len(gates)} failed: {_listed(failed)}")
    if missing:
        parts.append(f"{_n(len(missing), 'gate')} could not be judged: {_listed(missing)}")
    if unfinished:
        parts.append(f"{_n(len(unfinished), 'job')} of {len(jobs)} did not finish: {_listed(unfinished)}")
    if not gates:
        ended = f"{_n(len(jobs), 'job')} finished, and no gate was set"
        parts.append(ended if word == "not judged" else "no gate was judged")
    if word == "failed" and not failed:
        parts.insert(0, f"{_n(n_slower, 'number')} certainly slower than in the previous run")
    if not parts:
        held = "the one gate" if len(gates) == 1 else f"all {len(gates)} gates"
        parts.append(f"{held} held in {_n(len(jobs), 'job')}")
    if notices:
        parts.append(f"{'but ' if word == 'passed' else ''}{', and '.join(notices)}")
    return f"{word.capitalize()}: {'; '.join(parts)}; {_since_clause(since)}."


def _since_clause(since: dict[str, Any]) -> str:
    left_out = f" ({_n(len(since['left_out']), 'night')} left out)" if since["left_out"] else ""
    if since["previous"] is None:
        if left_out:
            return f"no earlier run could be compared with{left_out}"
        return "there is no earlier run on this machine to compare with"
    words = since["words"]
    moved = [f"{words[word]} {word}" for word in WORST_FIRST if word != "same" and words.get(word)]
    same = words.get("same", 0)
    if not moved:
        return f"all {same} compared numbers are the same as in the previous run{left_out}"
    return f"against the previous run {', '.join(moved)} and {same} the same{left_out}"


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def absent(exp: Experiment, run_dir: Path, what: str, *notebooks: str) -> None:
    """Writes why the night's summary has no such picture: nothing in the run was to measure it, or what was did not."""
    jobs = [job["id"] for job in read_plan(run_dir)["jobs"] if job["notebook"] in notebooks]
    if jobs:
        exp.missing("summary", what, f"{', '.join(jobs)} left no rows of it")
    else:
        exp.not_asked("summary", what, f"no job of this run is of {' or '.join(notebooks)}")


def latest_run(named: str, here: Path) -> Path:
    """The run folder to summarise: the one named, else `here` if it is one, else the latest finished run, of this
    checkout's own or, where it has none, of those that are committed.

    Raises:
        ExperimentError: there is none.
    """
    if named:
        return Path(named)
    if (here / RUN_FILE).exists():
        return here
    # By hand a notebook's folder is reports/by-hand/<notebook>/<time>.
    runs = runs_under(here.parents[2]).found or committed_runs()
    if not runs:
        raise ExperimentError(
            f"no finished run under {here.parents[2].name}/",
            "at least one",
            "run `eagle3lab nightly` first, or set run",
        )
    return runs[-1][0]
