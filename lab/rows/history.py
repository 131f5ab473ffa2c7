"""What moved between two runs.

Rows name their units, and the name decides the comparison: times (`_us`, `_ms`, `_s`) and `_bytes` are better lower;
rates (`_per_s`), `acceptance_length` and `speedup` are better higher. Other values (errors, shares, counts, floors) are
shown, not compared. Only runs with the same machine fingerprint are compared; earlier nights of another configuration
say nothing about the spread of this one.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.errors import NotComparable
from lab.rows.runs import comparable_runs, left_out_words, read_environment, read_nights, read_summary, runs_under
from lab.rows.store import Row, read_run
from lab.rows.stored.moments import is_to_come, moment_of
from lab.rows.throttle import VALUE
from lab.rows.values import number_of, percent
from lab.rows.verdict import Better, Sample, Verdict, compare

_NOT_COMPARED = ("environment", "gate", "parity", "tokens", "warning")
_SPREAD = re.compile(r"(^|_)(samples|p10|p90|min|max|std|low|high|threshold)(_|$)")
_NOT_MEASURED = re.compile(r"^(floor|ceiling)_")  # what a number is held against, not a number of its own
_LOWER = re.compile(r"_(us|ms|s|seconds|bytes)$")
_HIGHER = re.compile(r"(_per_s|_per_second|^acceptance_length(_outside_loops)?|(^|_)speedup(_ratio)?)$")
_COUNTED = re.compile(r"(^acceptance_length(_outside_loops)?|_bytes)$")


@dataclass(frozen=True)
class Metric:
    """One comparable value of a row."""

    name: str
    better: Better
    counted: bool
    sample: Sample


@dataclass(frozen=True)
class Change:
    """One metric of one row, before and after."""

    notebook: str
    kind: str
    row: str
    parameters: dict[str, Any]
    metric: str
    before: float | None
    after: float | None
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)

    @property
    def what(self) -> str:
        """Row, grid point and value in words."""
        point = " ".join(f"{key}={value}" for key, value in self.parameters.items())
        return " ".join(filter(None, (self.row, point, self.metric)))

    @property
    def move(self) -> str:
        """The change in per cent, signed; empty where there is none."""
        return percent(self.verdict.ratio)


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side: their numbers, and in sentences what else differs, or could not be read."""

    changes: list[Change]
    moved: list[str]


def better_of(metric: str) -> Better | None:
    """Which direction of a value is the faster one, by its name; None when it is not compared."""
    if _SPREAD.search(metric) or _NOT_MEASURED.search(metric):
        return None
    if _HIGHER.search(metric):
        return "higher"
    return "lower" if _LOWER.search(metric) else None


def metrics_of(row: Row) -> list[Metric]:
    """The comparable values of a measured row, each with the spread recorded beside it."""
    if row.status != "measured" or row.kind in _NOT_COMPARED:
        return []
    return [
        Metric(name, better, bool(_COUNTED.search(name)), _sample(row, name, number))
        for name, value in row.values.items()
        if (better := better_of(name)) and (number := number_of(value)) is not None
    ]


def _sample(row: Row, name: str, value: float) -> Sample:
    raw = row.values.get(f"{name}_samples")
    samples = [number for item in raw if (number := number_of(item)) is not None] if isinstance(raw, list) else []
    return Sample(value, tuple(samples), row.number(f"{name}_p10"), row.number(f"{name}_p90"), row.repeats)


def changes(before: list[Row], after: list[Row], nights: list[list[Row]]) -> list[Change]:
    """Every comparable metric of two runs; what only one of them has is "missing" with the reason.

    Args:
        nights: the rows of earlier comparable runs, oldest first, `before` included.
    """
    old, new = _by_key(before), _by_key(after)
    series = [_by_key(rows) for rows in nights]
    result: list[Change] = []
    for key in dict.fromkeys([*new, *old]):
        result.extend(_row_changes(old.get(key), new.get(key), [index[key] for index in series if key in index]))
    return result


def _by_key(rows: list[Row]) -> dict[tuple[str, str, str, str], Row]:
    return {row.key(): row for row in rows if row.kind not in _NOT_COMPARED}


def _row_changes(old: Row | None, new: Row | None, series: list[Row]) -> list[Change]:
    known = new or old
    assert known is not None, "a key comes from one of the two runs"
    was = {metric.name: metric for metric in metrics_of(old)} if old else {}
    now = {metric.name: metric for metric in metrics_of(new)} if new else {}
    # A number that was lost stays lost: what a row could not give tonight and the night before is missing still.
    known_of = {metric.name: None for row in series for metric in metrics_of(row)} if new and not now else {}
    result = []
    for name in dict.fromkeys([*now, *was, *known_of]):
        # Another way to measure begins another series: what was measured the old way says nothing about its spread.
        alike = [row for row in series if new is None or row.timer == new.timer]
        verdict = _verdict(old, new, was.get(name), now.get(name), _earlier(alike, name))
        before, after = (side[name].sample.centre if name in side else None for side in (was, now))
        result.append(
            Change(known.notebook, known.kind, known.name, dict(known.parameters), name, before, after, verdict)
        )
    return result


def _earlier(series: list[Row], name: str) -> list[float]:
    return [metric.sample.centre for row in series for metric in metrics_of(row) if metric.name == name]


def _verdict(old: Row | None, new: Row | None, was: Metric | None, now: Metric | None, nights: list[float]) -> Verdict:
    if now is None:
        return Verdict("missing", (new.reason if new else None) or "measured before, not in this run")
    if was is None:
        return Verdict("missing", (old.reason if old else None) or "not measured before")
    assert old is not None, "a metric comes from its row"
    assert new is not None, "a metric comes from its row"
    if old.timer != new.timer:
        return Verdict("unsure", f"a new series: the measuring method changed from {old.timer} to {new.timer}")
    if held := throttled(old) or throttled(new):
        return Verdict("unsure", f"the clocks were held back while it was measured: {held}")
    return compare(was.sample, now.sample, now.better, nights, counted=now.counted)


def throttled(row: Row) -> str:
    """Why the GPU's clocks were held back while the row was measured; empty if they were not, as far as it says."""
    return str(row.values.get(VALUE) or row.values.get(f"system.{VALUE}") or "")


def compare_runs(before: Path, after: Path) -> Comparison:
    """Every comparable metric of two run folders, and what else moved.

    Raises:
        NotComparable: they ran on machines with different fingerprints.
    """
    was, now = read_summary(before), read_summary(after)
    if was["fingerprint"] != now["fingerprint"]:
        old, new = (_machine(path) for path in (before, after))
        raise NotComparable(
            f"{before.name} ran on {old} and {after.name} on {new}",
            "two runs with the same machine fingerprint",
            "compare runs of one machine; numbers of two machines are not one series",
        )
    is_alike = was["config_hash"] == now["config_hash"]
    begun = {before.resolve(): was["started_at"]} if is_alike else {}
    for path in comparable_runs(after, now["fingerprint"], now["config_hash"], now["started_at"]):
        begun[path.resolve()] = read_summary(path)["started_at"]
    # What lies between two nights is read off neighbours, so each night has to stand where it was.
    nights, unread = read_nights(sorted(begun, key=lambda path: (moment_of(begun[path]), path.name)))
    moved = _odd_moments((before.name, was["started_at"]), (after.name, now["started_at"]))
    moved += [] if is_alike else ["the configurations differ"]
    moved += [*moved_environment(before, after), *left_out_words(runs_under(after.parent).left_out | unread)]
    return Comparison(changes(read_run(before), read_run(after), [rows for _, rows in nights]), moved)


def _odd_moments(before: tuple[str, str], after: tuple[str, str]) -> list[str]:
    """Sentences for what no clock that was left alone can have said, of two runs: name, and when it began."""
    told = dict.fromkeys((before, after))  # two folders of one name may be two runs, and one run may be given twice
    said = [f"{name} says that it began at {at}, which is still to come" for name, at in told if is_to_come(at)]
    if moment_of(before[1]) > moment_of(after[1]):
        said.append(f"{before[0]} says that it began after {after[0]}: exchange them, unless a clock was moved")
    return said


def _machine(run_dir: Path) -> str:
    record = read_environment(run_dir)
    gpus = ", ".join(gpu.name for gpu in record.gpus) or "no GPU"
    return f"{record.cpu}, {record.n_cores} cores, {gpus} ({record.fingerprint})"


def moved_environment(before: Path, after: Path) -> list[str]:
    """What of software, clocks and source differs between two runs, one sentence each."""
    old, new = read_environment(before), read_environment(after)
    moved = []
    for name in sorted({*old.packages, *new.packages}):
        was, now = old.packages.get(name), new.packages.get(name)
        if was != now:
            moved.append(f"{name} went from {was or 'absent'} to {now or 'absent'}")
    for key, label in (("python", "Python"), ("system", "the system"), ("cuda", "CUDA"), ("commit", "the commit")):
        was, now = getattr(old, key), getattr(new, key)
        if was != now:
            moved.append(f"{label} went from {was or 'none'} to {now or 'none'}")
    if old.source != new.source:
        moved.append("the source of eagle3core or lab changed")
    for gpu_was, gpu_now in zip(old.gpus, new.gpus, strict=False):
        for key in ("driver", "power_limit_w", "max_sm_clock_mhz"):
            was, now = getattr(gpu_was, key), getattr(gpu_now, key)
            if was != now:
                moved.append(f"GPU {key} went from {was} to {now}")
    return moved


def flipped_gates(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Gates whose word differs between two summaries, one sentence each.

    A gate of a notebook is known by its job and name. One of the configuration is known by its name alone: which of
    the rows it names decides, and so which job, may change from night to night.
    """
    ours = {gate.get("name") for side in (before, after) for gate in side.get("gates", []) if _is_of_night(gate)}
    old, new = _words(before, ours), _words(after, ours)
    flipped = [
        f"gate {gate} went from {old[gate]} to {word}" for gate, word in new.items() if old.get(gate, word) != word
    ]
    return flipped + [f"gate {gate} is gone" for gate in old if gate not in new]


def _words(summary: dict[str, Any], ours: set[str | None]) -> dict[str, str]:
    """The word of every gate by what it is called; the worst of several of one name."""
    found: dict[str, str] = {}
    for gate in summary.get("gates", []):
        name, job, word = gate.get("name"), gate.get("job"), str(gate.get("word"))
        # A summary of before gates said who set them tells it by the names of the other one.
        known = _is_of_night(gate) or ("set_by" not in gate and name in ours)
        called = str(name) if known or not job else f"{name} ({job})"
        if found.get(called) != "fail" and not (found.get(called) == "missing" and word == "pass"):
            found[called] = word
    return found


def _is_of_night(gate: dict[str, Any]) -> bool:
    return gate.get("set_by") == "configuration"
