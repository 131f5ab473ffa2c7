"""Thirty nights side by side: their page, its size, the steps it shows, and the list of all reports."""

from __future__ import annotations

import json
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lab.night.summary import conclude
from lab.page.report import PAGE, render
from lab.rows import environment
from lab.rows.runs import ENVIRONMENT_FILE, RUN_FILE, SUMMARY_FILE, read_summary
from lab.rows.store import Row, RowWriter

pytestmark = pytest.mark.reference

N_NIGHTS, STEP_AT = 30, 15
POINTS = [(context, batch, k) for context, batch in ((512, 1), (32768, 1), (16384, 4)) for k in (0, 3)]
BEGAN = datetime(2026, 1, 1, 2, 30, tzinfo=UTC)


def night(reports: Path, number: int, record: environment.Environment, source: random.Random) -> Path:
    """One finished run: decoding at six points, of which one is 8% slower from `STEP_AT` on, and last night's loss."""
    began = BEGAN + timedelta(days=number)
    run = reports / f"night-{number:02d}"
    with RowWriter(run / "rows.jsonl") as writer:
        for context, batch, k in POINTS:
            is_stepped = (context, k) == (32768, 3) and number >= STEP_AT
            is_lost = (context, k) == (16384, 3) and number == N_NIGHTS - 1
            steps = [4e3 * source.gauss(1, 0.006) * (1.08 if is_stepped else 1.0) for _ in range(9)]
            row = Row(
                run=run.name, job="41_bench", notebook="41_bench", kind="bench", name=f"Context{context}_{k}tokens",
                values={} if is_lost else {"step_us": sorted(steps)[4], "step_us_samples": steps},
                parameters={"context": context, "batch": batch, "spec_k": k},
                status="missing" if is_lost else "measured",
                reason="the device had no memory left" if is_lost else None, timer="perf_counter", repeats=9,
                environment=record.fingerprint, recorded_at=began.isoformat(),
            )  # fmt: skip
            writer.write(row)
    plan = {
        "run": run.name, "started_at": began.isoformat(), "argv": ["eagle3lab"], "config_hash": "c", "pair": {},
        "fingerprint": record.fingerprint, "strict_undecided": False, "gate_required": False, "gates": [],
        "jobs": [{"id": "41_bench", "notebook": "41_bench", "hash": "h", "reads_run": False}],
    }  # fmt: skip
    (run / RUN_FILE).write_text(json.dumps(plan))
    (run / ENVIRONMENT_FILE).write_text(record.model_dump_json())
    summary = conclude(run, now=(began + timedelta(minutes=21)).isoformat())
    (run / SUMMARY_FILE).write_text(json.dumps(summary))
    return run


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("reports"), random.Random(1)
    record = environment.collect()
    for number in range(N_NIGHTS):
        night(folder, number, record, source)
    return folder


def test_a_lasting_step_is_found_at_its_night_and_nothing_else_is(reports: Path) -> None:
    series = read_summary(reports / f"night-{N_NIGHTS - 1}")["nights"]
    stepped = [one for one in series if one["steps"]]
    assert [(one["notebook"], one["row"]) for one in stepped] == [("41_bench", "Context32768_3tokens")]
    [step] = stepped[0]["steps"]
    assert (step["word"], step["run"]) == ("slower", f"night-{STEP_AT}")
    assert step["ratio"] == pytest.approx(1.08, rel=0.01)
    assert series[0] == stepped[0], "steps come first"


def test_the_page_of_the_last_night_is_small_and_says_first_what_moved_since_the_one_before(reports: Path) -> None:
    page = render(reports / f"night-{N_NIGHTS - 1}")
    text = page.read_text()
    assert len(text) < 3_000_000
    assert text.index('id="since"') < text.index('id="nights"') < text.index('id="job-41_bench"')
    assert text.count('class="spark"') == len(POINTS) - 1, "a line for each number that the night still has"
    assert "the device had no memory left" in text
    assert "<script" not in text


def test_the_list_of_all_reports_says_what_each_night_moved(reports: Path) -> None:
    render(reports / "night-00")
    text = (reports / PAGE).read_text()
    assert text.count("night-") >= N_NIGHTS
    row = text.partition(">night-29<")[2].partition(">night-28<")[0]
    assert re.search(r"against the previous run .*\b1 missing\b", row)
