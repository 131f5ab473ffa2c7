"""What moved between two runs.

Rows name their units, and the name decides the comparison: times (`_us`, `_ms`, `_s`) and `_bytes` are better lower;
rates (`_per_s`), `acceptance_length` and `speedup` are better higher. Other values (errors, shares, counts, floors) are
shown, not compared. Only runs with the same machine fingerprint and the same configuration are compared.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.errors import NotComparable
from lab.rows.runs import ENVIRONMENT_FILE, comparable_runs, read_summary
from lab.rows.store import Row, read_run
from lab.rows.throttle import VALUE
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
        return f"{(self.verdict.ratio - 1) * 100:+.1f}%" if self.verdict.ratio is not None else ""


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
    found: dict[str, tuple[float, Better]] = {}
    for name, value in row.values.items():
        better = better_of(name)
        if better and isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = (float(value), better)
    return [
        Metric(name, better, bool(_COUNTED.search(name)), _sample(row, name, value, alone=len(found) == 1))
        for name, (value, better) in found.items()
    ]


def _sample(row: Row, name: str, value: float, *, alone: bool) -> Sample:
    unit = name.rpartition("_")[2]
    raw = row.values.get(f"{name}_samples")
    if raw is None and (alone or name.startswith("median_")):
        raw = row.values.get(f"samples_{unit}", row.values.get("samples"))
    samples = tuple(float(item) for item in raw if isinstance(item, (int, float))) if isinstance(raw, list) else ()
    p10, p90 = (_number(row.values.get(f"{name}_{q}", row.values.get(f"{q}_{unit}"))) for q in ("p10", "p90"))
    return Sample(value, samples, p10, p90, row.repeats)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


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


def compare_runs(before: Path, after: Path) -> list[Change]:
    """Every comparable metric of two run folders.

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
    nights = comparable_runs(after, now["fingerprint"], now["config_hash"], str(now["started_at"]))
    begun = {before.resolve(): str(was["started_at"])}
    begun |= {path.resolve(): str(read_summary(path)["started_at"]) for path in nights}
    # What lies between two nights is read off neighbours, so each night has to stand where it was.
    in_order = sorted(begun, key=lambda path: (begun[path], path.name))
    return changes(read_run(before), read_run(after), [read_run(path) for path in in_order])


def _machine(run_dir: Path) -> str:
    record = json.loads((run_dir / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    gpus = ", ".join(gpu["name"] for gpu in record["gpus"]) or "no GPU"
    return f"{record['cpu']}, {record['n_cores']} cores, {gpus} ({record['fingerprint']})"


def moved_environment(before: Path, after: Path) -> list[str]:
    """What of software, clocks and source differs between two runs, one sentence each."""
    old, new = (json.loads((path / ENVIRONMENT_FILE).read_text(encoding="utf-8")) for path in (before, after))
    moved = []
    for name in sorted({*old["packages"], *new["packages"]}):
        was, now = old["packages"].get(name), new["packages"].get(name)
        if was != now:
            moved.append(f"{name} went from {was or 'absent'} to {now or 'absent'}")
    for key, label in (("python", "Python"), ("system", "the system"), ("cuda", "CUDA"), ("commit", "the commit")):
        if old.get(key) != new.get(key):
            moved.append(f"{label} went from {old.get(key) or 'none'} to {new.get(key) or 'none'}")
    if old.get("source") != new.get("source"):
        moved.append("the source of eagle3core or lab changed")
    for was, now in zip(old["gpus"], new["gpus"], strict=False):
        for key in ("driver", "power_limit_w", "max_sm_clock_mhz"):
            if was.get(key) != now.get(key):
                moved.append(f"GPU {key} went from {was.get(key)} to {now.get(key)}")
    return moved


def flipped_gates(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Gates whose word differs between two summaries, one sentence each."""
    old = {(gate["job"], gate["name"]): gate["word"] for gate in before.get("gates", [])}
    new = {(gate["job"], gate["name"]): gate["word"] for gate in after.get("gates", [])}
    flipped = [
        f"gate {name} ({job}) went from {old[job, name]} to {word}"
        for (job, name), word in new.items()
        if (job, name) in old and old[job, name] != word
    ]
    return flipped + [f"gate {name} ({job}) is gone" for job, name in old if (job, name) not in new]
