"""The named suites, the second backend under the same record, and what stands beside them in notebook 41_bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab import cli
from lab.errors import ExperimentError
from lab.options.bench import CONTEXTS, DRAFTS, ScenariosOptions
from lab.probes.bench import view
from lab.probes.bench.run import Bench
from lab.probes.bench.scenario import Point
from lab.probes.bench.source import PairSource
from lab.probes.bench.suite import SUITES
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference

RECORD_BLOCKS = {"latency_ms_per_token", "throughput_tokens_per_sec", "memory_gb", "total_runs", "scenario", "system"}


def test_the_suites_are_those_of_the_requirement() -> None:
    assert list(SUITES) == ["baseline", "single", "batch", "large-context", "stress"]
    points = {name: [str(point) for point in one.points(CONTEXTS)] for name, one in SUITES.items()}
    assert points["single"] == ["8192x1", "16384x1", "32768x1"]
    assert points["batch"] == ["8192x4", "16384x4"]
    assert points["large-context"] == points["stress"] == ["32768x1", "65536x1"]
    assert SUITES["stress"].cache_shares == (0.75, 0.9)
    assert not SUITES["baseline"].is_speculative
    assert DRAFTS == (2, 3, 4, 5)
    assert SUITES["single"].points(CONTEXTS)[2].name(3) == "Speculative_Single_Context32K_3tokens"


def test_what_is_no_suite_context_depth_or_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        ["--suites", "single,huge"], ["--contexts", "64,32"], ["--contexts", "x"], ["--contexts", ""],
        ["--spec", "0,2"], ["--spec", "2,9"],
    ):  # fmt: skip
        with pytest.raises(ExperimentError, match=f"{options[0]} is "):
            cli.parsed(["scenarios", *options])
    monkeypatch.setenv("EAGLE3_MEASUREMENT_RUNS", "many")
    with pytest.raises(ExperimentError, match="EAGLE3_MEASUREMENT_RUNS='many'"):
        cli.parsed(["scenarios"])
    _, options = cli.parsed(["scenarios", "--rounds", "3"])
    assert isinstance(options, ScenariosOptions)
    assert options.rounds == 3, "what is typed beats the variable"


@pytest.mark.slow
def test_suites_of_the_environment_run_on_a_cpu_and_write_rows_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE3_SCENARIOS", "baseline,stress")
    monkeypatch.setenv("EAGLE3_MEASUREMENT_RUNS", "1")
    out, records = tmp_path / "rows.jsonl", tmp_path / "records.json"
    options = ["--contexts", "16,20,24", "--spec", "2", "--tokens", "16", "--device", "cpu", "--geometry", "nano"]
    assert cli.run(["scenarios", *options, "--out", str(out), "--records", str(records)]) == 0
    rows = read_rows(out)
    names = [(row.parameters["suite"], row.name, row.parameters.get("cache_share")) for row in rows]
    assert names == [
        *(("baseline", f"Baseline_Single_Context{context}", None) for context in (16, 20, 24)),
        *(("stress", f"{name}_Single_Context24{tail}", share) for share in (0.75, 0.9)
          for name, tail in (("Baseline", ""), ("Speculative", "_2tokens"))),
    ]  # fmt: skip
    assert {row.repeats for row in rows} == {1}
    for record in json.loads(records.read_text()):
        assert record.keys() >= RECORD_BLOCKS
        assert ("eagle_speculation" in record) == (record["scenario"]["num_spec_tokens"] > 0)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing"] == []


@pytest.mark.slow
def test_a_stopped_run_keeps_its_points_and_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "rows.jsonl", []
    options = ["--suites", "single", "--contexts", "16,20,24", "--spec", "2", "--tokens", "16", "--device", "cpu"]
    options += ["--geometry", "nano", "--rounds", "1", "--out", str(out)]
    measure = Bench.measure

    def stopped(bench: Bench, source: PairSource, point: Point, gb_per_s: float) -> None:
        asked.append(point.context)
        if asked == [16, 20]:
            raise KeyboardInterrupt
        measure(bench, source, point, gb_per_s)

    monkeypatch.setattr(Bench, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        cli.run(["scenarios", *options])
    first = out.read_bytes()
    assert [row.parameters["context"] for row in read_rows(out)] == [16, 16]
    assert cli.run(["scenarios", *options]) == 0
    assert asked == [16, 20, 20, 24]
    assert out.read_bytes().startswith(first)
    assert [row.parameters["context"] for row in read_rows(out)] == [16, 16, 20, 20, 24, 24]
    last = capsys.readouterr().out.splitlines()
    assert "single 16x1, caches 95%: measured before" in last
    assert json.loads(last[-1])["n_rows"] == 6
    assert cli.run(["scenarios", *options[:-4], "--rounds", "2", "--out", str(out)]) == 0
    assert asked == [16, 20, 20, 24, 16, 20, 24], "other rounds are another measurement"


@pytest.mark.slow
def test_transformers_generate_look_up_and_assisted_fill_the_same_record_and_agree_on_the_tokens() -> None:
    torch.set_num_threads(1)
    found = view.with_hf(None, context=96, tokens=24, rounds=1, device="cpu")
    assert [row.name.rpartition("/")[2] for row in found.rows] == ["hf-generate", "hf-prompt-lookup", "hf-assisted"]
    plain, *others = found.rows
    assert plain.values["n_steps"] == 23
    assert not [name for name in plain.values if name.startswith("eagle_speculation")]
    for row in others:
        of = row.values
        assert {name.partition(".")[0] for name in of} >= RECORD_BLOCKS - {"total_runs"}
        assert of["n_divergent"] == 0
        length = of["eagle_speculation.mean_acceptance_length"]
        assert length == pytest.approx(of["acceptance_length"])
        assert 1.0 <= length <= 4.0
        assert of["n_steps"] < plain.values["n_steps"], "a pass commits more than one token somewhere"


def test_the_committed_rows_of_the_gpu_are_drawn_beside_the_numbers_of_r131_under_their_own_machines() -> None:
    bench = view.chosen(None)
    assert bench is not None
    table = view.rates_table(bench)
    beside = view.earlier_table(table, bench.machine)
    other = beside[beside["machine"].str.startswith("another GPU")]
    assert len(other) == 3 + 5 + 5
    assert other[(other["context"] == 32768) & (other["spec_k"] == 3)]["tokens_per_s"].item() == 111.6
    ours = beside[beside["machine"] == bench.machine]
    assert ours[ours["spec_k"] == 0]["against_plain"].eq(1.0).all()
    figure, *_ = view.beside_earlier(beside, "stored")
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert any(str(label).startswith("another GPU") for label in labels)
    assert any(bench.machine in str(label) for label in labels)


def test_speed_beside_others_is_that_of_the_rows_and_an_implementation_keeps_its_colour() -> None:
    bench = view.chosen(None)
    assert bench is not None
    table = view.rates_table(bench)
    ours = view.earlier_table(table, bench.machine).query("machine == @bench.machine and spec_k > 0")
    known = {row.values.get("speedup") for row in bench.rows if row.parameters["who"] == "engine"}
    assert ours["against_plain"].dropna().isin(known).all()
    assert ours["against_plain"].notna().any()
    colours = []
    for shown in (table, table[table["who"] != "plain-torch"]):
        handles, labels = view.rates(shown, "stored").fig.axes[0].get_legend_handles_labels()
        colours.append({label: bars[0].get_facecolor() for label, bars in zip(labels, handles, strict=True)})
    assert len(colours[0]) > len(colours[1]) > 0
    assert all(colours[0][who] == colour for who, colour in colours[1].items())


def test_rows_of_two_machines_are_no_one_picture(tmp_path: Path) -> None:
    bench = view.chosen(None)
    assert bench is not None
    lines = [bench.rows[0].line(), bench.rows[1].model_copy(update={"environment": "another"}).line()]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    with pytest.raises(Exception, match="another"):
        view.chosen(tmp_path / "rows.jsonl")
