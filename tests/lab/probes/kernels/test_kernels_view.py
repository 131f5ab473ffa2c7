"""`eagle3lab kernels`, its rows, and `22_kernels`: what was not measured is said to be missing, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from eagle3core.kernels import registry
from eagle3core.kernels.card import ARCHES, Card, case_id
from lab import cli
from lab.errors import ExperimentError, NotComparable, RunFailed
from lab.night import experiment
from lab.probes.kernels import cards, command, pictures, records
from lab.probes.kernels.measure import measured
from lab.probes.kernels.occupancy import occupancy
from lab.probes.kernels.on_cpu import CompiledVariant, compiled, emulated_error
from lab.probes.kernels.rows import plain_shape, read_bench
from lab.rows import environment
from lab.rows.gpus import Gpu
from lab.rows.maker import RowMaker
from lab.rows.store import ROWS_FILE, Row, block, read_rows

pytestmark = [pytest.mark.reference, pytest.mark.usefixtures("page_style")]

MACHINE = environment.collect().model_copy(
    update={"gpus": [Gpu(name="NVIDIA H200", driver="580.1")], "commit": "0123456789abcdef"}
)
MAKER = RowMaker("run", "kernels", MACHINE.fingerprint, shared={"gpu": "NVIDIA H200"})


def kernel_row(card: Card, shape: Any, share: float = 0.8, **more: Any) -> Row:
    """A row as the benchmark writes it, with a made-up time."""
    cost = card.cost(shape)
    floor = cost.floor_us(4578.0)
    libraries = {"F.linear": 1.1 * floor / share} if card.name == "gemm" else {}
    values = {
        "time_us": floor / share, "time_us_p10": floor, "time_us_p90": 2 * floor, "floor_us": floor,
        "n_bytes": cost.bytes, "n_flops": cost.flops, "dependent_passes": cost.dependent_passes,
        "is_complete": bool(libraries), **block("libraries_us", libraries), **more,
    }  # fmt: skip
    return MAKER.measured("kernel", card.name, values, block("shape", plain_shape(shape)), timer="cuda_graph/1")


def proof_row(op: str, faults: tuple[str, ...] = (), cases: int = 3) -> Row:
    values = {"verdict": "failed" if faults else "passed", "n_cases": cases, "faults": list(faults)}
    return MAKER.measured("kernel_proof", op, values)


def write(path: Path, *rows: Row, tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row.line() for row in (MAKER.machine(MACHINE), *rows)) + tail)
    return path


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A benchmark's file: two cards timed, one with a failed proof, the others absent."""
    known = registry()
    gemm, rms_norm = known["gemm"], known["rms_norm"]
    rows = [MAKER.measured("ceiling", "read", {"gb_per_s": 4550.0}), proof_row("gemm"), proof_row("rms_norm")]
    rows += [kernel_row(gemm, shape) for shape in gemm.shapes] + [kernel_row(rms_norm, rms_norm.shapes[0], 0.1)]
    rows += [proof_row("rope", ("q: error 1, allowed 0.1",)), MAKER.measured("sweep_cell", "another", {})]
    return write(tmp_path / "h200" / "kernels.jsonl", *rows)


def test_rows_are_read_with_their_machine_and_a_torn_last_line_is_left_out(stored: Path, tmp_path: Path) -> None:
    bench = read_bench(stored)
    assert (bench.gpu, bench.gb_per_s, bench.drivers) == ("NVIDIA H200", 4550.0, ["580.1"])
    assert len(bench.of("gemm")) == len(registry()["gemm"].shapes)
    torn = read_bench(write(tmp_path / "torn.jsonl", proof_row("gemm"), tail='{"kind": "ker'))
    assert torn.proof("gemm")
    assert "cut short" in torn.line()


def test_a_file_that_cannot_be_used_is_refused_with_the_line_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"kernels\.bench --out"):
        read_bench(tmp_path / "none.jsonl")
    with pytest.raises(RunFailed, match=r"line 2 of bad\.jsonl"):
        read_bench(write(tmp_path / "bad.jsonl", tail="{\n"))
    gemm = registry()["gemm"]
    with pytest.raises(RunFailed, match="must be above 0"):
        read_bench(write(tmp_path / "zero.jsonl", kernel_row(gemm, gemm.shapes[0], time_us=0.0)))
    other = proof_row("gemm").model_copy(update={"parameters": {"gpu": "NVIDIA A100"}})
    with pytest.raises(NotComparable, match="one GPU a file"):
        read_bench(write(tmp_path / "two.jsonl", proof_row("gemm"), other))


def test_a_proof_without_cases_or_with_faults_is_no_passed_proof(tmp_path: Path) -> None:
    bench = read_bench(
        write(tmp_path / "k.jsonl", proof_row("gemm", cases=0), proof_row("rope", ("bad",)), proof_row("argmax"))
    )
    passed = {op: bool(proof and proof.passed) for op in ("gemm", "rope", "argmax") for proof in [bench.proof(op)]}
    assert passed == {"gemm": False, "rope": False, "argmax": True}


def test_every_card_is_listed_and_without_rows_every_gpu_ring_is_missing() -> None:
    text = cards.listing(None)
    for name, card in registry().items():
        assert f"\n{name}: {card.equation}" in text
        assert cards.gpu_state(card, None).startswith("missing")
    assert "proven" not in text


def test_measured_proven_failed_and_incomplete_are_told_apart(stored: Path) -> None:
    bench, known = read_bench(stored), registry()
    assert cards.gpu_state(known["gemm"], bench) == (
        f"proven on 3 cases; 80% to 80% of the floor, {len(known['gemm'].shapes)} of {len(known['gemm'].shapes)} "
        "shapes, all beside libraries"
    )
    assert "10% to 10% of the floor, 1 of" in cards.gpu_state(known["rms_norm"], bench)
    assert cards.gpu_state(known["rope"], bench).startswith("FAILED: q: error 1")
    assert cards.gpu_state(known["argmax"], bench).startswith("missing: no proof row; missing: no timed shape")


def test_a_row_whose_libraries_were_not_timed_is_counted_as_incomplete(tmp_path: Path) -> None:
    gemm = registry()["gemm"]
    rows = [proof_row("gemm"), kernel_row(gemm, gemm.shapes[0], is_complete=False)]
    state = cards.gpu_state(gemm, read_bench(write(tmp_path / "k.jsonl", *rows)))
    assert "incomplete: 1 without all libraries" in state


def test_the_command_lists_judges_and_draws(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["kernels", "--rows", str(stored)]) == 0
    assert f"{len(registry())} op cards" in capsys.readouterr().out
    assert cli.main(["kernels", "--rows", str(stored), "--gates"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  rope: numbers and bits proven on the GPU" in out
    assert "held    gemm M <= 8: geometric mean of time over F.linear: 0.909, at most 0.92; 78 cells" in out
    assert cli.main(["kernels", "--rows", str(stored), "--draw", str(tmp_path / "roofline.svg")]) == 0
    assert "prefers-color-scheme:dark" in (tmp_path / "roofline.svg").read_text()
    monkeypatch.setattr(command, "reference_files", list)
    assert cli.main(["kernels", "--gates"]) == 3
    assert cli.main(["kernels", "--draw", str(tmp_path / "none.svg")]) == 2
    assert not (tmp_path / "none.svg").exists()


def test_only_an_op_that_exists_can_be_chosen() -> None:
    assert [card.name for card in cards.named(["rope", "gemm"])] == ["gemm", "rope"]
    with pytest.raises(ExperimentError, match="no op card 'gem'"):
        cards.named(["gem"])


def test_every_shape_of_every_card_survives_its_trip_through_the_rows(tmp_path: Path) -> None:
    for name, card in registry().items():
        path = write(tmp_path / f"{name}.jsonl", *[kernel_row(card, shape) for shape in card.shapes])
        assert f"{len(card.shapes)} of {len(card.shapes)} shapes" in cards.gpu_state(card, read_bench(path))


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared", "blocks", "limit"),
    [
        ("sm_90a", 32, 1024, 0, 2, "registers"),  # 1024 a warp: 16 a partition, 64 warps; the warps' limit is equal
        ("sm_90a", 255, 256, 0, 1, "registers"),  # 8192 a warp, two warps a partition, 8 warps
        ("sm_90a", 64, 128, 64 * 1024, 3, "shared memory"),  # 3 x 65 KB of 228
        ("sm_80", 64, 128, 64 * 1024, 2, "shared memory"),  # 2 x 65 KB of 164
        ("sm_90a", 16, 32, 0, 32, "blocks"),
        ("sm_120", 16, 32, 0, 24, "blocks"),
        ("sm_120", 32, 512, 0, 3, "warps"),  # 48 warps of 16
        ("sm_90a", 40, 128, 0, 12, "registers"),  # 1280 a warp: 12 a partition, 48 warps
    ],
)
def test_occupancy_is_what_the_limits_leave(
    arch: str, registers: int, threads: int, shared: int, blocks: int, limit: str
) -> None:
    found = occupancy(arch, registers=registers, threads=threads, shared_bytes=shared)
    assert found.blocks == blocks
    assert found.limit == limit
    assert found.share == pytest.approx(blocks * -(-threads // 32) / (48 if arch == "sm_120" else 64))


@pytest.mark.emulated
def test_the_error_of_a_card_on_the_twin_stays_below_what_is_allowed() -> None:
    card = registry()["rms_norm"]
    found = emulated_error(card, card.cases[0])
    assert not found.faults
    assert 0 < found.error <= found.allowed
    assert found.case == case_id(card.cases[0])


@pytest.mark.compiled
@pytest.mark.slow
def test_variants_are_compiled_with_registers_and_occupancy_until_the_time_is_over() -> None:
    chosen = cards.named(["gather_rows", "take_rows"])
    found = list(compiled(chosen, ARCHES[1:3], 1000.0))
    assert {(one.op, one.arch) for one in found} == {(card.name, arch) for card in chosen for arch in ARCHES[1:3]}
    for one in found:
        assert not one.missing
        assert not one.faults
        assert 0 < one.registers < 256
        assert one.occupancy
        assert 0 < one.occupancy.share <= 1
    ticks = iter([0.0, 1.0, 9.0])
    late = list(compiled(cards.named(["take_rows"]), ARCHES[1:3], 5.0, clock=lambda: next(ticks)))
    assert [bool(one.missing) for one in late] == [False, True]
    assert "5 s" in late[1].missing


def test_a_benchmark_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RunFailed, match=r"compute capability 8\.0"):
        measured(tmp_path, ["take_rows"], 1.0)


def test_attention_without_a_second_left_is_missing_and_the_rows_before_it_are_kept(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(out: Path, module: str, *_: object) -> None:
        ran.append(module)
        out.write_text(stored.read_text(encoding="utf-8"), encoding="utf-8")

    monkeypatch.setattr("lab.probes.kernels.measure._run", run)
    bench = read_bench(measured(tmp_path, ["gemm", "attention"], 0.5))
    assert ran == ["bench"]
    assert bench.of("gemm")
    exp = experiment.Experiment("22_kernels", "run", "job", tmp_path / "job", {}, environment.collect())
    records.write_measured(exp, cards.named(["attention"]), bench)
    rows = [row for row in read_rows(exp.out / ROWS_FILE) if row.name == "attention"]
    assert [row.status for row in rows] == ["missing", "missing"]
    assert all("limit of" in (row.reason or "") for row in rows)


@pytest.mark.parametrize(("ops", "limits"), [(["gemm", "attention"], (70, 100)), (["gemm"], (100,))])
def test_a_share_of_the_time_is_kept_for_attention(
    ops: list[str], limits: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr("lab.probes.kernels.measure._run", lambda out, module, limit_s, *_: given.append(limit_s))
    measured(tmp_path, ops, 100.0)
    assert given == pytest.approx(limits, abs=1.0)


def test_pictures_come_with_tables_of_every_shape_and_a_missing_bar_has_no_ratio(stored: Path) -> None:
    bench = read_bench(stored)
    fig, table, *_ = pictures.roofline(bench)
    assert len(fig.axes) == 2
    assert len(table) == len(bench.of("gemm")) + 1
    _, bars, *_ = pictures.peers(bench, "gemm")
    assert len(bars) == 28
    assert bars["time_over_library"].tolist() == pytest.approx([1 / 1.1] * 28)
    assert [text.get_text() for text in plt.gcf().legends[0].get_texts()] == ["faster than every library"]
    lost = read_bench(stored)
    lost.cells = [cell for cell in lost.cells if cell.op == "rms_norm"]
    _, bars, *_ = pictures.peers(lost, "rms_norm")
    assert bars["time_over_library"].isna().all()
    there, lost_one = (
        CompiledVariant("a", "v", "sm_80", 40, threads=128),
        CompiledVariant("b", "w", "sm_80", missing="no"),
    )
    fig, found, *_ = pictures.registers([there, lost_one])
    assert found["registers"].isna().tolist() == [False, True]
    assert found["state"].tolist() == ["no faults", "no"]


def test_stored_rows_that_hold_no_measurement_of_a_gate_are_told_apart_from_a_fault(stored: Path) -> None:
    bench = read_bench(stored)
    judged = cards.checks(bench)
    told = cards.unjudged(judged, bench, measured=False)
    assert told.startswith(f"{sum(c.is_must and c.holds is None for c in judged)} of ")
    assert f"{bench.name} holds no measurement" in told
    assert "no fault of this machine, and no pass either" in told
    assert cards.unjudged(judged, bench, measured=True) == "", "rows of this run lack each for a reason of its own"
    assert cards.NO_ROWS in cards.unjudged(cards.checks(None), None, measured=False)


def test_the_notebooks_rows_say_measured_or_missing_for_every_card(stored: Path, tmp_path: Path) -> None:
    exp = experiment.Experiment("22_kernels", "run", "job", tmp_path / "job", {}, environment.collect())
    wanted = cards.named(["gemm", "rope", "argmax"])
    records.write_measured(exp, wanted, read_bench(stored))
    records.write_compiled(exp, wanted, [CompiledVariant("gemm", "g", "sm_80", missing="no compiler")])
    records.write_errors(exp, wanted, 0)
    rows = [row for row in read_rows(exp.out / ROWS_FILE) if row.kind != "environment"]
    states = {(row.kind, row.name, row.status) for row in rows}
    assert ("kernel", "gemm", "measured") in states
    assert ("kernel", "argmax", "missing") in states
    assert ("kernel_proof", "argmax", "missing") in states
    assert {row.values.get("passed") for row in rows if row.kind == "kernel_proof" and row.name == "rope"} == {False}
    assert {(row.name, row.status) for row in rows if row.kind == "kernel_code"} == {
        ("gemm", "missing"),
        ("rope", "not asked"),
        ("argmax", "not asked"),
    }
    assert {(row.name, row.status) for row in rows if row.kind == "kernel_error"} == {
        (name, "not asked") for name in ("gemm", "rope", "argmax")
    }
    exp.finish()


@pytest.mark.slow
def test_the_notebook_draws_stored_rows_with_no_gpu_and_judges_them(stored: Path, tmp_path: Path) -> None:
    settings = [f"rows={stored}", "arches=[]", "emulated_cases=0", 'ops=["gemm", "rope", "argmax"]']
    options = [word for setting in settings for word in ("-p", setting)]
    assert cli.main(["run", "22_kernels", *options, "--out", str(tmp_path / "run")]) == 1
    (job,) = (tmp_path / "run" / "jobs").iterdir()
    assert {path.stem for path in (job / "figures").glob("*.json")} == {"roofline", "libraries-gemm"}
    rows = read_rows(job / ROWS_FILE)
    gates = {row.name: row for row in rows if row.kind == "gate"}
    assert gates["gemm M <= 8: geometric mean of time over F.linear"].values["passed"] is True
    assert gates["rope: numbers and bits proven on the GPU"].values["passed"] is False
    assert gates["argmax: numbers and bits proven on the GPU"].status == "missing"
    assert str(tmp_path) not in (job / ROWS_FILE).read_text()
