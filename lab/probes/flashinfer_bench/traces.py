"""Rows of the kernels' benchmark and of sweeps as traces: one evaluation a time measured, of a workload by a solution.

What was not measured is not made up: an error is NaN where rows hold only the verdict of a proof, and a reference's
time is 0, the schema's "none", where no library was timed. Source: the models of flashinfer-bench 0.1, Apache-2.0.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3core.kernels import Card, registry
from lab.probes.flashinfer_bench.definitions import AUTHOR, DTYPES, Workload
from lab.probes.kernels.rows import KERNEL, PROOF
from lab.probes.sweeps.rows import JOINT
from lab.probes.sweeps.rows import KIND as SWEPT
from lab.rows.environment import Environment
from lab.rows.store import Row, nested

_ROOT = uuid.UUID("6f1c0a5e-3b0e-5c0e-9d4d-2f6f0c8a7d11")  # of our workloads' identities; any constant would do


@dataclass(frozen=True)
class Measured:
    """One time of one solution on one workload, with the row it comes from.

    Attributes:
        setting: order-neutral parameters; empty for the engine's own choice.
    """

    workload: Workload
    setting: Mapping[str, Any]
    row: Row
    machine: Environment | None

    @property
    def solution(self) -> str:
        """Unique among all solutions, since names of theirs are."""
        digest = hashlib.sha256(json.dumps(self.setting, sort_keys=True).encode()).hexdigest()[:8]
        return f"{AUTHOR}_{self.workload.definition}_{digest if self.setting else 'chosen'}"

    def evaluation(self) -> dict[str, Any]:
        """Status, correctness, performance and environment."""
        values = nested(self.row.values)
        bits = values.get("bits_equal", True)
        found: dict[str, Any] = {
            "status": "PASSED" if bits else "INCORRECT_NUMERICAL",
            "environment": {"hardware": str(self.row.parameters.get("gpu", "unknown")), "libs": self._packages()},
            "timestamp": self.row.recorded_at or "unknown",
            "log": self._log(values),
            "correctness": {
                "max_relative_error": "NaN", "max_absolute_error": "NaN",
                "extra": {"proven": "numbers and bits"} if self.row.kind == KERNEL else {"bits_equal_to_default": bits},
            },
        }  # fmt: skip
        if bits:
            us, library_us = float(values["time_us"]), values.get("library_us")
            reference = float(library_us) if library_us else 0.0
            found["performance"] = {
                "latency_ms": us / 1e3, "reference_latency_ms": reference / 1e3, "speedup_factor": reference / us,
            }  # fmt: skip
        return found

    def _packages(self) -> dict[str, str]:
        known = self.machine.packages if self.machine else {}
        drivers = {gpu.driver for gpu in self.machine.gpus if gpu.driver} if self.machine else set()
        libraries = {name: version for name, version in known.items() if version}
        return libraries | {"driver": ", ".join(sorted(drivers))} if drivers else libraries

    def _log(self, values: Mapping[str, Any]) -> str:
        parts = [f"timer {self.row.timer}", f"commit {(self.machine and self.machine.commit) or 'unknown'}"]
        if values.get("library"):
            parts.append(f"reference_latency_ms is {values['library']}, the fastest library timed beside")
        else:
            parts.append("no reference was timed: its latency and the speed-up are 0")
        if "floor_us" in values:
            parts.append(f"floor {values['floor_us']:.2f} us by bytes")
        return "; ".join(parts)


@dataclass
class Reading:
    """Times found in rows, and how many rows are left out, by the reason."""

    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        """Counts a row that is no trace."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def read_traces(rows: Iterable[Row], machines: Mapping[str, Environment]) -> Reading:
    """The times in `rows`, of cards that there still are; `machines` by run."""
    cards, found, failed = registry(), Reading(), set()
    workloads: dict[str, Workload] = {}  # a sweep has many times of one
    for row in rows:
        if row.kind == PROOF and row.values.get("verdict") != "passed":
            failed.add(row.name)
        if row.kind not in (KERNEL, SWEPT):
            continue
        parameters = nested(row.parameters)
        op = row.name if row.kind == KERNEL else str(parameters["op"])
        reason = _unfit(row, op, parameters, cards, failed)
        if reason:
            found.leave_out(reason)
            continue
        case = {name: _read(value) for name, value in parameters["shape"].items()}
        workload = workloads.setdefault(f"{op} {sorted(case.items())}", Workload(cards[op], case))
        found.measured.append(Measured(workload, parameters.get("setting", {}), row, machines.get(row.run)))
    return found


def _unfit(row: Row, op: str, parameters: Mapping[str, Any], cards: Mapping[str, Card], failed: set[str]) -> str | None:
    """Why a row of a time is no trace."""
    if row.status != "measured" or "time_us" not in row.values:
        return "no time of a kernel alone"
    if op not in cards:
        return f"card {op} is no more"
    if row.kind == KERNEL and op in failed:
        return f"card {op} failed its proof"
    if not parameters.get("shape"):
        return "whole steps, not a kernel"
    if parameters.get("phase") == JOINT:
        return "another order of sums"
    if not _takes(cards[op], parameters["shape"]):
        return f"sizes that card {op} takes no more"
    return None


def _takes(card: Card, shape: Mapping[str, Any]) -> bool:
    """Whether sizes of these names are of the card's own cases; rows may be older than the card."""
    return set(shape) <= {name for case in (*card.shapes, *card.cases, *card.slow_cases) for name in case}


def _read(value: Any) -> Any:
    """A size as the card takes it, from a row's JSON."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.partition(".")[2])
    return tuple(value) if isinstance(value, list) else value


def unwritable(workload: Workload) -> str | None:
    """Why the schema, or the card of today, cannot hold a workload."""
    try:
        shapes = workload.shapes
    except KeyError as missing:
        return f"card {workload.card.name} has a further size, {missing.args[0]}"
    for name, (_, dtype) in {**shapes.inputs, **shapes.outputs}.items():
        if dtype not in DTYPES:
            return f"{workload.card.name}: {name} is {dtype}, which the schema has not"
    return None


def identity(workload: Workload) -> str:
    """The same for the same case, in every export."""
    return str(uuid.uuid5(_ROOT, json.dumps(dict(workload.case), sort_keys=True, default=str) + workload.definition))
