"""A sweep from shapes to entries: on the CPU twin for real, and on stored rows for what goes wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import ROOT
from stored_sweeps import ABOUT, DEFAULT, FASTER, HOT, SLOWER, screen, stored, write_rows

from eagle3core.errors import ConfigError
from eagle3core.kernels import tuned
from eagle3core.kernels.gemm.tiling import ruled_tiling
from eagle3core.step.gemm_audit import write_shapes
from lab.cli import main
from lab.errors import ExperimentError, NotComparable, RunFailed
from lab.options.values import read_points
from lab.probes.bench.scenario import Scenario
from lab.probes.sweeps import command as command_of_sweeps
from lab.probes.sweeps import measure
from lab.probes.sweeps.bake import bake, faults_of
from lab.probes.sweeps.choose import choose_all
from lab.probes.sweeps.confirm import Contender, MicroRuns
from lab.probes.sweeps.machines import TwinMachine
from lab.probes.sweeps.measure import Sweep
from lab.probes.sweeps.regimes import (
    TINY,
    attention_regimes,
    gemm_regimes,
    load_shapes,
)
from lab.probes.sweeps.rows import MICRO, SweepWriter, read_sweep

pytestmark = pytest.mark.reference


def test_one_command_sweeps_logged_shapes_bakes_entries_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_file: None
) -> None:
    shapes, out, baked = tmp_path / "shapes.json", tmp_path / "rows.jsonl", tmp_path / "tuned.json"
    write_shapes(shapes, {HOT: 1})
    command = ["sweep", "gemm", "--shapes", str(shapes), "--top", "0", "--device", "cpu", "--out", str(out)]
    assert main([*command, "--bake", str(baked)]) in (0, 4)  # 4: times of an emulator may not decide anything
    rows = read_sweep(out).cells
    screened = [row for row in rows if row["phase"] == "screen"]
    assert len(screened) == 3
    assert all(row["bits_equal"] and row["time_us"] > 0 for row in screened)
    assert [row["setting"] for row in screened if row["is_default"]] == [asdict(ruled_tiling("sm_90a", 3, 2, 256))]
    artifact = tuned.read_artifact(baked)
    assert (artifact.gpu, artifact.n_entries) == ("CPU twin", 1)
    assert HOT.key in artifact.settings["gemm"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["regimes"] == 1
    main(command)
    assert len(read_sweep(out).cells) == len(rows)


def test_the_tuned_file_is_of_the_architecture_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_file: None
) -> None:
    write_shapes(tmp_path / "shapes.json", {HOT: 1})
    out, baked = write_rows(tmp_path / "rows.jsonl", stored()), tmp_path / "tuned.json"
    machine = SimpleNamespace(**ABOUT, arch="sm_80")
    monkeypatch.setattr(command_of_sweeps, "machine_of", lambda device: machine)
    monkeypatch.setattr(Sweep, "run", lambda self, regimes: True)
    main(["sweep", "gemm", "--shapes", str(tmp_path / "shapes.json"), "--out", str(out), "--bake", str(baked)])
    assert json.loads(baked.read_text())["arch"] == "sm_80"


def test_a_resumed_run_writes_no_contender_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SweepWriter(write_rows(tmp_path / "rows.jsonl", stored()), **ABOUT)
    [at] = read_points("32x1")
    runs = MicroRuns(writer, "gemm", "sm_80", Scenario("nano", "planted", (at,), (0, 3), 0.8), tell=lambda line: None)
    values = {"time_us": 1.0, "tokens_per_s": 1.0, "acceptance_length": 1.0, "n_wrong": 0}
    monkeypatch.setattr(MicroRuns, "_work", lambda *_: SimpleNamespace(run=None))
    monkeypatch.setattr(MicroRuns, "_values", lambda *_: values)
    monkeypatch.setattr("lab.probes.sweeps.confirm.interleave", lambda works, **_: works)
    found = [Contender(rank, {}) for rank in range(3)]
    writer.write(runs._cell(at, found[0]), is_default=True, **values)
    runs._measure(None, at, found)  # type: ignore[arg-type]
    ranks = [cell["setting"]["rank"] for cell in read_sweep(writer.path).cells if cell["phase"] == MICRO]
    assert ranks == [0, 1, 2]


def test_settings_with_other_bits_are_never_chosen_and_fail_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [screen(DEFAULT, 10.0), screen(FASTER, 5.0, bits_equal=False)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert main(["sweep", "gemm", "--rows", str(path), "--bake", str(tmp_path / "tuned.json")]) == 1
    assert "keeps the default" in capsys.readouterr().out
    [entry] = json.loads((tmp_path / "tuned.json").read_text())["gemm"]
    assert entry["setting"] == asdict(DEFAULT)


def test_other_bits_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_file: None) -> None:
    """A planted fault: one setting's launch leaves a different number behind."""
    honest = measure.launches_of
    [regime] = gemm_regimes("sm_90a", {HOT: 1}, 0)
    default, *_, wrong = (setting["stages"] for setting in regime.settings)
    assert wrong != default

    def planted(op: str, arch: str, case: Any, inputs: Any, outputs: Any, setting: Any, scratch: Any) -> Any:
        if setting["stages"] == wrong:
            inputs = {**inputs, "x": inputs["x"] * 1.01}
        return honest(op, arch, case, inputs, outputs, setting, scratch)

    monkeypatch.setattr(measure, "launches_of", planted)
    machine = TwinMachine()
    writer = SweepWriter(tmp_path / "rows.jsonl", machine.gpu, machine.timer)
    Sweep(machine, writer)._screen(regime, regime.cases[0])
    equal = {row["setting"]["stages"]: row["bits_equal"] for row in writer.cells}
    assert equal == {stages: stages != wrong for stages in equal}
    assert False in equal.values()


def test_rows_of_another_gpu_or_timer_are_never_added_to_nor_read_together(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", stored())
    for name in ("gpu", "timer"):
        with pytest.raises(NotComparable) as refused:
            SweepWriter(path, **{**ABOUT, name: "another"})
        assert "'another'" in refused.value.what
        assert refused.value.remedy
        mixed = write_rows(tmp_path / f"{name}.jsonl", [*stored(), screen(SLOWER, 9.5) | {name: "another"}])
        with pytest.raises(NotComparable, match=name):
            read_sweep(mixed)


def test_a_torn_last_line_is_taken_out_and_its_cell_measured_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", stored())
    with path.open("a") as out:
        out.write('{"kind": "swe')
    writer = SweepWriter(path, **ABOUT)
    assert len(writer.cells) == 4
    assert writer.has(stored()[0])
    cell = {name: stored()[0][name] for name in ("op", "phase", "regime", "key", "shape")} | {"setting": {"stages": 1}}
    assert not writer.has(cell)
    writer.write(cell, time_us=1.0)
    assert len(read_sweep(path).cells) == 5
    path.write_text("no json\n" + path.read_text())
    with pytest.raises(RunFailed, match="line 1"):
        read_sweep(path)


def test_rows_beside_another_default_are_not_mixed_with_new_ones(tmp_path: Path, no_file: None) -> None:
    [regime] = gemm_regimes("sm_90a", {HOT: 1}, 0)
    other = screen(SLOWER, 10.0) | {"gpu": TwinMachine.gpu, "timer": TwinMachine.timer}
    writer = SweepWriter(write_rows(tmp_path / "rows.jsonl", [other]), TwinMachine.gpu, TwinMachine.timer)
    with pytest.raises(NotComparable, match="beside the default"):
        Sweep(TwinMachine(), writer).run([regime])


def test_a_baked_entry_holds_against_its_rows_and_an_altered_one_does_not(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", stored())
    sweep = read_sweep(rows)
    choices, missing = choose_all(sweep.cells, "gemm")
    assert missing == {}
    content = bake(tmp_path / "tuned.json", choices, sweep, rows, "sm_90a")
    [entry] = content["gemm"]
    assert entry["setting"] == asdict(FASTER)
    assert (entry["rows"], entry["baked_us"], entry["default_us"]) == ("rows.jsonl", 9.0, 10.0)
    assert faults_of(content, lambda name: sweep.cells) == []
    altered = {**content, "gemm": [{**entry, "setting": asdict(SLOWER)}]}
    assert "not what its rows give" in faults_of(altered, lambda name: sweep.cells)[0]
    slow = {**content, "gemm": [{**entry, "baked_us": 9.5}]}
    assert "further from the best" in faults_of(slow, lambda name: sweep.cells)[0]
    assert "no rows" in faults_of(content, lambda name: [])[0]
    with pytest.raises(NotComparable):
        bake(tmp_path / "tuned.json", choices, sweep, rows, "sm_80")
    entry_with_order = replace(choices[0], setting={"streams": 8})
    with pytest.raises(ConfigError, match="order of sums"):
        bake(tmp_path / "tuned.json", [entry_with_order], sweep, rows, "sm_90a")


def test_every_entry_that_ships_is_what_its_committed_rows_give() -> None:
    for path in sorted(tuned.FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        assert tuned.read_artifact(path).n_entries == len(content.get("gemm", [])) + len(content.get("attention", []))
        assert faults_of(content, lambda name: read_sweep(ROOT / name).cells) == []


@pytest.mark.parametrize(
    "options", [["gemm"], ["gemm", "--out", "x.jsonl", "--device", "cpu"], ["gemm", "--rows", "no"]]
)
def test_a_command_without_what_it_needs_is_refused_in_three_parts(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *options]) == 2
    said = capsys.readouterr().err
    assert "allowed:" in said
    assert "do:" in said


def test_shapes_of_an_engine_are_logged_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shapes.json"
    assert main(["sweep", "shapes", "--geometry", "nano", "--at", "64x2", "--spec", "0,2", "--out", str(out)]) == 0
    assert "EAGLE3_LM_HEAD_SMALLVOC" in capsys.readouterr().out
    found = load_shapes(out)
    assert {product.m for product in found if product.tag == "BASE_QKV"} >= {1, 2, 3, 6}
    more = ["--prefill-chunk", "256", "--least-rows", "64", "--out", str(out)]
    assert main(["sweep", "shapes", "--geometry", "nano", "--at", "64x2", "--spec", "0,2", *more]) == 0
    assert {product.m for product in load_shapes(out)} == {64, 128, 256}, "passes over prompts alone"
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ExperimentError, match="holds no shapes"):
        load_shapes(tmp_path / "bad.json")


@pytest.mark.slow
def test_attention_is_swept_with_tiles_orders_and_micro_runs(tmp_path: Path, no_file: None) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["sweep", "fmha", "--device", "cpu", "--out", str(out), "--tile-stats", "--ab", "--orders", "4x2"]
    assert main([*command, "--confirm", "--micro-tokens", "16", "--rounds", "1"]) in (0, 4)
    sweep = read_sweep(out)
    phases = {row["phase"] for row in sweep.cells}
    assert phases >= {"screen", "joint", "tiles", "micro"}
    [tiles] = sweep.of("attention", "tiles")
    assert tiles["tiles"]["total"] == sum(tiles["tiles"][n] for n in ("span_empty", "mask_empty", "executed"))
    [against] = sweep.of("attention", "against")
    assert 0 < against["error"] <= against["allowed"]
    micro = sweep.of("attention", "micro")
    assert len(micro) == 6  # the default and the five that were fastest by themselves
    assert all(row["n_wrong"] == 0 and row["tokens_per_s"] > 0 for row in micro)
    assert len(attention_regimes("sm_90a", TINY)) == 1


def test_attention_unlike_its_plain_reference_fails_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    against = screen(DEFAULT, 10.0) | {"phase": "against", "error": 1.0, "allowed": 0.1, "passes": False}
    path = write_rows(tmp_path / "rows.jsonl", [*stored(), against])
    assert main(["sweep", "gemm", "--rows", str(path)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["unlike_reference"] == 1
