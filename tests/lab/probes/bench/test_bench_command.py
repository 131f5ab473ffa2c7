"""The bench: peers that decode the same tokens, rows that say what is missing and why, and what is asked of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_bench import SCENARIO, K, rows_by_name

from lab import cli
from lab.errors import ExperimentError
from lab.options.bench import BenchOptions, PlantedOptions
from lab.options.values import Point, read_depths, read_points
from lab.pairs.planted import GEOMETRIES
from lab.probes.bench import command, dial, memory
from lab.probes.bench import run as bench_run
from lab.probes.bench.record import record_of
from lab.probes.bench.results import agreement, line_of, wrong_tokens
from lab.probes.bench.run import Bench
from lab.rows.history import metrics_of
from lab.rows.store import Row, read_rows

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """One bench over a point, both depths, all peers."""
    return Bench(SCENARIO, tell=lambda _: None).run().rows


def test_a_bench_writes_a_row_for_every_depth_and_every_peer(rows: list[Row]) -> None:
    names = [row.name for row in rows]
    assert names == [
        "Baseline_Batch2_Context20",
        "Speculative_Batch2_Context20_3tokens",
        "Baseline_Batch2_Context20/plain-torch",
        "Speculative_Batch2_Context20_3tokens/plain-torch",
        "Baseline_Batch2_Context20/hf-static",
    ]
    for row in rows:
        assert row.status == "measured", row.reason
        assert row.values["n_wrong_requests"] == 0
        assert row.values["step_ms_median"] > 0  # type: ignore[operator]
        assert row.parameters["pair"] == "planted"


def test_the_record_has_the_blocks_of_a_benchmark_and_none_about_speculation_for_the_baseline(rows: list[Row]) -> None:
    found = rows_by_name(rows)
    base = record_of(found["Baseline_Batch2_Context20"])
    spec = record_of(found["Speculative_Batch2_Context20_3tokens"])
    assert "eagle_speculation" not in base
    block = spec["eagle_speculation"]
    assert block["enabled"] is True
    for key in ("num_drafts", "total_draft_tokens", "total_accepted_tokens", "mean_acceptance_rate"):
        assert block[key] > 0
    assert block["mean_acceptance_length"] == pytest.approx(1 + block["mean_accepted_draft_tokens"])
    assert 0 <= block["fraction_steps_ge_2"] <= 1
    for record, k in ((base, 0), (spec, K)):
        for name in ("latency_ms_per_token", "throughput_tokens_per_sec"):
            values = record[name]["values"]
            assert len(values) == record["total_runs"] == SCENARIO.rounds
            assert record[name]["min"] == min(values)
            assert record[name]["max"] == max(values)
            assert record[name]["mean"] == pytest.approx(sum(values) / len(values))
        latency, rate = record["latency_ms_per_token"]["values"][0], record["throughput_tokens_per_sec"]["values"][0]
        assert latency * rate == pytest.approx(2 * 1e3), "two sequences"
        assert set(record["memory_gb"]) == {"mean", "max", "utilization_pct"}
        assert record["scenario"] == {
            "name": Point(20, 2).name(k), "batch_size": 2, "context_length": 20, "max_new_tokens": 24,
            "use_speculation": k > 0, "num_spec_tokens": k, "perf_mode": False, "micro_run": True,
        }  # fmt: skip
        assert {"gpu_name", "gpu_memory_total_gb", "timestamp", "build_id"} <= set(record["system"])


def test_a_row_holds_its_floor_its_bound_its_stages_and_its_peers(rows: list[Row]) -> None:
    values = rows_by_name(rows)["Speculative_Batch2_Context20_3tokens"].values
    base = rows_by_name(rows)["Baseline_Batch2_Context20"].values
    assert values["share_of_floor"] == pytest.approx(values["floor_ms"] / values["step_ms_median"])  # type: ignore[operator]
    ratios = zip(values["step_ms_samples"], base["step_ms_samples"], strict=True)  # type: ignore[arg-type]
    assert values["step_over_base_samples"] == pytest.approx([ours / plain for ours, plain in ratios])
    assert values["step_over_base_bound"] > 1  # type: ignore[operator]
    assert values["over_plain-torch"] > 0  # type: ignore[operator]
    assert "over_hf-static" in base
    peer = rows_by_name(rows)["Speculative_Batch2_Context20_3tokens/plain-torch"].values
    a_second = 2 * peer["tokens_per_step"] / peer["step_ms_median"] * 1e3  # type: ignore[operator]
    assert peer["decode_tokens_per_s"] == pytest.approx(a_second), "of two sequences"
    assert values["is_complete"] is True
    assert values["n_divergent"] == 0
    stages = {name for name in values if name.startswith("stage_ms.")}
    assert {"stage_ms.draft.fc", "stage_ms.target.attn", "stage_ms.accept"} <= stages
    assert "stage_ms.draft.fc" not in base
    compared = {metric.name for metric in metrics_of(rows_by_name(rows)["Speculative_Batch2_Context20_3tokens"])}
    assert {"decode_tokens_per_s", "speedup", "acceptance_length"} <= compared
    assert not any(name.startswith(("latency", "scenario", "step_ms")) for name in compared)


def test_what_does_not_fit_is_missing_with_the_plan_and_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Any) -> Any:
        raise AssertionError("weights were made")

    monkeypatch.setattr(bench_run, "open_pair", never)
    monkeypatch.setattr(memory, "device_bytes", lambda _: 141 * 10**9)
    large = replace(SCENARIO, geometry="llama-3.1-70b", points=(Point(512, 1),), dtype="bfloat16")
    rows = Bench(large, tell=lambda _: None).run().rows
    assert len(rows) == 5
    for row in rows:
        assert row.status == "missing"
        assert "weights 134." in str(row.reason)
        assert "the device has 131.32 GiB" in str(row.reason)


@pytest.mark.slow
def test_peers_without_room_leave_the_engines_rows_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = GEOMETRIES["nano"]
    plan = memory.plan(
        geometry.target, geometry.draft, ks=(0, K), batch=2, session_len=20 + 24 + 64, itemsize=4, n_peers=3,
        device=torch.device("cpu"),
    )  # fmt: skip
    monkeypatch.setattr(memory, "device_bytes", lambda _: plan.weight_bytes + plan.kv_bytes + plan.peer_bytes - 1)
    rows = Bench(SCENARIO, tell=lambda _: None).run().rows
    assert [row.status for row in rows] == ["measured", "measured", "missing", "missing", "missing"]
    assert all("does not fit" in str(row.reason) for row in rows[2:])
    assert rows[0].values["is_complete"] is False
    assert len(rows[0].values["incomplete"]) == 3  # type: ignore[arg-type]


def test_a_plan_counts_weights_caches_and_peers() -> None:
    geometry = GEOMETRIES["llama-3.1-8b"]
    cpu = torch.device("cpu")
    given: dict[str, Any] = {"ks": (0, 3), "batch": 4, "session_len": 16384, "itemsize": 2, "device": cpu}
    plan = memory.plan(geometry.target, geometry.draft, n_peers=3, **given)
    assert plan.weight_bytes / 1e9 == pytest.approx(16.06 + 0.849, abs=0.01)
    # Each engine keeps 4 sequences of 16448 tokens at 131072 bytes, the speculative one 4096 bytes more for the draft.
    assert plan.kv_bytes == 4 * 16448 * (131072 * 2 + 4096)
    assert plan.peer_bytes == plan.weight_bytes + 3 * 4 * 16384 * (131072 + 4096)
    assert memory.plan(geometry.target, geometry.draft, n_peers=0, **given).peer_bytes == 0


def test_wrong_tokens_are_said_aloud() -> None:
    values = {"step_ms_median": 1.0, "share_of_floor": 0.9, "n_divergent": 2, "n_wrong_requests": None}
    assert "2 requests unlike the baseline's" in line_of("x", values)
    assert wrong_tokens({"n_divergent": 0, "n_wrong_requests": 1})
    assert wrong_tokens({"n_divergent": 0, "n_wrong_requests": None}) == ""


def test_a_peer_far_from_what_is_known_of_it_says_so() -> None:
    assert agreement(5.8, 5.69, "flash")["agrees_with_known"] is True
    slow = agreement(7.0, 5.69, "math, grouped heads")
    assert slow["agrees_with_known"] is False
    assert "math, grouped heads" in slow["why_not"]
    assert agreement(5.0, 5.69, "flash")["agrees_with_known"] is False, "faster than can be"


# -- options


def test_points_and_depths_are_read_and_named() -> None:
    assert read_points("512x1, 16384x4") == (Point(512, 1), Point(16384, 4))
    assert read_depths("3,0,1") == (0, 1, 3)
    assert Point(32768, 1).name(3) == "Speculative_Single_Context32K_3tokens"
    assert Point(16384, 4).name(0) == "Baseline_Batch4_Context16K"
    for text in ("512", "1x1", "512x0", "axb"):
        with pytest.raises(ExperimentError, match="CONTEXTxBATCH"):
            read_points(text)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"pair": "trained"}, "pair is 'trained'"),
        ({"pair": "shipped"}, "the shipped pair at geometry 'nano'"),
        ({"ks": (1, 3)}, "depths"),
        ({"ks": (0, 8)}, "depths"),
        ({"tokens": 8}, "8 tokens"),
        ({"tokens": 15}, "15 tokens"),
        ({"rounds": 0}, "0 rounds"),
        ({"warmup": -1}, "-1 warm-up rounds"),
        ({"sustained": -1}, "-1 steps without a rest"),
        ({"peers": ("vllm",)}, "no peer 'vllm'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ExperimentError, match=what):
        replace(SCENARIO, **changes)


def test_the_commands_write_rows_and_refuse_what_they_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, records = tmp_path / "rows.jsonl", tmp_path / "records.json"
    options = ["--at", "8x1", "--tokens", "16", "--rounds", "1", "--warmup", "0", "--peers", "none"]
    # The default tokens a step cannot be reached with one draft, so it is the most that can.
    code = cli.main(["bench", *options, "--spec", "0,1", "--out", str(out), "--records", str(records)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert last["wrong_tokens"] == []
    assert [row.name for row in read_rows(out)] == [record["name"] for record in json.loads(records.read_text())]
    assert cli.main(["planted", "--steps", "120", "--at", "4x8", "--share", "1", "--out", str(out)]) == 0
    assert [row.name for row in read_rows(out)][-2:] == ["margin", "dial"]
    capsys.readouterr()
    for arguments in (
        ["bench", "--share", "0.5", "--acceptance-length", "3"],
        ["bench", "--acceptance-length", "9"],
        ["planted", "--share", "2"],
        ["bench", "--spec", "x"],
    ):
        assert cli.main(arguments) == 2
        assert "\n  allowed: " in capsys.readouterr().err


def test_a_planted_pair_of_one_draft_needs_no_length_and_one_that_nothing_was_asked_of_is_not_called_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dial.scenario_of(PlantedOptions(spec=1)).share == pytest.approx(1.0)
    assert dial.scenario_of(PlantedOptions(spec=1, acceptance_length=1.5)).share == pytest.approx(0.5)
    on_cpu = ["planted", "--steps", "0", "--device", "cpu", "--dtype", "float32"]
    assert cli.main(on_cpu) == 3, "fp32 has no margin, so nothing was judged"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"] is None
    assert cli.main([*on_cpu, "--write", str(tmp_path / "pair")]) == 0, "only writing was asked"


def test_points_that_were_done_stay_when_the_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench: Bench, source: object, point: Point, gb_per_s: float) -> None:
        bench.rows.missing(point.name(0), "half of it was made", bench.parameters(point, 0, "engine"))
        if point.batch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(bench_run, "read_ceiling", lambda device: 10.0)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        command.run(BenchOptions(at="24x1,24x2", spec="0", device="cpu", out=out))
    assert [row.name for row in read_rows(out)] == ["Baseline_Single_Context24"], "the first, and nothing half made"
