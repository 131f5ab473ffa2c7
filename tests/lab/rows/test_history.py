"""Only like is compared with like, and what a value's name says decides the direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stored_runs import store

from lab.errors import ExperimentError, NotComparable
from lab.rows.comparison import comparison
from lab.rows.history import (
    better_of,
    changes,
    compare_runs,
    flipped_gates,
    metrics_of,
    moved_environment,
)
from lab.rows.runs import comparable_runs, job_seconds, read_environment, read_plan, read_summary
from lab.rows.store import Row
from lab.rows.stored import files
from lab.rows.throttle import held_back_in

pytestmark = pytest.mark.reference


def row(run: str = "r", name: str = "spec-3", kind: str = "decode", **changes: Any) -> Row:
    facts = {"run": run, "job": "j", "notebook": "30_decode", "kind": kind, "name": name, "environment": "m"}
    return Row.model_validate(facts | {"recorded_at": "2026-01-01T00:00:00+00:00"} | changes)


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("time_us", "lower"),
        ("step_ms", "lower"),
        ("peak_bytes", "lower"),
        ("tokens_per_s", "higher"),
        ("gb_per_s", "higher"),
        ("acceptance_length", "higher"),
        ("speedup_ratio", "higher"),
        ("time_us_p90", None),
        ("p10_us", None),
        ("tokens_per_s_samples", None),
        ("acceptance_length_low", None),
        ("max_abs_error", None),
        ("n_prompts", None),
    ],
)
def test_the_name_of_a_value_decides_its_direction(metric: str, better: str | None) -> None:
    assert better_of(metric) == better


def test_a_value_finds_the_spread_written_beside_it() -> None:
    values = {"time_us": 2.0, "time_us_samples": [1.0, 2.0, 3.0], "tokens_per_s": 5.0, "tokens_per_s_p10": 4.0}
    time, rate = metrics_of(row(values=values | {"tokens_per_s_p90": 6.0}, repeats=3))
    assert time.sample.samples == (1.0, 2.0, 3.0)
    assert (rate.sample.p10, rate.sample.p90, rate.sample.n) == (4.0, 6.0, 3)


def test_parity_and_gate_rows_and_missing_ones_have_nothing_to_compare() -> None:
    assert metrics_of(row(kind="parity", values={"time_us": 1.0})) == []
    assert metrics_of(row(status="missing", reason="no GPU")) == []


def test_a_row_is_compared_with_the_row_of_equal_parameters_only() -> None:
    before = [row(values={"tokens_per_s": 10.0}, parameters={"dtype": "a"})]
    after = [row(values={"tokens_per_s": 30.0}, parameters={"dtype": dtype}) for dtype in ("a", "b")]
    words = {change.parameters["dtype"]: change.verdict for change in changes(before, after, [before])}
    assert words["a"].word == "faster"
    assert (words["b"].word, words["b"].reason) == ("missing", "not measured before")


def test_what_this_run_lost_is_missing_with_its_reason() -> None:
    before = [row(values={"tokens_per_s": 10.0})]
    (gone,) = changes(before, [], [before])
    assert (gone.verdict.word, gone.before, gone.after) == ("missing", 10.0, None)
    (lost,) = changes(before, [row(status="missing", reason="the kernel died")], [before])
    assert lost.verdict.reason == "the kernel died"


def test_another_measuring_method_is_unsure_and_not_a_regression() -> None:
    before = [row(values={"time_us": 10.0}, timer="perf_counter_ns/1")]
    after = [row(values={"time_us": 90.0}, timer="perf_counter_ns/2")]
    (change,) = changes(before, after, [before])
    assert change.verdict.word == "unsure"
    assert "from perf_counter_ns/1 to perf_counter_ns/2" in change.verdict.reason


def test_enough_earlier_nights_narrow_the_verdict() -> None:
    nights = [[row(values={"time_us": 100.0 + (i % 3) * 0.2})] for i in range(8)]
    (few,) = changes(nights[-1], [row(values={"time_us": 108.0})], nights[-1:])
    (many,) = changes(nights[-1], [row(values={"time_us": 108.0})], nights)
    assert (few.verdict.word, many.verdict.word) == ("unsure", "slower")


def test_runs_of_unequal_machines_are_refused_with_both_named(tmp_path: Path) -> None:
    before, after = store(tmp_path, "a"), store(tmp_path, "b", fingerprint="other")
    with pytest.raises(NotComparable) as caught:
        compare_runs(before, after)
    assert "a ran on Fast, 2 cores, no GPU (m)" in caught.value.what
    assert "same machine fingerprint" in caught.value.allowed


def test_a_comparison_shows_the_worst_first_and_says_whether_anything_is_slower(tmp_path: Path) -> None:
    before, after = store(tmp_path, "a", value=30.0), store(tmp_path, "b", started="2026-01-02", value=10.0)
    text, any_slower = comparison(before, after)
    assert any_slower
    assert "torch went from a to b" in text
    assert "slower    -66.7%  30_decode spec-3 tokens_per_s: 30.0 -> 10.0" in text
    assert not comparison(after, before)[1]


def test_the_previous_run_is_the_latest_earlier_one_of_this_machine_and_configuration(tmp_path: Path) -> None:
    names = ("a", "2026-01-01", "m"), ("b", "2026-01-03", "m"), ("c", "2026-01-04", "other"), ("e", "2026-01-09", "m")
    for name, started, machine in names:
        store(tmp_path, name, started=started, fingerprint=machine, value=float(len(started)))
    found = comparable_runs(tmp_path / "d", "m", "c", "2026-01-05")
    assert [path.name for path in found] == ["a", "b"]
    assert job_seconds(found) == {"j": 10.0}


def test_a_run_of_another_configuration_is_no_earlier_night_of_this_one(tmp_path: Path) -> None:
    for name, config in (("a", "c"), ("b", "other"), ("d", "c")):
        store(tmp_path, name, config=config)
    found = comparable_runs(tmp_path / "now", "m", "c", "2026-01-05")
    assert [path.name for path in found] == ["a", "d"]
    # Eight quiet nights of another configuration say nothing about the spread of this one.
    for number in range(8):
        store(tmp_path, f"other-{number}", config="other", started=f"2026-02-0{number + 1}", value=100.0)
    before = store(tmp_path, "before", started="2026-03-01", value=100.0)
    after = store(tmp_path, "after", started="2026-03-02", value=92.0)
    [change] = compare_runs(before, after).changes
    assert change.verdict.word == "unsure"
    assert "only 3 earlier nights" in change.verdict.reason, "a, d and before"


def test_nights_stand_in_their_order_when_the_two_compared_are_not_neighbours(tmp_path: Path) -> None:
    """A slow climb of 1% a night: neighbours say 1%, and only a wrong order would make a jump of 7% of it."""
    nights = [
        store(tmp_path, f"night-{number}", started=f"2026-01-0{number + 1}", value=100.0 * 1.01**number)
        for number in range(8)
    ]
    after = store(tmp_path, "after", started="2026-01-09", value=100.0 * 1.09)
    [far] = compare_runs(nights[0], after).changes
    assert (far.verdict.word, far.verdict.reason) == ("faster", "spread of 8 earlier nights")
    [near] = compare_runs(nights[-1], after).changes
    assert near.verdict.high is not None
    assert far.verdict.high is not None
    assert far.verdict.ratio is not None
    assert near.verdict.ratio is not None
    assert far.verdict.high / far.verdict.ratio == pytest.approx(near.verdict.high / near.verdict.ratio)


def test_a_number_that_was_lost_the_night_before_too_is_still_missing() -> None:
    measured, gone = [row(values={"tokens_per_s": 10.0})], [row(status="missing", reason="the kernel died")]
    [change] = changes(gone, gone, [measured, measured, gone])
    assert (change.metric, change.verdict.word, change.verdict.reason) == ("tokens_per_s", "missing", "the kernel died")
    assert changes(gone, gone, [gone]) == [], "what no night ever gave is not compared"


def test_a_run_of_another_configuration_is_compared_and_said_to_be_one(tmp_path: Path) -> None:
    for number in range(6):
        store(tmp_path, f"night-{number}", started=f"2026-01-0{number + 1}", value=100.0 + number % 2)
    before = store(tmp_path, "before", config="other", started="2026-01-08", value=40.0)
    after = store(tmp_path, "after", started="2026-01-09", value=100.0)
    compared = compare_runs(before, after)
    assert compared.moved[0] == "the configurations differ"
    assert [change.verdict.reason for change in compared.changes] == ["spread of 6 earlier nights"], "without `before`"
    assert "the configurations differ" in comparison(before, after)[0]
    assert "the configurations differ" not in compare_runs(tmp_path / "night-1", after).moved


DAMAGES = [
    ("summary.json", '{"started_at": "2026', "holds no finished run"),
    ("summary.json", "[]", "not a JSON object"),
    ("summary.json", "[" * 100_000, "nested more than"),
    ("summary.json", "{}", "fingerprint: Field required"),
    ("summary.json", None, "has schema 2"),
    ("environment.json", "", "has no record of its machine"),
    ("environment.json", '{"gpus": []}', "has no record of its machine: environment.json: fingerprint"),
    ("rows.jsonl", "x\n" * 2, "line 1 of rows.jsonl is not a row"),
    ("rows.jsonl", '{"schema_version": 99}\n', "has row schema 99"),
]


@pytest.mark.parametrize(("name", "content", "why"), DAMAGES, ids=range(len(DAMAGES)))
def test_an_earlier_night_that_cannot_be_read_is_left_out_and_stops_no_comparison(
    tmp_path: Path, name: str, content: str | None, why: str
) -> None:
    nights = [store(tmp_path, f"night-{number}", started=f"2026-01-0{number + 1}") for number in range(4)]
    damaged = nights[1] / name
    if content is None:
        content = json.dumps(json.loads(damaged.read_text()) | {"schema_version": 2})
    damaged.write_text(content)
    compared = compare_runs(nights[2], nights[3])
    assert len(compared.changes) == 1
    [told] = [words for words in compared.moved if words.startswith("night night-1 is left out: ")]
    assert why in told
    assert "2 earlier nights" in compared.changes[0].verdict.reason


def test_what_stands_in_a_run_folder_and_is_unusable_is_refused_in_three_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store(tmp_path, "a")
    for name, read in (("run.json", read_plan), ("summary.json", read_summary), ("environment.json", read_environment)):
        for content in ("", "[]", "[" * 100_000):
            (run / name).write_text(content)
            with pytest.raises(ExperimentError, match=name):
                read(run)
        (run / name).write_text("{" + " " * 200 + "}")
        with monkeypatch.context() as patch:
            patch.setattr(files, "MOST_BYTES", 100)
            with pytest.raises(ExperimentError, match="larger than"):
                read(run)


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="holds no finished run"):
        compare_runs(tmp_path, tmp_path)


def test_what_moved_around_the_numbers_is_told(tmp_path: Path) -> None:
    assert moved_environment(store(tmp_path, "a"), store(tmp_path, "b")) == ["torch went from a to b"]
    before = {"gates": [{"job": "j", "name": "g", "word": "pass"}, {"job": "j", "name": "h", "word": "pass"}]}
    after = {"gates": [{"job": "j", "name": "g", "word": "fail"}]}
    assert flipped_gates(before, after) == ["gate g (j) went from pass to fail", "gate h (j) is gone"]


def test_another_timer_begins_a_series_that_the_nights_before_it_say_nothing_about() -> None:
    old = [[row(values={"time_us": 100.0}, timer="old")] for _ in range(9)]
    new = [[row(values={"time_us": 300.0 + i % 3}, timer="new")] for i in range(9)]
    (first,) = changes(old[-1], new[0], old)
    assert (first.verdict.word, first.verdict.reason) == (
        "unsure",
        "a new series: the measuring method changed from old to new",
    )
    (second,) = changes(new[0], new[1], [*old, new[0]])
    assert "only 1 earlier night" in second.verdict.reason
    (later,) = changes(new[-1], [row(values={"time_us": 330.0}, timer="new")], [*old, *new])
    assert (later.verdict.word, later.verdict.reason) == ("slower", "spread of 9 earlier nights")


@pytest.mark.parametrize("where", ["throttled", "system.throttled"])
def test_a_number_measured_while_the_clocks_were_held_back_is_unsure_with_the_reason(where: str) -> None:
    before, held = [row(values={"time_us": 10.0})], [row(values={"time_us": 90.0, where: "hw thermal slowdown"})]
    for old, new in ((before, held), (held, before)):
        (change,) = changes(old, new, [old])
        assert change.verdict.word == "unsure"
        assert "hw thermal slowdown" in change.verdict.reason
    assert held_back_in("Not Active, Active, Not Active, Active") == "hw thermal slowdown, hw power brake slowdown"
    assert held_back_in("Not Active, Not Active, Not Active, Not Active") == ""
    assert held_back_in("Field is not valid") is None


def test_a_comparison_for_a_pull_request_is_tables_with_what_moved_first(tmp_path: Path) -> None:
    before, after = store(tmp_path, "a", value=30.0), store(tmp_path, "b", started="2026-01-02", value=10.0)
    text, any_slower = comparison(before, after, markdown=True)
    assert any_slower
    lines = text.splitlines()
    assert lines[0] == "### `a` → `b`: 1 slower"
    assert "- torch went from a to b" in lines
    assert "| slower | -66.7% | 30_decode spec-3 tokens_per_s | 30 | 10 |" in text
    same, _ = comparison(before, store(tmp_path, "c", started="2026-01-03", value=30.0), markdown=True)
    assert "<details><summary>1 unsure</summary>" in same, "two nights alone leave room for the machine's moods"


def test_runs_of_one_name_in_two_folders_are_compared_and_so_is_a_run_with_itself(tmp_path: Path) -> None:
    before = store(tmp_path / "a", "night", value=30.0)
    after = store(tmp_path / "b", "night", started="2026-01-02", value=10.0)
    assert [change.verdict.word for change in compare_runs(before, after).changes] == ["slower"]
    assert compare_runs(after, before).moved[0].startswith("night says that it began after night")
    itself = compare_runs(before, before)
    assert [change.verdict.ratio for change in itself.changes] == [1.0]
    assert itself.moved == []
