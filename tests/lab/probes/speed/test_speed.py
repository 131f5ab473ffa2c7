"""`eagle3lab speed`: groups that fit, rows from a real run, read back, and what the notebook writes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import cli
from lab.errors import ExperimentError, NotComparable
from lab.night import experiment
from lab.options.speed import SpeedOptions, stage_depths
from lab.pairs.planted.tokens import expected_length
from lab.probes.bench import memory
from lab.probes.bench.run import Bench
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.speed import command, records, rows
from lab.probes.speed import measure as speed_measure
from lab.probes.speed.measure import Speed, groups_of
from lab.rows import environment
from lab.rows.store import Row, read_rows

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- groups


def test_depths_that_do_not_fit_together_are_measured_in_groups_with_a_baseline_each() -> None:
    assert groups_of((0, 1, 2, 3), lambda ks: True) == [(0, 1, 2, 3)]
    assert groups_of((0, 1, 2, 3), lambda ks: len(ks) <= 3) == [(0, 1, 2), (0, 3)]
    assert groups_of((0, 1, 2), lambda ks: False) == [(0, 1), (0, 2)], (
        "what does not fit alone is missing with its plan"
    )
    assert groups_of((0,), lambda ks: True) == [(0,)]


# -- the command


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of the smallest geometry, in two groups."""
    path = tmp_path_factory.mktemp("speed") / rows.FILE
    options = ["--geometry", "nano", "--at", "20x2", "--spec", "0,1,3", "--tokens", "24", "--rounds", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speed, "_fits", lambda self, point, ks: len(ks) <= 2)
        assert cli.run(["speed", *options, "--device", "cpu", "--out", str(path)]) == 0
    return path


def test_rows_of_a_run_are_engines_by_group_and_stages(measured: Path) -> None:
    found = read_rows(measured)
    engines = [(row.name, row.parameters["group"]) for row in found if row.kind == "bench"]
    assert engines == [
        ("Baseline_Batch2_Context20", 0), ("Speculative_Batch2_Context20_1tokens", 0),
        ("Baseline_Batch2_Context20", 1), ("Speculative_Batch2_Context20_3tokens", 1),
    ]  # fmt: skip
    stages = [row for row in found if row.kind == "stage"]
    assert {row.parameters["spec_k"] for row in stages} == {0, 3}
    assert {row.notebook for row in found} == {"speed"}
    attn = next(row for row in stages if row.name == "Baseline_Batch2_Context20/target.attn")
    assert attn.values["own_us"] > 0  # type: ignore[operator]
    assert attn.values["floor_us"] > 0  # type: ignore[operator]
    assert attn.values["kernel_us"] is None
    assert attn.values["gap_us"] is None
    assert attn.values["sums_to_step"] is None, "the sum of spans is all that is known of their step"
    assert "missing" in str(attn.values["split"])
    assert not any("stage" in row.parameters for row in found if row.kind == "bench")


@pytest.mark.slow
def test_a_point_that_fails_is_missing_with_its_reason_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = Bench.measure

    def sometimes(self: Bench, source: Any, point: Point, gb_per_s: float) -> None:
        if point.batch == 2:
            raise torch.OutOfMemoryError("no room for two")
        measure(self, source, point, gb_per_s)

    monkeypatch.setattr(Bench, "measure", sometimes)
    out = tmp_path / rows.FILE
    options = ["--at", "20x2,20x1", "--spec", "0,1", "--tokens", "16", "--rounds", "1", "--device", "cpu"]
    assert cli.run(["speed", *options, "--out", str(out)]) == 0
    states = {(row.name, row.kind): row.reason for row in read_rows(out) if row.parameters["batch"] == 2}
    assert states["Speculative_Batch2_Context20_1tokens", "bench"] == "no room for two"
    assert "no step of 1 drafts was timed at 20x2" in str(
        states["Speculative_Batch2_Context20_1tokens/stages", "stage"]
    )
    missing, whole = sorted(rows.read_speed(out).points, key=lambda one: len(one.depths))
    assert not missing.depths
    assert len(missing.missing) == 4
    assert sorted(whole.depths) == [0, 1]


def test_what_cannot_fit_is_missing_with_its_plan_and_no_weights_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(_: Any) -> Any:
        raise AssertionError("weights were made")

    monkeypatch.setattr(speed_measure, "open_pair", never)
    monkeypatch.setattr(memory, "device_bytes", lambda _: 141 * 10**9)
    out = tmp_path / rows.FILE
    scenario = Scenario(
        geometry="llama-3.1-70b", pair="planted", points=(Point(512, 1),), ks=(0, 3), share=0.8, dtype="bfloat16",
        device="cpu", peers=(),
    )  # fmt: skip
    assert command.conclude(command.measure(scenario, (0, 3), out)) == 3
    found = read_rows(out)
    assert [row.status for row in found] == ["missing"] * 2
    assert all("weights 134." in str(row.reason) for row in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which these shapes run")
@pytest.mark.parametrize(
    "line",
    [
        ["speed", "--at", "512x1"], ["bench"], ["scenarios"], ["profile"], ["planted"],
        ["ab", "--plant", "target.mlp/gemm_swiglu"],
    ],
)  # fmt: skip
def test_shapes_of_a_gpu_are_refused_on_a_cpu_before_any_weight_is_made(
    monkeypatch: pytest.MonkeyPatch, line: list[str]
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were made")

    monkeypatch.setattr("lab.pairs.planted.pair.PlantedPair.__init__", never)
    with pytest.raises(ExperimentError, match=r"llama-3\.1-8b has 8\.0 billion weights.* on a CPU") as refused:
        cli.run([*line, "--geometry", "llama-3.1-8b"])
    assert "a GPU for these shapes" in refused.value.allowed
    assert "--geometry nano" in refused.value.remedy


def test_rows_are_read_back_with_ratios_of_their_own_group(measured: Path) -> None:
    speed = rows.read_speed(measured)
    [point] = speed.points
    assert (point.name, sorted(point.depths), sorted(point.stages)) == ("20x2", [0, 1, 3], [0, 3])
    engines = [row for row in read_rows(measured) if row.kind == "bench"]
    by_group = {(row.parameters["spec_k"], row.parameters["group"]): row.values for row in engines}
    for k, group in ((1, 0), (3, 1)):
        ratio = by_group[k, group]["step_ms_median"] / by_group[0, group]["step_ms_median"]  # type: ignore[operator]
        assert point.depths[k].over_base.median == pytest.approx(ratio)
    assert point.depths[3].dial_length == pytest.approx(expected_length(point.share or 0.0, 3), rel=1e-3)
    assert point.depths[3].dial_length == pytest.approx(3.0, abs=0.01), "the dial is meant at three drafts"
    assert point.depths[0].step_ms == by_group[0, 0]["step_ms_median"], "the first group's"
    assert not point.stages[0].is_split
    assert "planted nano" in speed.line()


def rewritten(path: Path, folder: Path, change: Any) -> Path:
    """A copy of rows, each through `change`."""
    out = folder / rows.FILE
    out.write_text("".join(change(row).line() for row in read_rows(path)))
    return out


def test_wrong_tokens_unlike_machines_and_empty_files_give_no_curve(measured: Path, tmp_path: Path) -> None:
    def wrong(row: Row) -> Row:
        return row.model_copy(
            update={"values": {**row.values, "n_wrong_requests": 2 * (row.parameters["spec_k"] == 3)}}
        )

    [point] = rows.read_speed(rewritten(measured, tmp_path, wrong)).points
    assert sorted(point.depths) == [0, 1]
    assert "2 requests not as planted" in next(iter(point.missing.values()))

    def elsewhere(row: Row) -> Row:
        return row.model_copy(update={"environment": "other" if row.parameters["spec_k"] == 3 else "this"})

    with pytest.raises(NotComparable, match="rows of machine"):
        rows.read_speed(rewritten(measured, tmp_path, elsewhere))
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ExperimentError, match="no rows of engines"):
        rows.read_speed(tmp_path / "none.jsonl")


def test_a_row_that_is_missing_at_the_end_leaves_known_who_measured_the_others(measured: Path, tmp_path: Path) -> None:
    def without_room(row: Row) -> Row:
        if row.kind != "bench" or row.parameters["spec_k"] != 3:
            return row
        return row.model_copy(update={"status": "missing", "reason": "no room", "values": {}})

    whole, part = rows.read_speed(measured), rows.read_speed(rewritten(measured, tmp_path, without_room))
    assert (part.machine, part.source) == (whole.machine, whole.source)
    assert part.machine != "cpu", "the processor's name"
    assert part.points[0].missing == {"Speculative_Batch2_Context20_3tokens": "no room"}


def test_without_reference_rows_there_is_nothing_and_with_them_the_newest(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "checkout", lambda: tmp_path)
    assert rows.chosen(None) is None
    folder = tmp_path / "reports" / "reference" / "this"
    folder.mkdir(parents=True)
    (folder / rows.FILE).write_bytes(measured.read_bytes())
    speed = rows.chosen(None)
    assert speed is not None
    assert speed.name == f"this/{rows.FILE}"


def test_options_that_contradict_are_refused_in_three_parts() -> None:
    for options, what in (
        (["--at", "20x1", "--sweep-batch", "1,2"], "--sweep-batch"),
        ([], "neither --at nor --sweep-batch"),
        (["--at", "20x1", "--share", "0.5", "--acceptance-length", "2"], "--share was given"),
        (["--at", "20x1", "--spec", "0,1", "--stages", "0,3"], "stages of 3 drafts"),
        (["--at", "20x1", "--spec", "1,3"], "depths"),
    ):
        with pytest.raises(ExperimentError, match=what) as error:
            cli.run(["speed", *options])
        assert len(str(error.value).splitlines()) == 3


def test_a_sweep_over_batches_is_points_of_one_context_and_the_dial_is_one_for_all_depths() -> None:
    assert SpeedOptions(sweep_batch=(1, 4)).points == (Point(1024, 1), Point(1024, 4))
    assert expected_length(command.dial(3.0, 7), 3) == pytest.approx(3.0)
    assert expected_length(command.dial(None, 1), 1) == pytest.approx(2.0), "one draft cannot commit three"
    assert stage_depths(None, (0, 1, 3, 7)) == (0, 3)
    assert stage_depths(None, (0, 1)) == (0, 1)
    assert stage_depths((), (0, 1)) == ()


def test_the_kernels_of_every_engine_can_be_named_ahead() -> None:
    _, options = cli.parsed(["speed", "--geometry", "nano", "--at", "20x1,40x2", "--spec", "0,3", "--build", "x"])
    assert isinstance(options, SpeedOptions)
    scenario = command.scenario_of(options)
    settings = command.SpeedPlans(geometry="nano", scenario=scenario).settings("speed")["nano"]
    assert {(one.k, one.batch) for one in settings} == {(0, 1), (3, 1), (0, 2), (3, 2)}
    assert scenario.dtype == "bfloat16", "built for a GPU, on a machine without one"


def test_the_json_line_counts_and_wrong_tokens_fail(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read_rows(measured)
    assert command.conclude(found) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["n_rows"] == len(found)
    assert set(summary["step_over_base"]) == {
        f"Speculative_Batch2_Context20_{k}tokens" for k in (1, 3)
    }  # fmt: skip
    bad = found[1].model_copy(update={"values": {**found[1].values, "n_divergent": 1}})
    assert command.conclude([bad]) == 1
    assert command.conclude([]) == 3


# -- what the notebook writes


def outcome_of(folder: Path, points: list[rows.PointSpeed], least: float, most: float) -> dict[str, Any]:
    """Gates at three drafts, judged."""
    exp = experiment.Experiment("40_speed", "run", "job", folder, {}, environment.collect())
    records.write_gates(exp, points, 3, least, most)
    exp.finish()
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return outcome


def test_thresholds_hold_fail_or_are_missing_and_none_is_judged_unless_set(measured: Path, tmp_path: Path) -> None:
    points = list(rows.read_speed(measured).points)
    over = points[0].depths[3].over_base.median
    gain = (points[0].depths[3].dial_length or 0.0) / over
    assert outcome_of(tmp_path / "a", points, gain * 0.99, over * 1.01)["passed"] is True
    assert [gate["passed"] for gate in outcome_of(tmp_path / "b", points, gain * 1.01, over * 0.99)["gates"]] == [
        False
    ] * 2
    assert outcome_of(tmp_path / "c", [], 1.0, 0.0)["gates"][0]["passed"] is None
    del points[0].depths[3]
    assert [gate["passed"] for gate in outcome_of(tmp_path / "d", points, 1.0, 2.0)["gates"]] == [None] * 2
    assert outcome_of(tmp_path / "e", points, 0.0, 0.0)["gates"] == []


def test_recommendations_are_for_what_was_asked_or_else_for_the_dial(measured: Path) -> None:
    speed = rows.read_speed(measured)
    [dial] = records.acceptances([], "", speed)
    assert dial.name.startswith("the planted share 0.81")
    assert dial.length(3) == pytest.approx(3.0, abs=0.01)
    assert [one.length(1) for one in records.acceptances([0.25, 0.5], "", speed)] == [1.25, 1.5]
