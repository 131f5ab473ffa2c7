"""Gates: named thresholds on rows. A gate passes, fails, or is missing; missing never counts as passed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from lab.rows.store import Row, Value

Word = Literal["pass", "fail", "missing"]
SetBy = Literal["notebook", "configuration"]


class Threshold(BaseModel):
    """A `[[gate]]` of a configuration: every row of that kind and name must have `value` within the bounds.

    `parameters` narrows the rows to those that carry these parameter values; `pair` keeps the gate to nights on the
    pair of that name, so that what one pair has earned is not asked of another.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    kind: str
    row: str
    value: str
    parameters: dict[str, str | int | float | bool] = {}
    pair: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _has_a_bound(self) -> Threshold:
        if self.at_least is None and self.at_most is None:
            raise ValueError("a gate needs at_least or at_most")
        return self

    def bound(self) -> str:
        """The bounds for people."""
        low = f"at least {self.at_least:g}" if self.at_least is not None else ""
        high = f"at most {self.at_most:g}" if self.at_most is not None else ""
        return " and ".join(filter(None, (low, high)))


@dataclass(frozen=True)
class GateResult:
    """One judged gate.

    Attributes:
        job: whose notebook set it; of a gate of the configuration, the job of the row that decided.
        set_by: who set it. What a notebook sets is a gate of its job, what the configuration sets one of the night.
    """

    name: str
    word: Word
    value: Value
    threshold: Value
    detail: str
    job: str
    set_by: SetBy = "notebook"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


def gates_of(rows: list[Row]) -> list[GateResult]:
    """The gates that notebooks judged themselves, in the order written."""
    results = []
    for row in rows:
        if row.kind != "gate":
            continue
        detail = str(row.values.get("detail") or "")
        if row.status == "missing":
            results.append(GateResult(row.name, "missing", None, None, row.reason or "", row.job))
        else:
            word: Word = "pass" if row.values.get("passed") is True else "fail"
            value, threshold = row.values.get("value"), row.values.get("threshold")
            results.append(GateResult(row.name, word, value, threshold, detail, row.job))
    return results


def judge(thresholds: list[Threshold], rows: list[Row]) -> list[GateResult]:
    """The configuration's gates on `rows`; a threshold that found no measured row is missing."""
    return [_judge_one(threshold, rows) for threshold in thresholds]


def _judge_one(threshold: Threshold, rows: list[Row]) -> GateResult:
    found = [row for row in rows if row.kind == threshold.kind and row.name == threshold.row]
    found = [row for row in found if all(row.parameters.get(key) == want for key, want in threshold.parameters.items())]
    measured = [(row.job, value) for row in found if (value := row.number(threshold.value)) is not None]
    outside = [(job, value) for job, value in measured if not _within(threshold, value)]
    if not outside and (not measured or len(measured) < len(found)):
        return _missing(threshold, found)
    job, value = (outside or measured)[0]
    detail = f"{len(measured) - len(outside)} of {len(found)} rows within"
    return GateResult(
        threshold.name, "fail" if outside else "pass", value, threshold.bound(), detail, job, "configuration"
    )


def _missing(threshold: Threshold, found: list[Row]) -> GateResult:
    reasons = [row.reason or f"no value {threshold.value!r}" for row in found if row.number(threshold.value) is None]
    where = f"{threshold.kind} {threshold.row} {json.dumps(threshold.parameters) if threshold.parameters else ''}"
    detail = "; ".join(reasons) or f"no row {where.strip()}"
    return GateResult(
        threshold.name, "missing", None, threshold.bound(), detail, found[0].job if found else "", "configuration"
    )


def _within(threshold: Threshold, value: float) -> bool:
    # Written so that NaN is never within.
    low_holds = threshold.at_least is None or value >= threshold.at_least
    high_holds = threshold.at_most is None or value <= threshold.at_most
    return low_holds and high_holds


def bare_name(gate: str) -> str:
    """A gate's name without the kind of its run before it: `x` of `micro: x`."""
    return gate.removeprefix("micro: ").removeprefix("full: ")
