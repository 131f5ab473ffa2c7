"""A page says what is easily overlooked: a failed gate, a useless draft, whose pair it was, what was left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from nights_of_rows import GATE, decoded, page_of, row
from places import NIGHT_8B

from lab.night.experiment import SENTENCE
from lab.night.jobs import JOB_FILE
from lab.night.notices import notices_of
from lab.night.summary import conclude
from lab.page import summary_figures
from lab.page.report import render
from lab.rows.runs import SUMMARY_FILE
from lab.rows.store import Row, read_run

pytestmark = pytest.mark.reference


def section(text: str, job: str) -> str:
    return text[text.index(f'<section id="job-{job}"') :].split("</section>")[0]


def test_a_job_whose_gate_failed_or_was_not_judged_is_not_called_finished(tmp_path: Path) -> None:
    rows = [
        row("good", "gate", "g", GATE),
        row("bad", "gate", "g", GATE | {"passed": False, "value": 2}),
        row("open", "gate", "g", status="missing", reason="no rows"),
    ]
    _, text = page_of(tmp_path, rows)
    assert "finished" in section(text, "good")
    assert 'class="word bad"' in section(text, "bad")
    assert "gate failed" in section(text, "bad")
    assert "gate not judged" in section(text, "open")
    assert "finished" not in section(text, "bad") + section(text, "open")


def test_a_draft_that_slows_the_pair_is_named_in_the_verdict_and_on_the_page(tmp_path: Path) -> None:
    refused = row("31_acceptance", "acceptance", "spec-3", {"acceptance_by_position": [0.0, 0.0, 0.0]})
    rows = [row("10_parity_stages", "gate", "g", GATE), decoded(0.58, 0.55, 0.61), refused]
    sentence, text = page_of(tmp_path, rows)
    assert sentence.startswith(
        "Passed: the one gate held in 3 jobs; but speculation slows this pair at every depth measured: spec-3 "
        "0.58 (0.55 to 0.61) times as fast as plain decoding, and the target refuses 100% of the first drafted tokens"
    )
    assert 'class="verdict passed noticed"' in text
    summary = tmp_path / "reports" / "r" / SUMMARY_FILE
    summary.write_text(summary.read_text().replace(sentence, "Passed: an older run, which had no such words."))
    assert "Speculation slows this pair at every depth measured" in render(summary.parent).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([decoded(1.6, 1.5, 1.7)], []),
        ([decoded(0.98, 0.94, 1.02)], []),  # the rounds do not tell
        ([decoded(0.9, 0.8, 0.95), decoded(1.2, 1.1, 1.3, k=1)], ["speculation slows this pair at 1 of 2 depths"]),
        ([row("31", "acceptance", "spec-3", {"acceptance_by_position": [0.82, 0.6, 0.5]})], []),
    ],
)  # fmt: skip
def test_notices_are_for_what_is_certain(rows: list[Row], expected: list[str]) -> None:
    found = notices_of(rows)
    assert len(found) == len(expected)
    assert all(one.startswith(start) for one, start in zip(found, expected, strict=True))


def test_a_night_on_planted_pairs_names_them_and_not_the_shipped_one(tmp_path: Path) -> None:
    bench = row("41_bench", "bench", "x", {"a": 1}, parameters={"pair": "planted", "geometry": "nano"})
    _, text = page_of(tmp_path / "planted", [row("41_bench", "gate", "g", GATE), bench])
    assert "pair: planted nano" in text
    assert "shipped" not in text
    took = {"10_parity_stages": {"target": "lab/pairs/shipped/target"}}
    _, text = page_of(tmp_path / "both", [row("10_parity_stages", "gate", "g", GATE), bench], took)
    assert "pairs: shipped, planted nano" in text


def test_what_was_not_asked_for_is_told_from_what_is_missing(tmp_path: Path) -> None:
    rows = [
        row("22_kernels", "gate", "g", GATE),
        row("22_kernels", "kernel_code", "gemm", status="not asked", reason="no architecture was asked for"),
        row("22_kernels", "kernel", "gemm", status="missing", reason="the library is not installed"),
    ]
    _, text = page_of(tmp_path, rows)
    assert "3 rows, 1 missing, 1 not asked for" in text
    assert "not asked: no architecture was asked for" in text
    assert "missing: the library is not installed" in text
    with pytest.raises(ValueError, match="a row that is not asked needs a reason"):
        row("22_kernels", "kernel_code", "gemm", status="not asked")


def test_sentences_that_explain_a_result_stand_in_their_job(tmp_path: Path) -> None:
    rows = [row("30_decode", "gate", "g", GATE), row("30_decode", SENTENCE, "sentence 1", {"text": "Because <k>."})]
    _, text = page_of(tmp_path, rows)
    assert '<p class="explained">Because &lt;k&gt;.</p>' in section(text, "30_decode")
    assert f"Rows: {SENTENCE}" not in text


def test_a_speed_up_in_the_summary_is_that_of_the_rows_and_not_a_ratio_of_medians() -> None:
    plain = row("30_decode", "decode", "baseline", {"decode_tokens_per_s": 40.0, "tokens_per_s": 40.0})
    spec = decoded(1.69, 1.6, 1.75).model_copy(
        update={"values": {**decoded(1.69, 1.6, 1.75).values, "tokens_per_s": 44.0, "with_prefill_speedup": 1.2}}
    )
    drawn = summary_figures.speeds([plain, spec])
    assert drawn is not None
    figure, table, *_ = drawn
    assert list(table["tokens_per_s"]) == [40.0, 50.0], "decoding only"
    assert table["speedup"][1] == 1.69
    assert table["with_prefill_speedup"][1] == 1.2
    assert [text.get_text() for text in figure.axes[0].texts] == ["40", "50 (1.69×, 1.60 to 1.75)"]
    assert "decoding only" in figure.axes[0].get_xlabel()


def test_the_summary_of_the_8b_night_has_a_picture() -> None:
    drawn = summary_figures.points(read_run(NIGHT_8B))
    assert drawn is not None
    _, table, *_ = drawn
    assert set(table["job"]) == {"41_bench", "42_perf_gates-micro", "42_perf_gates-full"}
    assert table[table["spec_k"] == 3]["speedup"].notna().all()
    assert summary_figures.points([]) is None


def test_every_word_of_a_job_has_a_mark(tmp_path: Path) -> None:
    _, text = page_of(tmp_path, [row("bad", "gate", "g", GATE | {"passed": False})])
    assert re.search(r'<li><span class="sign" aria-hidden="true">✗</span><a href="#job-bad">', text)


SVG = '<svg xmlns="http://www.w3.org/2000/svg"><text>drawn</text></svg>'
WORDS = {"name": "f", "alt": "Alt.", "caption": "Kept caption.", "order": 1, "columns": ["k"], "rows": [[1]]}
CODE = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": None, "source": "kept()", "outputs": []}
NOTEBOOK = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [CODE]}
CUT = [
    ("job.json", 20, "job.json cannot be read: "),
    ("executed.ipynb", 60, "executed.ipynb cannot be shown: executed.ipynb cannot be read as a notebook"),
    ("executed.ipynb", "cell", "executed.ipynb cannot be shown: "),
    ("figures/f.json", 20, "f.json cannot be shown: "),
    ("figures/f.svg", 50, "f.json cannot be shown: its drawing f.svg is cut short"),
    ("figures/f.svg", None, "f.json cannot be shown: "),
    ("rows.jsonl", 0, "line 1 of rows.jsonl is not a row"),
]


@pytest.mark.parametrize(("name", "damage", "told"), CUT, ids=range(len(CUT)))
def test_a_file_that_is_damaged_costs_its_own_place_on_the_page_and_says_why(
    tmp_path: Path, name: str, damage: int | str | None, told: str
) -> None:
    page_of(tmp_path, [row("bad", "gate", "g", GATE), row("good", "bench", "kept row", {"n": 1})])
    run = tmp_path / "reports" / "r"
    for job in ("bad", "good"):
        folder = run / "jobs" / job
        (folder / "figures").mkdir()
        (folder / "figures" / "f.svg").write_text(SVG)
        (folder / "figures" / "f.json").write_text(json.dumps(WORDS))
        (folder / "executed.ipynb").write_text(json.dumps(NOTEBOOK))
    path = run / "jobs" / "bad" / name
    if damage is None:
        path.unlink()
    elif damage == "cell":
        path.write_text(json.dumps(NOTEBOOK | {"cells": [{"cell_type": "code"}]}))
    else:
        path.write_text(path.read_text()[: int(damage)] if damage else "x\nx\n")
    text = render(run).read_text(encoding="utf-8")
    assert told in section(text, "bad")
    assert "cannot be" not in section(text, "good")
    assert "Kept caption." in section(text, "good")
    assert "kept row" in section(text, "good")
    assert "kept()" in (run / "notebooks" / "good.html").read_text(encoding="utf-8")


def test_a_job_whose_record_is_cut_short_is_unusable_and_the_night_is_told_all_the_same(tmp_path: Path) -> None:
    page_of(tmp_path, [row("bad", "gate", "g", GATE), row("good", "gate", "g", GATE)])
    run = tmp_path / "reports" / "r"
    record = run / "jobs" / "bad" / JOB_FILE
    for content in (record.read_text()[:9], "[]", "{}", '{"parameters": [], "outcome": {}}'):
        record.write_text(content)
        summary = conclude(run, now="2026-11-21T10:05:00+00:00")
        assert (summary["word"], [job["status"] for job in summary["jobs"]]) == ("incomplete", ["unusable", "finished"])
        assert summary["jobs"][0]["error"].startswith("job.json cannot be read: ")


def test_runs_that_cannot_be_read_are_named_below_the_index_and_on_the_page(tmp_path: Path) -> None:
    rows = [row("j", "gate", "g", GATE)]
    page_of(tmp_path, rows)
    reports = tmp_path / "reports"
    for name, content in (("cut", '{"started_at'), ("newer", '{"schema_version": 99}'), ("list", "[]")):
        (reports / name).mkdir()
        (reports / name / SUMMARY_FILE).write_text(content)
    other = json.loads((reports / "r" / SUMMARY_FILE).read_text()) | {"fingerprint": "other", "seconds": "long"}
    (reports / "odd").mkdir()
    (reports / "odd" / SUMMARY_FILE).write_text(json.dumps(other))
    render(reports / "r")
    index = (reports / "index.html").read_text(encoding="utf-8")
    for name, why in (("cut", "holds no finished run"), ("newer", "schema 99"), ("list", "not a JSON object"),
                      ("odd", "seconds: ")):  # fmt: skip
        assert re.search(f"Night {name} is left out: .*{why}", index), name
    assert 'href="r/index.html"' in index
    (reports / "r" / "jobs" / "j" / "rows.jsonl").unlink()  # page_of writes them again
    sentence, text = page_of(tmp_path, rows)
    assert sentence.startswith("Passed: the one gate held in 1 job; no earlier run could be compared with (3 nights")
    assert "Night cut is left out: " in text


def test_a_job_whose_gates_all_held_is_not_said_to_have_left_nothing(tmp_path: Path) -> None:
    _, text = page_of(tmp_path, [row("held", "gate", "g", GATE), row("silent", SENTENCE, "s", {"text": ""})])
    assert "This job left no figure and no rows beside its gates." in section(text, "held")
    assert "of its job's folder" in text
