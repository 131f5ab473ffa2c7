"""Rows about prefill are drawn a line a load, and held to the limits that a night sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.night.experiment import Experiment
from lab.probes.proofs import command
from lab.probes.proofs.check import Check, Finding, Verdict
from lab.probes.proofs.prefill.checks import PART
from lab.probes.proofs.prefill.figures import Limits, chosen, first_tokens, loads_of, write_gates
from lab.probes.proofs.prefill.judging import ReadingTimes, judge_bits, judge_load, judge_rate
from lab.rows import environment
from lab.rows.store import Row, RowWriter

pytestmark = pytest.mark.reference

LIMITS = Limits(short=7.0, middle=15.0, long=1500.0, together=2500.0, least_rate=0.4)
RIGHT = Verdict(True, "equal", {"n_prompts": 1, "n_tokens": 16, "n_differing_prompts": 0})
WRONG = Verdict(False, "differ", {"n_prompts": 1, "n_tokens": 16, "n_differing_prompts": 1})


def times(first_ms: float, n_tokens: int, right: Verdict = RIGHT) -> ReadingTimes:
    return ReadingTimes((first_ms,), (first_ms,), 1, n_tokens, first_ms / 2, 10**12, 2 * first_ms, "", right)


def row(name: str, parameters: dict[str, Any], verdict: Verdict) -> Row:
    found = Finding(Check(PART, f"planted {name}", parameters, lambda: verdict), verdict, 1.0)
    return found.row("prefill", environment.collect())


def load(n: int, tokens: int, verdict: Verdict) -> Row:
    return row(f"{n} x {tokens}", {"n": n, "tokens": tokens}, verdict)


def a_night() -> list[Row]:
    """Loads in time, late, wrong, not run and broken; the rate; the bits."""
    many = times(100.0, 6400)
    return [
        load(4, 16384, judge_load(times(2400.0, 65536), None)),
        load(1, 20, judge_load(times(6.0, 20), None)),
        load(1, 64, judge_load(times(8.0, 64), None)),
        load(1, 512, judge_load(times(14.0, 512, WRONG), None)),
        load(1, 4096, Verdict(False, "RuntimeError: an illegal address")),
        load(1, 32768, Verdict(None, "no memory")),
        load(64, 100, judge_load(many, None)),
        row("rate", {"n": 64, "tokens": 100, "rated": "1 x 4096"}, judge_rate(many, times(30.0, 4096), 0.4)),
        row("bits", {"sizes": [64, 128], "lengths": [20]}, judge_bits({}, 100, 2)),
    ]


def gates_of(folder: Path, rows: list[Row], limits: Limits) -> dict[str, bool | None]:
    exp = Experiment("44_prefill", "run", "job", folder, {}, environment.collect())
    write_gates(exp, rows, limits)
    return {gate["name"]: gate["passed"] for gate in exp.gates}


def test_each_load_has_its_limit_and_what_broke_passes_nothing(tmp_path: Path) -> None:
    assert gates_of(tmp_path / "all", a_night(), LIMITS) == {
        "first token, 4 x 16384, ms": True,
        "prompts with other tokens, 4 x 16384": True,
        "first token, 1 x 20, ms": True,
        "prompts with other tokens, 1 x 20": True,
        "first token, 1 x 64, ms": False,
        "prompts with other tokens, 1 x 64": True,
        "first token, 1 x 512, ms": True,
        "prompts with other tokens, 1 x 512": False,
        "prompts with other tokens, 1 x 4096": False,
        "first token, 1 x 32768, ms": None,
        "prompts with other tokens, 1 x 32768": None,
        "prompts with other tokens, 64 x 100": True,
        "rate of many short prompts": True,
        "bits of every size of pass, that differ": True,
    }
    differing = row("bits", {"sizes": [64], "lengths": [20]}, judge_bits({"20 tokens": 3}, 100, 2))
    exact = row("rate", {"n": 64, "tokens": 100, "rated": "1 x 4096"}, Verdict(True, "fine", {"rate_ratio": 0.4}))
    assert gates_of(tmp_path / "exact", [exact], LIMITS) == {"rate of many short prompts": True}, "at least"
    assert gates_of(tmp_path / "bits", [differing], Limits()) == {"bits of every size of pass, that differ": False}


def test_without_limits_no_time_is_judged_and_without_rows_nothing_passes(tmp_path: Path) -> None:
    assert not [name for name in gates_of(tmp_path / "none", a_night(), Limits()) if name.startswith(("first", "rate"))]
    assert gates_of(tmp_path / "empty", [], LIMITS) == {"first token of prompts": None}
    assert gates_of(tmp_path / "nothing", [], Limits()) == {}


def test_the_figure_has_a_bar_a_load_in_order_with_bound_peer_and_limit(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "prefill.jsonl") as writer:
        for one in [*a_night(), load(1, 20, judge_load(times(5.0, 20), None))]:
            writer.write(one)
    rows = chosen(tmp_path / "prefill.jsonl")
    loads = loads_of(rows)
    assert [one.parameters["tokens"] for one in loads] == [20, 64, 100, 512, 16384]
    drawing = first_tokens(loads, LIMITS, "Rows of a test")
    assert list(drawing.table["prompts"]) == ["1 x 20", "1 x 64", "64 x 100", "1 x 512", "4 x 16384"]
    assert drawing.table["first token, ms"][0] == 5.0, "the last row of a check counts"
    [axes] = drawing.fig.axes
    assert [bar.get_width() for bar in axes.patches] == [5.0, 8.0, 100.0, 14.0, 2400.0]
    dotted = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]  # type: ignore[index]
    assert dotted == [7.0, 7.0, 15.0, 2500.0]
    assert "2.00 of what bytes and products ask for" in drawing.caption
    assert "Plain torch is faster" not in drawing.caption


def test_without_a_gpu_a_measurement_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    path = command.measured(tmp_path, PART, geometry="nano", limit_s=10.0)
    [found] = chosen(path)
    assert found.status == "missing"
    assert "torch sees none" in (found.reason or "")
    exp = Experiment("44_prefill", "run", "job", tmp_path / "gates", {}, environment.collect())
    write_gates(exp, [found], LIMITS)
    [gate] = exp.gates
    assert (gate["name"], gate["passed"]) == ("first token of prompts", None)
    assert "torch sees none" in str(gate["detail"])
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "proof"
