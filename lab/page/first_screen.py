"""What a night says in three numbers and one picture; what was not measured is missing, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab.page.findings.finding import Finding, Level, Night, number
from lab.page.findings.of_acceptance import chosen_depth
from lab.page.findings.of_speed import engine_points, interval, place
from lab.rows.store import Row

# Notebooks that measure each number, as a night names them.
ROUNDS, ACCEPTANCE, FLOORS = (
    ("30_decode", "41_bench", "42_perf_gates"),
    ("31_acceptance",),
    ("41_bench", "42_perf_gates"),
)
# Of the summary's figures, the one to remember first.
REMEMBERED = ("speed", "points", "acceptance")


@dataclass(frozen=True)
class Figure:
    """One number of the first screen.

    Attributes:
        label: what it is. value: for people; empty where it was not measured.
        note: its interval and where it is from, or why there is none. job: where the page shows it.
        word: what is said in place of a value: missing, or not asked for.
        number: the value as measured; 0 where it was not.
    """

    label: str
    value: str
    note: str
    job: str = ""
    number: float = 0.0
    word: str = "missing"


def numbers(night: Night) -> list[Figure]:
    """Speed-up with its interval, acceptance length, share of the byte floor."""
    fastest = _fastest(night)
    return [_speedup(night, fastest), _acceptance(night, fastest), _floor(night, fastest)]


def _fastest(night: Night) -> Row | None:
    """The depth with the highest speed-up: of the pair that was decoded, else of the bench."""
    for rows in (night.of("decode"), engine_points(night)):
        if known := [row for row in rows if row.number("speedup") is not None]:
            return max(known, key=lambda row: number(row, "speedup"))
    return None


def _speedup(night: Night, row: Row | None) -> Figure:
    label = "Speed-up over plain decoding"
    if row is None:
        return _not_had(label, night, *ROUNDS)
    speedup = number(row, "speedup")
    return Figure(label, f"{speedup:.2f}×", f"{_where(row)}{interval(row)}", row.job, speedup)


def _acceptance(night: Night, fastest: Row | None) -> Figure:
    label, row = "Tokens a step", chosen_depth(night)
    if row is not None and row.number("acceptance_length") is not None:
        low, high = row.number("acceptance_length_low"), row.number("acceptance_length_high")
        span = "" if low is None or high is None else f" ({low:.2f} to {high:.2f} over prompts)"
        outside = row.number("acceptance_length_outside_loops")
        rest = "" if outside is None else f"; {outside:.2f} outside repeated text"
        note = f"acceptance length, {row.name}{span}{rest}"
        return Figure(label, f"{number(row, 'acceptance_length'):.2f}", note, row.job)
    if fastest is not None and fastest.number("acceptance_length") is not None:
        note = f"acceptance length, {_where(fastest)}"
        return Figure(label, f"{number(fastest, 'acceptance_length'):.2f}", note, fastest.job)
    return _not_had(label, night, *ACCEPTANCE)


def _floor(night: Night, fastest: Row | None) -> Figure:
    label, points = "Share of the byte floor", engine_points(night)
    if not points:
        return _not_had(label, night, *FLOORS)
    row = fastest if fastest in points else points[-1]
    least = min(number(point, "share_of_floor") for point in points)
    note = f"{place(row)}; the least of {len(points)} rows {least:.0%}"
    return Figure(label, f"{number(row, 'share_of_floor'):.0%}", note, row.job)


def _where(row: Row) -> str:
    return place(row) if row.kind == "bench" else row.name


def _not_had(label: str, night: Night, *notebooks: str) -> Figure:
    """A number that none of these notebooks gave, and why."""
    jobs = [job for job in night.summary["jobs"] if job["notebook"] in notebooks]
    if not jobs:
        return Figure(label, "", f"no job of this run is of {' or '.join(notebooks)}", word="not asked for")
    return Figure(label, "", _why_not(night, jobs))


def _why_not(night: Night, jobs: list[dict[str, Any]]) -> str:
    broken = next((job for job in jobs if job["status"] != "finished"), None)
    if broken is not None:
        return f"{broken['id']} did not finish"
    ids = {job["id"] for job in jobs}
    reason = next((row.reason for row in night.rows if row.job in ids and row.status == "missing"), None)
    return reason or f"{', '.join(sorted(ids))} left no such row"


def picture(night: Night, found: list[Finding], summary_jobs: list[str]) -> tuple[str, str]:
    """Job and name of the first screen's figure: of the worst finding if something failed, else of the summary."""
    failed = [finding for finding in found if finding.level == Level.FAILED and finding.figure]
    if failed:
        return failed[0].job, failed[0].figure
    for job in summary_jobs:
        if figure := night.figure(job, *REMEMBERED):
            return job, figure
    shown = [finding for finding in found if finding.figure]
    return (shown[0].job, shown[0].figure) if shown else ("", "")
