"""A gate passes only where every row it names was measured and lies within; what is missing never counts as passed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lab.rows.gates import GateResult, Threshold, gates_of, judge
from lab.rows.history import flipped_gates
from lab.rows.store import Row

pytestmark = pytest.mark.reference


def row(value: Any = 3.0, *, name: str = "spec-3", kind: str = "acceptance", job: str = "j", **more: Any) -> Row:
    facts = {"run": "r", "job": job, "notebook": "n", "environment": "m", "recorded_at": "t", "kind": kind}
    values = {} if value is None else {"acceptance_length": value}
    return Row.model_validate(facts | {"name": name, "values": values} | more)


def lost(reason: str = "no memory left", **more: Any) -> Row:
    return row(None, status="missing", reason=reason, **more)


def threshold(**changes: Any) -> Threshold:
    facts = {"name": "long", "kind": "acceptance", "row": "spec-3", "value": "acceptance_length", "at_least": 2.0}
    return Threshold.model_validate(facts | changes)


def judged(*rows: Row, **changes: Any) -> GateResult:
    [result] = judge([threshold(**changes)], list(rows))
    return result


@pytest.mark.parametrize(
    ("bounds", "value", "word"),
    [
        ({"at_least": 2.0}, 2.0, "pass"),
        ({"at_least": 2.0}, 1.999, "fail"),
        ({"at_least": None, "at_most": 2.0}, 2.0, "pass"),
        ({"at_least": None, "at_most": 2.0}, 2.001, "fail"),
        ({"at_least": 1.0, "at_most": 2.0}, 1.5, "pass"),
        ({"at_least": 1.0, "at_most": 2.0}, 0.5, "fail"),
        ({"at_least": 1.0, "at_most": 2.0}, 2.5, "fail"),
        ({"at_least": None, "at_most": 0}, 0, "pass"),
        ({"at_least": None, "at_most": 0}, 1, "fail"),
        ({"at_least": 2.0}, float("inf"), "pass"),
        ({"at_least": 2.0}, float("nan"), "fail"),
        ({"at_least": None, "at_most": 2.0}, float("nan"), "fail"),
    ],
)
def test_both_bounds_hold_their_ends_and_what_is_no_number_is_outside(
    bounds: dict[str, Any], value: float, word: str
) -> None:
    result = judged(row(value), **bounds)
    assert result.word == word
    assert repr(result.value) == repr(float(value))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_missing_row_among_measured_ones_makes_the_gate_missing(place: int) -> None:
    rows = [row(3.0), row(2.5)]
    rows.insert(place, lost())
    result = judged(*rows)
    assert (result.word, result.value, result.threshold, result.detail) == (
        "missing", None, "at least 2", "no memory left",
    )  # fmt: skip
    assert judged(row(3.0), row(2.5)).word == "pass", "without it the gate holds"


def test_a_row_outside_fails_the_gate_whatever_is_missing_beside_it() -> None:
    result = judged(row(3.0, job="a"), lost(job="b"), row(1.5, job="c"), row(1.0, job="d"))
    assert (result.word, result.value, result.job) == ("fail", 1.5, "c")
    assert result.detail == "1 of 4 rows within"


@pytest.mark.parametrize("value", [None, "3.0", True, [3.0]])
def test_a_measured_row_without_that_number_is_missing_and_names_the_value(value: Any) -> None:
    result = judged(row(value))
    assert (result.word, result.detail) == ("missing", "no value 'acceptance_length'")
    assert judged(row(3.0), row(value)).word == "missing"


def test_a_missing_row_is_missing_though_it_holds_a_number() -> None:
    assert judged(row(3.0, status="missing", reason="taken back")).detail == "taken back"


def test_a_threshold_that_finds_no_row_is_missing_and_says_which() -> None:
    for other in ({"name": "spec-4"}, {"kind": "decode"}):
        result = judged(row(3.0, **other))
        assert (result.word, result.job, result.detail) == ("missing", "", "no row acceptance spec-3")
    assert judged(row(3.0), parameters={"batch": 4}).detail == 'no row acceptance spec-3 {"batch": 4}'
    assert judge([], [row()]) == []


def test_parameters_narrow_the_rows_to_those_that_carry_all_of_them() -> None:
    small = row(1.0, parameters={"batch": 1, "dtype": "bf16"})
    large = row(3.0, parameters={"batch": 4, "dtype": "bf16"})
    assert judged(small, large, parameters={"batch": 4}).word == "pass"
    assert judged(small, large, parameters={"batch": 1}).word == "fail"
    assert judged(small, large).word == "fail"
    assert judged(small, large, parameters={"batch": 4, "dtype": "fp32"}).word == "missing"
    assert judged(lost(parameters={"batch": 1}), large, parameters={"batch": 4}).word == "pass", "not one it asks about"


def test_a_gate_that_passes_tells_its_value_bound_and_job() -> None:
    result = judged(row(3.0, job="31_acceptance"), row(2.5, job="other"), at_most=9.0)
    assert result.as_dict() == {
        "name": "long", "word": "pass", "value": 3.0, "threshold": "at least 2 and at most 9",
        "detail": "2 of 2 rows within", "job": "31_acceptance", "set_by": "configuration",
    }  # fmt: skip


def test_a_threshold_without_a_bound_or_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="at_least or at_most"):
        threshold(at_least=None)
    with pytest.raises(ValidationError, match="at_leest"):
        threshold(at_leest=1.0)


@pytest.mark.parametrize(
    ("values", "word"),
    [({"passed": True}, "pass"), ({"passed": False}, "fail"), ({"passed": None}, "fail"), ({"passed": 1}, "fail"),
     ({"passed": "yes"}, "fail"), ({}, "fail")],
)  # fmt: skip
def test_a_notebooks_gate_passes_only_if_it_says_so(values: dict[str, Any], word: str) -> None:
    [result] = gates_of([row(kind="gate", values=values)])
    assert result.word == word


def test_a_notebooks_gate_that_could_not_be_judged_is_missing_and_other_rows_are_no_gates() -> None:
    told = row(kind="gate", name="a", values={"passed": True, "value": 2, "threshold": "at least 1", "detail": "why"})
    results = gates_of([row(), told, lost("no GPU", kind="gate", name="b")])
    assert results == [
        GateResult("a", "pass", 2, "at least 1", "why", "j"),
        GateResult("b", "missing", None, None, "no GPU", "j"),
    ]


def told(*of: tuple[str, str, str], set_by: str | None = "configuration") -> dict[str, Any]:
    who = {"set_by": set_by} if set_by else {}
    return {"gates": [{"name": name, "job": job, "word": word, **who} for name, job, word in of]}


def test_a_gate_of_the_configuration_is_the_same_gate_whichever_job_decides_it() -> None:
    held = told(("g", "a", "pass"))
    assert flipped_gates(held, told(("g", "b", "fail"))) == ["gate g went from pass to fail"]
    assert flipped_gates(held, told(("g", "", "missing"))) == ["gate g went from pass to missing"]
    assert flipped_gates(held, told(("g", "b", "pass"))) == []
    old = told(("g", "a", "pass"), set_by=None)
    assert flipped_gates(old, told(("g", "b", "fail"))) == ["gate g went from pass to fail"], "an older summary"
    twice = told(("g", "a", "fail"), ("g", "b", "pass"))
    assert flipped_gates(held, twice) == ["gate g went from pass to fail"], "the worst of one name"
    of_notebooks = told(("g", "a", "pass"), set_by="notebook"), told(("g", "b", "fail"), set_by="notebook")
    assert flipped_gates(*of_notebooks) == ["gate g (a) is gone"]
