"""One maker of rows, one writer, one record of the machine, whoever measures."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

from eagle3core.kernels import registry
from lab.probes.kernels import attention_bench, bench
from lab.probes.kernels.rows import plain_shape, read_bench
from lab.probes.sanitizer import command as sanitizer
from lab.probes.sanitizer.report import CLEAN, Outcome, Summary
from lab.rows import environment
from lab.rows.clock import Timing
from lab.rows.maker import RowMaker, machines_of
from lab.rows.store import RowWriter, read_rows

pytestmark = pytest.mark.reference


def test_a_row_says_where_it_was_made_and_a_missing_one_why() -> None:
    maker = RowMaker("run", "job", "m", shared={"gpu": "a GPU"})
    row = maker.measured("kernel", "gemm", {"time_us": 1.0}, {"m": 3}, timer="cuda_graph/1", warmup=2, repeats=11)
    assert (row.run, row.job, row.notebook, row.environment) == ("run", "job", "job", "m")
    assert row.parameters == {"m": 3, "gpu": "a GPU"}
    assert (row.timer, row.warmup, row.repeats) == ("cuda_graph/1", 2, 11)
    lost = RowMaker("run", "job", "m", notebook="22_kernels").missing("kernel", "gemm", "no GPU")
    assert (lost.status, lost.reason, lost.notebook) == ("missing", "no GPU", "22_kernels")


def test_the_machine_of_each_run_of_a_file_is_known() -> None:
    machine = environment.collect()
    rows = []
    for run, commit in (("a", "1"), ("b", "2")):
        record = machine.model_copy(update={"commit": commit})
        rows += [
            RowMaker(run, "j", machine.fingerprint).machine(record),
            RowMaker(run, "j", "m").measured("k", "n", {}),
        ]
    assert {run: record.commit for run, record in machines_of(rows).items()} == {"a": "1", "b": "2"}


def test_no_file_of_the_lab_makes_or_writes_rows_in_a_way_of_its_own() -> None:
    """Rows are made by `RowMaker` alone, besides the store's own warning, and written by `RowWriter` alone."""
    allowed = {"lab/rows/maker.py", "lab/rows/store.py"}
    offenders = []
    for path in sorted((ROOT / "lab").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "Row" and name not in allowed:
                offenders.append(f"{name}:{node.lineno} makes a row")
            if isinstance(called, ast.Attribute) and called.attr == "line" and "write" in ast.dump(node):
                offenders.append(f"{name}:{node.lineno} writes a row")
    assert not offenders


TIMING = Timing((33.0, 34.0, 35.0), "cuda_graph/1", warmup=4)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark asks of torch before it times anything."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_what_the_benchmark_of_kernels_writes_is_what_is_read(tmp_path: Path, a_gpu: None) -> None:
    path, gemm = tmp_path / "kernels.jsonl", registry()["gemm"]
    with RowWriter(path) as out:
        run = bench.Run(out, "sm_90a", deadline=0.0, only="")
        run.write_kernel(gemm, gemm.shapes[0], TIMING, {"F.linear": 40.0, "cutlass": 38.5})
    with RowWriter(path) as out:
        attention = attention_bench.AttentionRun(out, "sm_90a", deadline=0.0, only="")
        case = attention_bench.CARD.shapes[0]
        attention._row(attention_bench.CARD, case, TIMING, {"sdpa_cudnn": 38.0}, {"flex": "no compiler"})
        assert attention.prove(attention_bench.CARD) == "incomplete", "no time is left for a proof"
    found = read_bench(path)
    [cell], [other] = found.of("gemm"), found.of("attention")
    assert (cell.shape, cell.us, cell.best_peer) == (plain_shape(gemm.shapes[0]), 34.0, "cutlass")
    assert (cell.bytes, cell.is_complete, cell.timer) == (gemm.cost(gemm.shapes[0]).bytes, True, "cuda_graph/1")
    assert (other.peers, other.shape) == ({"sdpa_cudnn": 38.0}, plain_shape(case))
    [proof] = found.proofs
    assert (proof.passed, proof.reason) == (False, "verdict 'incomplete', 0 cases")
    rows = read_rows(path)
    assert [row.kind for row in rows] == ["environment", "kernel", "environment", "kernel", "kernel_proof"]
    assert {row.environment for row in rows} == {environment.collect().fingerprint}
    assert rows[1].values["time_us_samples"] == [33.0, 34.0, 35.0]
    assert (rows[1].warmup, rows[1].repeats) == (4, 3)
    assert rows[3].values["missing_libraries.flex"] == "no compiler"


def test_the_sanitizer_writes_its_machine_once_and_a_row_a_card(tmp_path: Path) -> None:
    out = tmp_path / "sanitizer.jsonl"
    tell = sanitizer._teller(sys.executable, out)
    tell(Outcome("gemm", "memcheck", CLEAN, 5.94, 3, 17, 0, Summary(0)))
    tell(Outcome("rope", "racecheck", CLEAN, 1.0, 1, 2, 0, Summary(0)))
    machine, first, second = read_rows(out)
    assert sanitizer.SANITIZER in machines_of([machine])[machine.run].packages
    assert (first.kind, first.name, first.parameters["tool"]) == ("sanitizer", "gemm", "memcheck")
    assert first.values == {
        "verdict": "clean", "n_cases": 3, "n_launches": 17, "n_in_form": 0, "n_errors": 0, "n_hazards": 0,
        "n_warnings": 0, "took_s": 5.9, "reasons": [],
    }  # fmt: skip
    assert second.run == first.run == machine.run
