"""A night is judged from what it left on disk: the worst word wins, and nothing beside it changes the verdict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from stored_runs import add_rows, plan

from lab.night.summary import conclude
from lab.rows.runs import read_whole_summary

pytestmark = pytest.mark.reference

LENGTH = "acceptance_length"
HELD = {"kind": "gate", "name": "g", "values": {"passed": True}}
BROKEN = {"kind": "gate", "name": "b", "values": {"passed": False}}
UNJUDGED = {"kind": "gate", "name": "u", "status": "missing", "reason": "no GPU"}
NOW = "2026-01-02T00:01:00+00:00"


@pytest.mark.parametrize(
    ("rows", "changes", "word", "code"),
    [
        ([HELD], {}, "passed", 0),
        ([HELD, BROKEN, UNJUDGED], {}, "failed", 1),
        ([HELD, UNJUDGED], {}, "incomplete", 3),
        ([], {}, "incomplete", 3),
        ([], {"gate_required": False}, "not judged", 0),
        ([HELD], {"jobs": [{"id": "j", "notebook": "n"}, {"id": "k", "notebook": "n"}]}, "incomplete", 3),
        ([HELD], {"strict_undecided": True}, "undecided", 4),
    ],
)
def test_missing_is_never_passed_and_the_worst_word_wins(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], word: str, code: int
) -> None:
    folder = plan(tmp_path / "run", **changes)
    add_rows(folder, *rows)
    summary = conclude(folder, now=NOW)
    assert (summary["word"], summary["exit_code"]) == (word, code)
    assert summary["seconds"] == 1.0, "of its job, by no clock of the day"


@pytest.mark.parametrize(
    ("bounds", "length", "word"),
    [
        ({"at_least": 2.2}, 2.3, "pass"),
        ({"at_least": 2.2}, 2.1, "fail"),
        ({"at_most": 2.2}, 2.3, "fail"),
        ({"at_least": 2.2}, None, "missing"),
        ({"at_least": 2.2}, "NaN", "fail"),
    ],
)
def test_a_threshold_of_the_configuration_judges_the_rows_it_names(
    tmp_path: Path, bounds: dict[str, float], length: object, word: str
) -> None:
    gate = {"name": "long enough", "kind": "acceptance", "row": "spec-3", "value": "acceptance_length", **bounds}
    folder = plan(tmp_path / "run", gates=[gate])
    add_rows(folder, {"kind": "acceptance", "name": "spec-3", "values": {"acceptance_length": length}})
    (judged,) = conclude(folder, now=NOW)["gates"]
    assert judged["word"] == word


def test_a_threshold_whose_row_was_never_written_is_missing_and_says_which(tmp_path: Path) -> None:
    gate = {"name": "g", "kind": "acceptance", "row": "spec-3", "value": "acceptance_length", "at_least": 1.0}
    folder = plan(tmp_path / "run", gates=[gate])
    (judged,) = conclude(folder, now=NOW)["gates"]
    assert (judged["word"], judged["detail"]) == ("missing", "no row acceptance spec-3")


def test_the_previous_run_of_the_same_machine_is_compared_and_another_is_not(tmp_path: Path) -> None:
    for name, fingerprint, rate in (("older", "m", 100.0), ("other", "else", 900.0), ("now", "m", 10.0)):
        folder = plan(tmp_path / name, fingerprint)
        add_rows(folder, HELD, {"kind": "decode", "name": "spec-3", "values": {"tokens_per_s": rate}})
        if name != "now":
            started = {"started_at": "2026-01-01T00:00:00+00:00"}
            summary = conclude(folder, now=NOW) | started
            (folder / "summary.json").write_text(json.dumps(summary))
    summary = conclude(tmp_path / "now", now=NOW)
    assert summary["since"]["previous"] == "older"
    assert summary["since"]["words"] == {"slower": 1}
    assert "against the previous run 1 slower and 0 the same" in summary["sentence"]


MEASURED = {"kind": "decode", "name": "spec-3"}
GONE = {**MEASURED, "status": "missing", "reason": "the kernel died"}


@pytest.mark.parametrize(
    ("now", "is_strict", "word", "code"),
    [
        ({**MEASURED, "values": {"tokens_per_s": 50.0}}, False, "passed", 0),
        ({**MEASURED, "values": {"tokens_per_s": 50.0}}, True, "failed", 1),  # certainly slower
        ({**MEASURED, "values": {"tokens_per_s": 95.0}}, True, "undecided", 4),  # unsure
        (GONE, False, "passed", 0),
        (GONE, True, "undecided", 4),  # missing, as the only word
        (None, True, "undecided", 4),  # not so much as a row
        ({**MEASURED, "values": {"tokens_per_s": 200.0}}, True, "passed", 0),  # certainly faster
    ],
)
def test_a_strict_night_fails_by_what_is_slower_and_is_undecided_by_what_is_unsure_or_missing(
    tmp_path: Path, now: dict[str, Any] | None, is_strict: bool, word: str, code: int
) -> None:
    def night(name: str, started: str, **changes: Any) -> Path:
        return plan(tmp_path / name, "m", started_at=started, **changes)

    before = night("before", "2026-01-01T00:00:00+00:00")
    add_rows(before, HELD, {**MEASURED, "values": {"tokens_per_s": 100.0}})
    (before / "summary.json").write_text(json.dumps(conclude(before, now=NOW)))
    after = night("now", "2026-01-02T00:00:00+00:00", strict_undecided=is_strict)
    add_rows(after, HELD, *([now] if now else []))
    summary = conclude(after, now=NOW)
    assert (summary["word"], summary["exit_code"]) == (word, code), summary["since"]["words"]
    if word == "failed":
        assert summary["sentence"].startswith("Failed: 1 number certainly slower than in the previous run; ")
    add_rows(after, BROKEN)
    assert conclude(after, now=NOW)["exit_code"] == 1, "a failed gate is a failed gate, strict or not"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("jobs/j/rows.jsonl", "x\nx\n", "line 1 of rows.jsonl is not a row"),
        ("jobs/j/rows.jsonl", '{"schema_version": 99}\n', "row schema 99"),
        ("environment.json", "{", "has no record of its machine"),
        ("summary.json", "{", "holds no finished run"),
        ("summary.json", '{"schema_version": 99}', "has schema 99"),
    ],
)
def test_an_earlier_night_that_cannot_be_read_is_named_and_changes_nothing_of_the_verdict(
    tmp_path: Path, name: str, content: str, why: str
) -> None:
    for day in (1, 2, 3):
        folder = plan(tmp_path / f"night-{day}", started_at=f"2026-01-0{day}T00:00:00+00:00")
        add_rows(folder, HELD, {**MEASURED, "values": {"tokens_per_s": 100.0}})
        if day < 3:
            (folder / "summary.json").write_text(json.dumps(conclude(folder, now=NOW)))
    (tmp_path / "night-2" / name).write_text(content)
    summary = conclude(tmp_path / "night-3", now=NOW)
    assert (summary["word"], summary["exit_code"]) == ("passed", 0)
    assert (summary["since"]["previous"], summary["since"]["n_earlier"]) == ("night-1", 1)
    [told] = summary["since"]["left_out"]
    assert told.startswith("night night-2 is left out: ")
    assert why in told


def test_a_gate_of_the_configuration_that_fails_by_another_job_is_named_with_its_new_word(tmp_path: Path) -> None:
    gate = {"name": "long enough", "kind": "acceptance", "row": "spec-3", "value": LENGTH, "at_least": 2.0}
    for name, day, lengths in (("before", 1, {"j": 2.5, "k": 2.5}), ("now", 2, {"j": 2.5, "k": 1.5})):
        folder = plan(tmp_path / name, gates=[gate], started_at=f"2026-01-0{day}T00:00:00+00:00")
        for job, length in lengths.items():
            add_rows(folder, {"kind": "acceptance", "name": "spec-3", "job": job, "values": {LENGTH: length}})
        summary = conclude(folder, now=NOW)
        (folder / "summary.json").write_text(json.dumps(summary))
    assert summary["since"]["flipped"] == ["gate long enough went from pass to fail"]


def test_of_a_stored_night_whose_part_is_taken_away_the_jobs_that_are_missing_are_named(tmp_path: Path) -> None:
    stored = Path(__file__).parents[3] / "reports" / "reference" / "h200" / "night-8b"
    assert conclude(stored, now=NOW)["sentence"] == read_whole_summary(stored)["sentence"]
    without = Path(shutil.copytree(stored, tmp_path / "night-8b"))
    for job in ("41_bench", "40_speed-batches", "43_start", "90_nightly"):
        shutil.rmtree(without / "jobs" / job)
    summary = conclude(without, now=NOW)
    assert "4 jobs of 14 did not finish: 41_bench, 40_speed-batches, 43_start, 90_nightly" in summary["sentence"]
    assert (summary["word"], summary["exit_code"]) == ("failed", 1)
