"""The first request of a process: parts that add up, rows with their reasons, a figure and gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.cli import main
from lab.errors import RunFailed
from lab.night.experiment import Experiment
from lab.probes.start import figures, measure
from lab.probes.start.measure import ARCHIVE, EMPTY, KEPT, StartPlan, measure_starts, one_start, values_of
from lab.probes.start.parts import BEFORE_A_TOKEN, PARTS
from lab.rows import environment
from lab.rows.maker import RowMaker
from lab.rows.store import Row, read_rows

pytestmark = pytest.mark.reference

PLAN = StartPlan("nano", (0, 2), 16, 1, 2, "float32", "cpu")
MAKER = RowMaker("run", "start", "machine")


def run_of(seconds: float, **changes: Any) -> dict[str, Any]:
    """What a process says whose parts all took the same."""
    facts = {"n_kernels": 47, "n_compiled": 47, "n_compilers": 16, "compilers_s": 40.0, "path": "kernels"}
    return {"parts": dict.fromkeys(PARTS, seconds), **facts, **changes}


def test_a_process_tells_every_part_of_its_first_request_and_its_tokens_are_the_planted_ones() -> None:
    answer = one_start(PLAN.asked(2), {})
    assert list(answer["parts"]) == list(PARTS)
    assert all(seconds >= 0 for seconds in answer["parts"].values())
    assert answer["parts"]["imports"] > 0.2
    assert (answer["path"], answer["n_kernels"]) == ("torch", 0)


@pytest.mark.slow
def test_a_process_that_fails_is_a_missing_row_with_its_own_words() -> None:
    with pytest.raises(RunFailed, match="no_such_geometry"):
        one_start({**PLAN.asked(0), "geometry": "no_such_geometry"}, {})


@pytest.mark.slow
def test_imports_of_a_start_leave_out_what_only_comparisons_need() -> None:
    program = "import sys, lab.probes.start.parts; print({'transformers', 'numba'} & set(sys.modules))"
    assert measure._process(["-c", program], {}).strip() == "set()"


def test_values_are_medians_over_processes_and_the_first_token_comes_before_the_first_step() -> None:
    values = values_of([run_of(1.0), run_of(3.0), run_of(2.0)])
    assert values["first_token_s"] == pytest.approx(2.0 * len(BEFORE_A_TOKEN))
    assert values["second_token_s"] - values["first_token_s"] == pytest.approx(2.0)
    assert values["part_s.compile"] == 2.0
    assert values["n_compiled"] == 47


def started(monkeypatch: pytest.MonkeyPatch, plan: StartPlan) -> tuple[list[Row], list[dict[str, str]]]:
    """Rows of a plan whose processes are not begun, as this machine has no GPU for them, and their environments."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(measure, "_process", lambda arguments, environment: "")
    monkeypatch.setattr(measure, "one_start", lambda asked, environment: seen.append(dict(environment)) or run_of(1.0))
    return measure_starts(plan, MAKER, lambda row: None, lambda line: None), seen


def test_on_a_gpu_a_start_has_no_kernels_or_a_cache_that_another_left_or_an_archive_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = StartPlan("llama-3.1-8b", (0, 3), 512, 1, 2, "bfloat16", "cuda")
    rows, seen = started(monkeypatch, plan)
    assert [row.parameters["kernels"] for row in rows] == [EMPTY, KEPT, ARCHIVE] * 2
    for k in range(2):
        empty, kept, archived = seen[6 * k : 6 * k + 2], seen[6 * k + 2 : 6 * k + 4], seen[6 * k + 4 : 6 * k + 6]
        assert kept == empty, "each of the second finds what one of the first left"
        assert len({each["EAGLE3_KERNEL_CACHE"] for each in [*empty, *archived]}) == 4
        assert {each["EAGLE3_CUBINS"] for each in empty} == {""}
        assert {Path(each["EAGLE3_CUBINS"]).name for each in archived} == {"kernels.zip"}


def test_a_start_that_fails_does_not_keep_others_from_being_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with_drafts(asked: Any, environment: Any) -> dict[str, Any]:
        if asked["k"]:
            raise RunFailed("a process ended with 1: out of memory", "a first token", "free memory")
        return run_of(1.0)

    monkeypatch.setattr(measure, "_process", lambda arguments, environment: "")
    monkeypatch.setattr(measure, "one_start", fails_with_drafts)
    rows = measure_starts(PLAN, MAKER, lambda row: None, lambda line: None)
    assert [(row.status, row.name) for row in rows] == [
        ("measured", "nano/plain/plain torch"),
        ("missing", "nano/spec-2/plain torch"),
    ]
    assert "out of memory" in (rows[1].reason or "")


def gates_of(folder: Path, rows: list[Row], **limits: float) -> dict[str, Any]:
    exp = Experiment("43_start", "run", "job", folder, {}, environment.collect())
    figures.write_gates(exp, rows, {"plain": 0.0, "drafts": 0.0, "stored": 0.0, **limits})
    return {gate["name"]: gate["passed"] for gate in exp.gates}


def test_each_start_has_the_limit_of_its_kind_and_one_that_is_missing_passes_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, _ = started(monkeypatch, StartPlan("llama-3.1-8b", (0, 3), 512, 1, 1, "bfloat16", "cuda"))
    rows[-1] = MAKER.missing("start", rows[-1].name, "no GPU", dict(rows[-1].parameters))
    passed = gates_of(tmp_path / "all", rows, plain=8.0, drafts=9.5, stored=9.5)
    assert passed == {
        "first token, llama-3.1-8b/plain/empty": False,
        "first token, llama-3.1-8b/plain/kept": True,
        "first token, llama-3.1-8b/plain/archive": True,
        "first token, llama-3.1-8b/spec-3/empty": True,
        "first token, llama-3.1-8b/spec-3/kept": True,
        "first token, llama-3.1-8b/spec-3/archive": None,
    }
    assert gates_of(tmp_path / "none", rows) == {}
    assert gates_of(tmp_path / "nothing", [], stored=8.0) == {"first token": None}


def test_the_figure_has_a_line_a_start_and_its_table_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = started(monkeypatch, StartPlan("llama-3.1-8b", (0, 3), 512, 1, 1, "bfloat16", "cuda"))
    drawing = figures.waterfall(rows, "Rows of a test")
    assert list(drawing.table["start"]) == [row.name for row in rows]
    assert set(PARTS) <= set(drawing.table.columns)
    assert "first token after 9.0 s" in drawing.caption
    axes = drawing.fig.axes[0]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) == pytest.approx(len(PARTS))
    assert len(drawing.fig.legends[0].get_texts()) == len(PARTS)


@pytest.mark.slow
def test_the_command_writes_a_row_a_kind_of_start_and_says_when_each_had_its_first_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "start.jsonl"
    assert main(["startup", "--spec", "0,2", "--context", "16", "--device", "cpu", "--out", str(out)]) == 0
    rows = list(read_rows(out))
    assert [row.name for row in rows] == ["nano/plain/plain torch", "nano/spec-2/plain torch"]
    assert figures.chosen(out) == rows
    for row in rows:
        assert row.number("first_token_s") == pytest.approx(sum(list(figures.parts_of(row).values())[:-1]))
    assert '"command": "startup"' in capsys.readouterr().out
