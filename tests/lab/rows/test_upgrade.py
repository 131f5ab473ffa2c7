"""Rows of older forms are carried over whole, by a command that shows first and refuses what it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from lab import cli
from lab.probes.gates import history
from lab.probes.kernels.rows import read_bench
from lab.probes.sweeps.rows import read_sweep
from lab.rows.maker import machines_of
from lab.rows.store import SCHEMA, read_rows

pytestmark = pytest.mark.reference

TIMER = "CUDA events around graph replays, warm, settled, in turns"
VERSIONS = {"torch": "2.11.0", "triton": None, "python": "3.12.3", "driver": "580.159.04"}
ABOUT = {"gpu": "NVIDIA H200", "versions": VERSIONS, "commit": "59d4ccbe3a78ae94941c27499ed4f1fa91877362"}
CLOCKS = {"clocks.sm": "1980 MHz", "clocks.mem": "3201 MHz", "power.draw": "143.93 W", "temperature.gpu": "[N/A]"}
TIMES = {"us": 33.75, "us_p10": 33.5, "us_p90": 34.0, "floor_us": 29.25, "bytes": 134236164}
KERNELS: list[dict[str, Any]] = [
    {"kind": "ceiling", "op": "read", "gb_per_s": 4287.5, "clocks": CLOCKS, **ABOUT, "timer": TIMER},
    {"kind": "proof", "op": "attention", "cases": 11, "of": 12, "faults": [], "verdict": "passed", **ABOUT,
     "timer": TIMER},
    {"kind": "kernel", "op": "attention", "shape": {"dtype": "bf16", "dim": 128, "prefix": [0]}, **TIMES,
     "flops": 536870912, "dependent_passes": 2, "peer": "sdpa.cudnn", "peer_us": 38.125,
     "peers": {"sdpa.flash": 47.25, "sdpa.cudnn": 38.125}, "missing_peers": {"flex": "at 1 token"},
     "predicted_us": 35.5, "quoted_us": {"flashinfer, another run": 41.5}, "clocks": {"unknown": "no answer"},
     "status": "incomplete", **ABOUT, "timer": TIMER},
]  # fmt: skip
CELL = {
    "kind": "sweep", "op": "gemm", "regime": "bf16 rows<=8", "key": {"dtype": "bf16", "rows": 8},
    "shape": {"kind": "store", "m": 4}, "setting": {"kernel": "bulk", "units": 8}, **ABOUT, "timer": TIMER,
}  # fmt: skip
SWEEP: list[dict[str, Any]] = [
    {**CELL, "phase": "screen", "is_default": True, **TIMES, "over_default": 1.0, "bits_equal": True,
     "tags": ["BASE_QKV"], "count": 705, "clocks": CLOCKS},
    {**CELL, "phase": "decide", "is_default": False, "us": 54.5, "default_us": 54.75,
     "default": {"kernel": "ring", "units": 4}, "ratios": [0.9896, 1.0008], "clocks": CLOCKS},
    {**CELL, "phase": "micro", "key": {}, "setting": {"rank": 0}, "us": 5272.5, "us_samples": [5272.25, 5273.5],
     "is_default": True, "tokens_per_s": 534.5, "acceptance_length": 2.8, "n_wrong": 0},
]  # fmt: skip
SANITIZER: list[dict[str, Any]] = [
    {"kind": "sanitizer", "op": "gemm", "tool": "racecheck", "verdict": "followed", "cases": 3, "launches": 17,
     "in_form": 5, "errors": None, "hazards": 0, "warnings": 2, "seconds": 5.9, "reasons": ["why"], **ABOUT},
]  # fmt: skip
GATES: list[dict[str, Any]] = [
    {"time": "2026-11-22T01:24:41.147+00:00", "mode": "micro", "result": "red", "code": "6eb13d371c69",
     "config": "576450b3a2f2", "gpu": "NVIDIA H200", "geometry": "llama-3.1-8b", "why": ["speed-up"]},
]  # fmt: skip
ROW_1 = {
    "schema_version": 1, "run": "r", "job": "j", "notebook": "n", "kind": "kernel", "name": "gemm",
    "values": {"time_us": 1.5, "worst": "NaN"}, "parameters": {"shape": "m=1"}, "status": "measured", "reason": None,
    "timer": "cuda graph replay", "warmup": None, "repeats": None, "environment": "2f70b88b2734",
    "recorded_at": "2026-11-22T01:24:46.440+00:00",
}  # fmt: skip
ALL = {"kernels": KERNELS, "sweep_gemm": SWEEP, "sanitizer": SANITIZER, "gates": GATES, "rows": [ROW_1]}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with a file of each older form, and what is no file of rows."""
    for name, lines in ALL.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "progress.jsonl").write_text('{"event": "say"}\n')
    return tmp_path


def leaves(value: Any) -> Iterator[Any]:
    """Every value inside, and every name of a block."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner) if key != "record" else leaves(json.loads(inner[0]))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield repr(value)


def test_without_write_the_changes_are_told_and_no_file_changes(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in stored.iterdir()}
    assert cli.main(["rows", "upgrade", str(stored)]) == 0
    out = capsys.readouterr().out
    assert {path: path.read_bytes() for path in stored.iterdir()} == before
    assert "kernels.jsonl: 3 lines -> 4 rows" in out
    assert f"3 x cell of a sweep -> row of kind sweep_cell, schema {SCHEMA}" in out
    assert "1 x timer 'cuda graph replay' -> 'cuda_graph/1'" in out
    assert json.loads(out.splitlines()[-1]) == {
        "command": "rows upgrade", "files": 5, "changed": 5, "state": "to be written with --write",
    }  # fmt: skip
    assert str(stored) not in out


def test_every_value_of_every_older_form_is_in_the_rows_it_becomes(stored: Path) -> None:
    assert cli.main(["rows", "upgrade", str(stored), "--write"]) == 0
    shown_otherwise = {TIMER, "cuda graph replay", "1980 MHz", "3201 MHz", "143.93 W", "incomplete"}
    shown_otherwise |= {"kernel", "proof", "sweep"}  # the words that told lines apart
    for name, lines in ALL.items():
        text = (stored / f"{name}.jsonl").read_text()
        new = [json.loads(line) for line in text.splitlines()]
        kept = set(leaves(new))
        for line in lines:
            lost = {leaf for leaf in leaves(line) if leaf not in kept} - set(map(repr, shown_otherwise))
            assert lost <= ({"1"} if name == "rows" else set()), (name, lost)  # the schema's number
        assert all(row["schema_version"] == SCHEMA for row in new)
    before = {path: path.read_bytes() for path in stored.iterdir()}
    assert cli.main(["rows", "upgrade", str(stored), "--write"]) == 0
    assert {path: path.read_bytes() for path in stored.iterdir()} == before, "a second time nothing changes"


def test_carried_over_rows_are_read_by_those_who_read_new_ones(stored: Path) -> None:
    assert cli.main(["rows", "upgrade", *(str(path) for path in stored.glob("[kgs]*.jsonl")), "--write"]) == 0
    bench = read_bench(stored / "kernels.jsonl")
    assert (bench.gpu, bench.gb_per_s, bench.drivers) == ("NVIDIA H200", 4287.5, ["580.159.04"])
    [cell] = bench.cells
    assert (cell.us, cell.is_complete, cell.timer) == (33.75, False, "cuda_graph/1")
    assert cell.shape == KERNELS[2]["shape"]
    assert (cell.peers, cell.quoted) == (KERNELS[2]["peers"], KERNELS[2]["quoted_us"])
    sweep = read_sweep(stored / "sweep_gemm.jsonl")
    assert [one["phase"] for one in sweep.cells] == ["screen", "decide", "micro"]
    assert all(one["shape"] == CELL["shape"] for one in sweep.cells)
    assert sweep.cells[1]["default"] == {"kernel": "ring", "units": 4}
    [run] = history.read(stored / "gates.jsonl")
    assert isinstance(run, history.Entry)
    assert (run.time, run.mode, run.result, run.why) == (GATES[0]["time"], "micro", "red", ("speed-up",))
    [sanitized] = [row for row in read_rows(stored / "sanitizer.jsonl") if row.kind == "sanitizer"]
    assert (sanitized.environment, sanitized.recorded_at) == ("unknown", None)
    [machine] = machines_of(read_rows(stored / "sanitizer.jsonl")).values()
    assert (machine.commit, machine.python, machine.cpu) == (ABOUT["commit"], "3.12.3", None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"kind": "wonder", "op": "x"}', "no known form has the keys kind, op"),
        ("[]", "not a JSON object"),
        ('{"kind": "ker', "Unterminated string"),
        (json.dumps({**KERNELS[0], "surprise": 1}), "a ceiling of the kernels' benchmark has no surprise"),
        (json.dumps({**KERNELS[2], "status": "wonder"}), "neither 'measured' nor 'incomplete'"),
        (json.dumps({**ROW_1, "surprise": 1}), "surprise"),
    ],
)
def test_what_is_not_known_is_refused_in_three_parts_and_nothing_is_written(
    stored: Path, line: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (stored / "sanitizer.jsonl").open("a") as out:
        out.write(line)
    before = {path: path.read_bytes() for path in stored.iterdir()}
    assert cli.main(["rows", "upgrade", str(stored), "--write"]) == 2
    said = capsys.readouterr().err
    assert "line 2 of sanitizer.jsonl cannot be carried over" in said
    assert why in said
    assert "allowed:" in said
    assert "do: mend or remove that line" in said
    assert {path: path.read_bytes() for path in stored.iterdir()} == before


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rows", "upgrade", str(tmp_path / "none.jsonl")]) == 2
    assert "neither a file nor a folder" in capsys.readouterr().err


def test_every_committed_row_is_of_todays_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rows", "upgrade", str(ROOT / "reports" / "reference")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["changed"] == 0
