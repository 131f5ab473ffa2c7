"""The questions that ship as Perfetto SQL: each runs, answers what it asks, and meets a trace that Perfetto keeps."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from profile_captures import N_STEPS, events

from lab.probes.profiles import records
from lab.probes.profiles.capture import Capture, apart, capture_of, chrome_trace, class_of, read_chrome_trace
from lab.probes.profiles.questions import FOLDER, ORDER, Slices, copy_questions, questions
from lab.probes.profiles.rows import read_profile
from lab.probes.proofs.gpu_trace import Span

pytestmark = pytest.mark.reference
H200 = ROOT / "reports" / "reference" / "h200" / "profile_trace.json.gz"
ASKED = {question.name: question for question in questions()}


@pytest.fixture(scope="module")
def h200() -> Capture:
    """The committed capture of five steps of 8B's shapes on an H200."""
    return read_chrome_trace(H200)


def answer(capture: Capture, name: str) -> list[dict[str, Any]]:
    """What a capture's trace answers to a question."""
    columns, rows = Slices(chrome_trace(capture)["traceEvents"]).answer(ASKED[name])
    return [dict(zip(columns, row, strict=True)) for row in rows]


def own_times(kernels: tuple[Span, ...]) -> list[float]:
    """Of every kernel, the time in which none that began before still ran, us."""
    found, end = [], float("-inf")
    for kernel in sorted(kernels, key=lambda each: (each.start, -each.end)):
        found.append(max(0.0, kernel.end - max(kernel.start, end)))
        end = max(end, kernel.end)
    return found


def test_every_question_begins_with_one_sentence_and_no_file_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.sql")} == set(ORDER)
    for question in questions():
        assert question.sql.startswith(f"-- {question.sentence}\n")
        assert question.sentence.endswith(".")
        assert question.sql.count(";") == 1, "Perfetto's page runs one statement"


def test_time_by_stage_is_that_of_the_captures_own_ranges(h200: Capture) -> None:
    kernels = sorted(h200.trace.kernels, key=lambda each: (each.start, -each.end))
    stages: dict[int, str] = {}
    for call in h200.trace.calls:
        around = [span for span in h200.ranges if span.start <= call.start <= span.end]
        if call.correlation is not None and around:
            stages[call.correlation] = class_of(min(around, key=lambda span: span.end - span.start).name)
    expected: dict[str, float] = defaultdict(float)
    for kernel, own in zip(kernels, own_times(h200.trace.kernels), strict=True):
        expected[stages.get(kernel.correlation or -1, "(no range)")] += own / len(h200.trace.windows)
    found = {row["stage"]: row["us_a_step"] for row in answer(h200, "time_by_stage")}
    assert found == pytest.approx(dict(expected), abs=0.2)
    assert max(found, key=found.__getitem__) == "target.mlp"


def test_shares_of_cards_add_up_and_name_the_function_that_made_a_kernel(h200: Capture) -> None:
    rows = answer(h200, "cards")
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=0.002)
    assert sum(row["us"] for row in rows) == pytest.approx(sum(own_times(h200.trace.kernels)), rel=0.001)
    assert rows[0]["card"] == "gemm_ring"
    assert {"attention_streams", "attention_combine"} <= {row["card"] for row in rows}
    assert sum(row["kernels"] for row in rows) == len(h200.trace.kernels)


def test_launches_are_counted_step_by_step(h200: Capture) -> None:
    rows = answer(h200, "launches")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["kernels_ran"] for row in rows) == len(h200.trace.kernels)
    graphs = sum(call.name == "cudaGraphLaunch" for call in h200.trace.calls)
    assert sum(row["graphs"] for row in rows) == graphs


def test_gaps_are_those_that_no_kernel_fills(h200: Capture) -> None:
    rows = answer(h200, "gaps")
    assert [row["gap_us"] for row in rows] == sorted((row["gap_us"] for row in rows), reverse=True)
    kernels = sorted(h200.trace.kernels, key=lambda each: each.start)
    longest, end = 0.0, kernels[0].end
    for kernel in kernels:
        inside = any(step.start <= end and kernel.start <= step.end for step in h200.trace.windows)
        longest = max(longest, kernel.start - end if inside else 0.0)
        end = max(end, kernel.end)
    assert rows[0]["gap_us"] == pytest.approx(longest, abs=0.2)
    assert (rows[0]["after_kernel"], rows[0]["before_kernel"]) == ("open_step", "take_rows")


def test_a_wait_is_found_with_its_range_and_its_step() -> None:
    planted = {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 1330.0, "dur": 5.0, "args": {}}
    quiet, loud = (answer(capture_of(events(*more)), "waits") for more in ((), (planted,)))
    assert len(loud) == len(quiet) + 1
    [wait] = [row for row in loud if row["name"] == "cudaStreamSynchronize"]
    assert (wait["step"], wait["us"]) == (2, 5.0)
    assert class_of(wait["in_range"]) == "target.attn"
    assert [row["in_range"] for row in quiet] == ["(outside all ranges)"] * N_STEPS


def test_no_span_of_a_trace_overlaps_another_of_its_line_without_lying_inside_it(h200: Capture) -> None:
    """Perfetto drops such spans: by its rule 560 of this capture's 1560 kernels when all lay on one line."""
    crossing = [span for line in apart(h200.trace.kernels)[1:] for span in line]
    assert crossing, "kernels do overlap here"
    lines: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    written = chrome_trace(h200)["traceEvents"]
    for event in written:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            lines[event["pid"], event["tid"]].append((begin, begin + length))
    for spans in lines.values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    threads = [event["tid"] for event in written if event["name"] == "thread_name"]
    assert len(threads) == len(set(threads)), "a thread's name goes by its number alone"
    assert all(event["pid"] > 0 and event["tid"] > 0 for event in written), "0 is the idle process"


def test_a_capture_without_a_gpu_has_no_answer_and_no_error() -> None:
    capture = Capture("torch", (), capture_of([]).trace)
    assert all(not answer(capture, name) for name in ORDER)


def test_questions_lie_beside_a_trace(tmp_path: Path) -> None:
    copied = copy_questions(tmp_path / "queries")
    assert [path.stem for path in copied] == list(ORDER)
    assert copied[0].read_text(encoding="utf-8") == ASKED["time_by_stage"].sql


def test_the_notebook_shows_every_question_with_its_answer_from_the_committed_trace() -> None:
    shown = records.answers(read_profile(H200.parent / "profile.jsonl"))
    assert all(f"(queries/{name}.sql)" in shown for name in ORDER)
    assert "target.mlp" in shown
    assert shown.count("<p>Nothing.</p>") == 1, "no step of that capture waited"
    assert "No trace" in records.answers(None)


def test_perfettos_own_trace_processor_gives_the_same_answers(h200: Capture, tmp_path: Path) -> None:
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="perfetto is not installed: pip install perfetto")
    shell = shutil.which("trace_processor_shell")
    if shell is None:
        pytest.skip("trace_processor_shell is not in PATH: see perfetto.dev/docs/analysis/trace-processor")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(h200)), encoding="utf-8")
    config = perfetto.TraceProcessorConfig(bin_path=shell)
    with perfetto.TraceProcessor(trace=str(path), config=config) as processor:
        for name in ORDER:
            expected = answer(h200, name)
            found = [dict(row.__dict__) for row in processor.query(ASKED[name].sql)]
            assert len(found) == len(expected)
            for ours, theirs in zip(expected, found, strict=True):
                assert {key: theirs[key] for key in ours} == pytest.approx(ours, abs=0.2)
