"""Cards and sweeps in FlashInfer-Bench's form: whole, true to the rows, runnable, and valid by its own models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from safetensors.torch import load_file

from eagle3core.kernels import Tensors, emulator, launch, proof, registry
from lab.errors import ExperimentError
from lab.options.exchange import ExportOptions
from lab.probes.flashinfer_bench.command import run
from lab.probes.flashinfer_bench.definitions import Definition, Workload
from lab.probes.kernels.rows import KERNEL
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter, block, read_rows

pytestmark = pytest.mark.reference
H200 = ROOT / "reports" / "reference" / "h200"
CARDS, CPU = registry(), torch.device("cpu")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some committed rows of the benchmark and of two sweeps, exported."""
    folder = tmp_path_factory.mktemp("exported")
    wanted = {"kernels": ("rms_norm", "attention", "place_rows"), "sweep_gemm": None, "sweep_fmha": None}
    for name, ops in wanted.items():
        rows = [row for row in read_rows(H200 / f"{name}.jsonl") if ops is None or row.name in ops]
        with RowWriter(folder / f"{name}.jsonl") as out:
            for row in rows[:40]:
                out.write(row)
    out = folder / "set"
    paths = tuple(folder / f"{name}.jsonl" for name in wanted)
    assert run(ExportOptions(paths=paths, out=out, form="flashinfer-bench")) == 0
    return out


def objects(root: Path, folder: str) -> list[dict[str, Any]]:
    """Every JSON object under a folder of a data set."""
    files = sorted((root / folder).rglob("*.json*"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    lines = [text.splitlines() if path.suffix == ".jsonl" else [text] for path, text in zip(files, texts, strict=True)]
    return [json.loads(line) for part in lines for line in part]


def test_every_trace_has_its_definition_its_solution_and_its_workload(exported: Path) -> None:
    definitions = {one["name"] for one in objects(exported, "definitions")}
    solutions = {one["name"]: one["definition"] for one in objects(exported, "solutions")}
    workloads = {one["workload"]["uuid"] for one in objects(exported, "workloads")}
    traces = objects(exported, "traces")
    assert len(traces) > 50
    for trace in traces:
        assert trace["definition"] in definitions
        assert solutions[trace["solution"]] == trace["definition"]
        assert trace["workload"]["uuid"] in workloads


def test_a_trace_has_the_time_of_its_row_and_makes_no_error_up(exported: Path) -> None:
    [row] = [
        row
        for row in read_rows(H200 / "kernels.jsonl")
        if row.name == "attention" and row.kind == KERNEL
        and {row.parameters[f"shape.{name}"] for name in ("dim", "batch", "tokens")} == {128, 1, 4}
        and row.parameters["shape.batch"] == 1
    ]  # fmt: skip
    [trace] = [
        trace
        for trace in objects(exported, "traces")
        if trace["definition"].startswith("attention_batch1_dim128") and trace["workload"]["axes"]["tokens"] == 4
        and trace["solution"].endswith("chosen")
    ]  # fmt: skip
    found = trace["evaluation"]
    assert found["performance"]["latency_ms"] == row.values["time_us"] / 1e3
    assert found["performance"]["reference_latency_ms"] == row.values["library_us"] / 1e3
    assert str(row.values["library"]) in found["log"]
    assert found["correctness"]["max_absolute_error"] == "NaN", "rows hold the proof's verdict, no error"
    assert found["environment"]["hardware"] == "NVIDIA H200"


def test_tables_and_masks_of_a_workload_are_stored_with_it(exported: Path) -> None:
    for one in objects(exported, "workloads"):
        stored = {name: each for name, each in one["workload"]["inputs"].items() if each["type"] == "safetensors"}
        if not one["definition"].startswith("attention"):
            continue
        assert {"tables", "prefix", "mask", "words", "positions"} == set(stored)
        tensors = load_file(exported / stored["mask"]["path"])
        tokens = one["workload"]["axes"]["tokens"]
        assert tensors["mask"].shape[1:] == (tokens, tokens)
        assert bool(tensors["mask"].diagonal(dim1=1, dim2=2).all()), "a node sees itself: the mask is a tree's"


def test_every_card_becomes_a_definition_whose_axes_its_inputs_give() -> None:
    for card in CARDS.values():
        workload = Workload(card, card.shapes[0])
        definition = Definition([workload])
        told, lengths = definition.to_json(), definition.workload(workload)
        varying = {name for name, axis in told["axes"].items() if axis["type"] == "var"}
        assert set(lengths) == varying == ({workload.varying} - {None}), card.name
        assert all(lengths[name] == card.shapes[0][name] for name in varying)
        assert not set(told["inputs"]) & set(told["outputs"]), card.name
        named = {axis for tensor in (*told["inputs"].values(), *told["outputs"].values()) for axis in tensor["shape"]}
        assert named == set(told["axes"]), card.name
        assert set(workload.structure()) == {
            name for name, tensor in told["inputs"].items() if "float" not in tensor["dtype"]
        }


def function_of(source: str) -> Callable[..., Any]:
    """`run` of a source text."""
    found: dict[str, Any] = {}
    exec(compile(source, "main.py", "exec"), found)
    function: Callable[..., Any] = found["run"]
    return function


def outputs_of(function: Callable[..., Any], inputs: Tensors) -> list[torch.Tensor]:
    """What a source gives for inputs in their order."""
    made = function(*inputs.values())
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.parametrize(("op", "size"), [("rms_norm", "rows"), ("attention", "tokens"), ("select_tree", "batch")])
def test_a_reference_runs_by_itself_at_another_size_and_gives_the_cards_numbers(op: str, size: str) -> None:
    card = CARDS[op]
    case = {**card.cases[0], **({"tree": "chain", "prefix": (40,)} if op == "attention" else {})}
    run_reference = function_of(Definition([Workload(card, case)]).to_json()["reference"])
    other = {**case, size: case[size] + 2}
    inputs = card.example(other, proof.generator(1, CPU), CPU)
    expected = card.reference(other, inputs)
    for ours, truth in zip(outputs_of(run_reference, inputs), expected.values(), strict=True):
        torch.testing.assert_close(ours, truth)


def test_a_solution_launches_the_kernels_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    card = CARDS["gemm"]
    case = next(case for case in card.cases if case["kind"] == "store")
    setting = dict(card.settings[1])
    solution = Definition([Workload(card, case)]).solution("s", setting)
    launched: list[str] = []

    def execute(launches: Any) -> None:
        launched.extend(each.variant.name for each in launches)
        emulator.execute(launches)

    monkeypatch.setattr(launch, "execute", execute)
    monkeypatch.setattr(launch, "device_arch", lambda: "sm_90a")
    inputs = card.example(case, proof.generator(0, CPU), CPU)
    [y] = outputs_of(function_of(solution["sources"][0]["content"]), inputs)
    assert proof.deviations(card, case, inputs, {"y": y})[0].passes
    outputs = card.outputs(case, inputs)
    assert launched == [each.variant.name for each in card.launches("sm_90a", case, inputs, outputs, **setting)]


def test_rows_that_are_no_time_of_a_card_are_counted_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker, norm = RowMaker("r", "kernels", "m", shared={"gpu": "NVIDIA H200"}), CARDS["rms_norm"]
    shape = block("shape", json.loads(json.dumps(dict(norm.shapes[0]), default=str)))
    time = {"time_us": 2.0}
    with RowWriter(tmp_path / "kernels.jsonl") as out:
        out.write(maker.measured(KERNEL, "rms_norm", time, shape))
        out.write(maker.measured(KERNEL, "rms_norm", time, {**shape, "shape.colour": 3}))
        out.write(maker.measured(KERNEL, "rms_norm", time, {"shape.rows": 3}))
        out.write(maker.measured(KERNEL, "place_rows", time, {"shape.rows": 3}))
        out.write(maker.missing(KERNEL, "gemm", "no GPU"))
    options = {"paths": (tmp_path / "kernels.jsonl",), "form": "flashinfer-bench"}
    assert run(ExportOptions(out=tmp_path / "set", **options)) == 0
    *told, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"command": "export", "definitions": 1, "solutions": 1, "traces": 1, "out": "set"}
    assert [line.removeprefix("left out: 1 rows: ") for line in sorted(told)] == [
        "card place_rows is no more", "card rms_norm has a further size, width",
        "no time of a kernel alone", "sizes that card rms_norm takes no more",
    ]  # fmt: skip
    with pytest.raises(ExperimentError, match="set exists"):
        run(ExportOptions(out=tmp_path / "set", **options))
    with pytest.raises(ExperimentError, match="no timed kernel in 1 files"):
        run(ExportOptions(paths=(H200 / "gates.jsonl",), out=tmp_path / "none", form="flashinfer-bench"))
    assert not (tmp_path / "none").exists()


def test_flashinfer_benchs_own_models_read_the_whole_set(exported: Path) -> None:
    data = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench is not installed: pip install it")
    found = data.TraceSet.from_path(str(exported))
    assert len(found.definitions) == len(objects(exported, "definitions"))
    assert sum(map(len, found.traces.values())) == len(objects(exported, "traces"))
    for definition in found.definitions.values():
        for one in found.workloads[definition.name]:
            assert set(one.workload.axes) == set(definition.var_axes) == set(definition.var_axes_bindings)
            definition.get_input_shapes(one.workload.axes)
            definition.get_output_shapes(one.workload.axes)


def test_outputs_whose_size_hangs_on_values_make_every_case_a_definition_of_its_own() -> None:
    card = CARDS["gemm"]
    case = next(case for case in card.cases if case["kind"] == "qkv")
    workload = Workload(card, case)
    assert workload.shapes.is_by_values
    assert workload.varying is None
    assert f"m{case['m']}" in workload.definition
