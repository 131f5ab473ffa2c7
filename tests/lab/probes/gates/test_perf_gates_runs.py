"""The whole path of the gates: real runs on a CPU, what they leave behind, and full runs that wait for green ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gate_rows import SMALL, rows

from eagle3core.errors import InvariantViolated
from eagle3core.performance import PERF_MODE_VARIABLE
from lab import cli
from lab.errors import ExperimentError, RunFailed
from lab.pairs import shipped_pair
from lab.pairs.planted import share_for_length
from lab.pairs.prompts import joined_prompts
from lab.probes.bench.invariants import invariants_block
from lab.probes.bench.rounds import Work
from lab.probes.bench.scenario import Scenario
from lab.probes.bench.source import HEADROOM, open_pair
from lab.probes.gates import command, history, measure
from lab.probes.gates.config import GatesConfig, load_gates, packaged_gates
from lab.probes.gates.history import Entry, read
from lab.probes.gates.kernels import plans_of
from lab.probes.gates.measure import Runs, check_device, scenario_of
from lab.probes.proofs.plans import needed_variants
from lab.rows.gates import gates_of
from lab.rows.store import Row, read_rows

pytestmark = pytest.mark.reference


def main(options: list[str]) -> int:
    return cli.run(["gates", *options])


Give = Callable[[str, str], list[Row]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def at_32k(tmp_path: Path) -> Path:
    """The packaged configuration with its first mode alone, for a CPU."""
    text = packaged_gates().read_text(encoding="utf-8").replace('device = "cuda"', 'device = "cpu"')
    path = tmp_path / "at_32k.toml"
    path.write_text(text[: text.rindex("\n[[mode]]\n")], encoding="utf-8")
    assert [mode.name for mode in load_gates(path).mode] == ["single32k"]
    return path


@pytest.fixture
def given_rows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the next runs measure, in place of measuring: rows, or an error to raise."""
    waiting: list[Any] = []

    def run(_: Runs, kind: str, name: str) -> list[Row]:
        found = waiting.pop(0)
        if isinstance(found, Exception):
            raise found
        return list(found)

    monkeypatch.setattr(measure.Runs, "run", run)
    return waiting


# -- a real run


@pytest.mark.slow
def test_micro_runs_on_a_cpu_lead_to_a_full_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SMALL.read_text(encoding="utf-8").replace("geometry", "green_in_a_row = 1\ngeometry", 1)
    config, out, records, state = (tmp_path / name for name in ("g.toml", "rows.jsonl", "records.json", "state.jsonl"))
    config.write_text(text, encoding="utf-8")
    common = ["--config", str(config), "--geometry", "nano", "--state", str(state), "--out", str(out)]
    with pytest.raises(RunFailed, match="0 of 1 green"):
        main(["full", *common])
    assert not out.exists()
    assert main(["micro", *common, "--records", str(records)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {
        "command": "gates micro", "result": "green", "n_runs": 1, "not_passed": [], "n_green_in_a_row": 1,
        "full_allowed": True,
    }  # fmt: skip
    written = read_rows(out)
    spec = {row.name: row.values for row in written if row.parameters.get("spec_k") == 3}
    single, batch = spec["Speculative_Single_Context96_3tokens"], spec["Speculative_Batch4_Context48_3tokens"]
    for values, steps, length in ((single, 6, 3.0), (batch, 6, 2.2)):
        assert values["n_steps"] >= steps  # type: ignore[operator]
        assert values["acceptance_length"] == values["planned_acceptance_length"]
        assert values["acceptance_length"] >= length  # type: ignore[operator]
        assert values["scenario.perf_mode"] is True
        assert values["scenario.micro_run"] is True
        assert values["invariants.faults"] == 0
        assert values["invariants.gemm_fallbacks"] > 0, "plain torch is no kernel of ours"  # type: ignore[operator]
    assert single["speedup_over_plain-torch"] > 0  # type: ignore[operator]
    assert batch["speedup_over_hf-static"] > 0  # type: ignore[operator]
    judged = gates_of(written)
    assert {gate.word for gate in judged} == {"pass"}
    assert all(gate.detail for gate in judged)
    assert PERF_MODE_VARIABLE not in os.environ
    assert main(["check", str(records), str(records), "--mode", "batch4", "--config", str(config)]) == 0
    assert main(["full", *common]) == 0
    assert [entry.mode for entry in read(state) if isinstance(entry, Entry)] == ["micro", "full"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_shipped_pair_runs_on_prompts_of_real_text(tmp_path: Path) -> None:
    text = SMALL.read_text(encoding="utf-8").replace('"nano"', '"shipped"\npair = "shipped"')
    text = text.replace("acceptance_length = 2.2", "acceptance_length = 1.5")
    for least in ("3.0", "2.2"):
        text = text.replace(f'"acceptance_length", at_least = {least}', '"acceptance_length", at_least = 1.2')
    config = tmp_path / "g.toml"
    config.write_text(text, encoding="utf-8")
    assert main(["micro", "--config", str(config), "--state", str(tmp_path / "state.jsonl")]) == 0


def test_real_text_fills_a_context_without_being_repeated() -> None:
    target = shipped_pair().target
    prompts = joined_prompts(target, 4, 1500)
    assert [len(prompt) for prompt in prompts] == [1500] * 4
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 4
    for prompt in prompts:
        windows = [tuple(prompt[i : i + 40]) for i in range(1460)]
        assert len(set(windows)) == len(windows), "a text repeated would show as equal windows"
    with pytest.raises(ExperimentError, match="a prompt of 100000 tokens"):
        joined_prompts(target, 1, 100_000)


def test_a_pair_at_another_dial_has_the_same_target_and_its_own_draft() -> None:
    common: dict[str, Any] = {"geometry": "nano", "pair": "planted", "points": (load_gates(SMALL).mode[0].point,),
                              "ks": (0, 3), "dtype": "float32"}  # fmt: skip
    shares = [share_for_length(length, 3) for length in (3.0, 2.0)]
    first = open_pair(Scenario(**common, share=shares[0]))
    fused = first.fused()
    turned, made = first.redialled(shares[1]), open_pair(Scenario(**common, share=shares[1]))
    assert turned.target is first.target
    assert turned.fused()[0] is fused[0]
    assert turned.fused()[1] is not fused[1]
    for name in made.target_weights:
        assert torch.equal(first.target_weights[name], made.target_weights[name]), name
    for name in made.draft_weights:
        assert torch.equal(turned.draft_weights[name], made.draft_weights[name]), name
    assert turned.card == made.card


# -- invariants, each broken on purpose


def work(k: int) -> Work:
    """A short decoding of nano."""
    from eagle3core.config import GenerationConfig

    point = load_gates(SMALL).mode[0].point
    source = open_pair(Scenario("nano", "planted", (point,), (0, 3), 0.8, dtype="float32"))
    done = Work(source.engine(k, batch=1, session_len=128), source.prompts(1, 16, 0), GenerationConfig(17))
    with torch.no_grad():
        done.run()
    return done


def test_a_broken_invariant_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, spec = work(0), work(3)
    steps = len(spec.responses[0].req_metrics.steps)
    assert invariants_block(plain, 0) == {
        "invariants.gemm_fallbacks": 16, "invariants.untuned_products": None, "invariants.faults": None,
        "invariants.guessed_layouts": None, "invariants.debug_switches": 0,
    }  # fmt: skip
    assert invariants_block(spec, 3)["invariants.gemm_fallbacks"] == steps
    assert invariants_block(spec, 3)["invariants.single_token_steps"] == 0
    assert invariants_block(spec, 4)["invariants.single_token_steps"] == steps, "one draft fewer than asked for"
    monkeypatch.setenv(PERF_MODE_VARIABLE, "1")
    assert invariants_block(spec, 3)["invariants.faults"] == 0
    assert invariants_block(spec, 3)["invariants.guessed_layouts"] == 0
    for n, name in enumerate(("EAGLE3_KV_DEBUG", "EAGLE3_ACTIVE_DEBUG"), start=1):
        monkeypatch.setenv(name, "1")
        assert invariants_block(spec, 3)["invariants.debug_switches"] == n
    runs_kernels = SimpleNamespace(has_kernels=True, gemms=spec.engine.runner.gemms)
    spec.engine.runner = runs_kernels  # type: ignore[assignment]
    assert invariants_block(spec, 3)["invariants.gemm_fallbacks"] == 0


# -- runs, and what they allow


def test_three_green_runs_allow_a_full_one_and_a_red_one_ends_that(
    at_32k: Path, tmp_path: Path, given_rows: list[Any], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    state = tmp_path / "deep" / "state.jsonl"
    common = ["--config", str(at_32k), "--state", str(state)]
    given_rows += [rows(), rows()]
    assert main(["micro", *common, "--repeat", "2"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["n_green_in_a_row"] == 2
    with pytest.raises(RunFailed, match="2 of 3 green"):
        main(["full", *common])
    given_rows += [rows()]
    assert main(["micro", *common]) == 0
    full = rows(spec={"n_steps": 1024})
    given_rows += [full]
    assert main(["full", *common]) == 0
    given_rows += [rows()]
    assert main(["full", *common]) == 1, "512 steps are too few for a full run"
    given_rows += [full]
    assert main(["full", *common]) == 0, "a red full run breaks no row of micro runs"
    with monkeypatch.context() as changed:
        changed.setattr(history, "code_hash", lambda: "0123456789ab")
        with pytest.raises(RunFailed, match=r"0 of 3.*another code .* \(now 0123456789ab\)"):
            main(["full", *common])
    at_32k.write_text(at_32k.read_text(encoding="utf-8").replace("rounds = 2", "rounds = 1"), encoding="utf-8")
    with pytest.raises(RunFailed, match=r"0 of 3.*another config"):
        main(["full", *common])
    at_32k.write_text(at_32k.read_text(encoding="utf-8").replace("rounds = 1", "rounds = 2"), encoding="utf-8")
    given_rows += [full]
    assert main(["full", *common]) == 0, "back at what was green"
    given_rows += [rows(spec={"speedup": 1.9})]
    assert main(["micro", *common]) == 1
    with pytest.raises(RunFailed, match=r"0 of 3.*, red: single32k spec: speed-up over our baseline"):
        main(["full", *common])


def test_a_run_that_is_not_green_is_the_last(
    at_32k: Path, tmp_path: Path, given_rows: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    state, out = tmp_path / "state.jsonl", tmp_path / "rows.jsonl"
    given_rows += [rows(), rows({"over_hf-static": None}), rows()]
    options = ["--config", str(at_32k), "--state", str(state), "--out", str(out), "--repeat", "3"]
    assert main(["micro", *options]) == 3, "a gate that could not be judged is no pass"
    assert len(given_rows) == 1
    assert [entry.result for entry in read(state) if isinstance(entry, Entry)] == ["green", "incomplete"]
    shown = capsys.readouterr().out
    assert "missing single32k baseline: time of hf-static's step: - (at most 0.75)" in shown
    assert [gate.word for gate in gates_of(read_rows(out))].count("missing") == 1


@pytest.mark.parametrize(
    "error",
    [
        InvariantViolated("slot 0 reports fault 1", "acceptance inside the tree", "report it"),
        RuntimeError("CUDA error"),
    ],
)
def test_a_run_that_ends_in_an_error_is_written_down_as_broken(
    at_32k: Path, tmp_path: Path, given_rows: list[Any], error: Exception
) -> None:
    state = tmp_path / "state.jsonl"
    common = ["--config", str(at_32k), "--state", str(state)]
    given_rows += [rows(), rows(), rows(), error]
    with pytest.raises(type(error)):
        main(["micro", *common, "--repeat", "4"])
    last = read(state)[-1]
    assert isinstance(last, Entry)
    assert (last.result, list(last.why)) == ("broke", [f"{type(error).__name__}: {str(error).splitlines()[0]}"])
    with pytest.raises(RunFailed, match="0 of 3"):
        main(["full", *common])


def test_gates_of_a_gpu_are_refused_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = tmp_path / "state.jsonl"
    with pytest.raises(RunFailed, match="a GPU's and torch sees none") as refused:
        main(["micro", "--state", str(state)])
    assert refused.value.exit_code == 3
    assert not state.exists(), "nothing was run"
    check_device(load_gates(SMALL))


# -- kernels, found without a GPU


def test_the_kernels_of_a_run_are_those_of_its_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_gates(SMALL)
    plans = plans_of(config, "micro")
    sessions = {mode.batch: mode.context + scenario_of(config, mode, "micro").tokens + HEADROOM for mode in config.mode}
    assert [(s.k, s.batch, s.session_len) for s in plans.engines] == [
        (k, batch, sessions[batch]) for batch in (1, 4) for k in (0, 3)
    ]
    names = {variant.name for variant in needed_variants(plans, ["micro"], "sm_90a")}
    assert any(name.startswith("attention") for name in names)
    assert any(name.startswith("gemm") for name in names)
    made: list[tuple[GatesConfig, Any]] = []
    monkeypatch.setattr(command, "build_kernels", lambda *given: made.append((given[0], given[1:])) or 7)
    options = ["--build", str(tmp_path), "--arch", "sm_100", "--share", "2/2", "--config", str(SMALL)]
    assert main(["full", *options]) == 0, "kernels are built before there is anything green, and with no GPU"
    assert made == [(config, ("full", "sm_100", tmp_path, (1, 2)))]
    shipped = plans_of(config.model_copy(update={"pair": "shipped", "geometry": "shipped"}), "micro")
    assert list(shipped.settings("micro")) == ["shipped"]
