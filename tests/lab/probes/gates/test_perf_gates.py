"""Gates on rows made by hand, each both ways, and the configuration they are in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gate_rows import SMALL, by_name, row, rows

from lab.errors import ExperimentError
from lab.probes.gates.config import LEAST_STEPS, MICRO_STEPS_VARIABLE, GatesConfig, load_gates, packaged_gates
from lab.probes.gates.judging import gate_row, judge_mode, judge_run, line_of, listing, outcome
from lab.probes.gates.measure import scenario_of
from lab.rows.gates import GateResult

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def config() -> GatesConfig:
    return load_gates(packaged_gates())


def judged(
    config: GatesConfig, base: dict[str, Any] | None = None, spec: dict[str, Any] | None = None
) -> list[GateResult]:
    return judge_mode(config, config.find("single32k"), "micro", rows(base, spec))


# -- gates both ways


def test_a_run_as_good_as_the_one_measured_is_green(config: GatesConfig) -> None:
    results = judged(config)
    assert outcome(results) == "green", [line_of(result) for result in results if result.word != "pass"]
    assert len(results) >= 18


@pytest.mark.parametrize(
    ("of", "value", "bad"),
    [
        ("spec", "speedup", 1.99),
        ("spec", "speedup_at_dial", 2.49),
        ("spec", "acceptance_length", 2.99),
        ("spec", "speedup_over_plain-torch", 2.4),
        ("spec", "speedup_over_hf-static", 2.4),
        ("spec", "share_of_floor", 0.869),
        ("spec", "over_plain-torch", 0.76),
        ("spec", "n_steps", 511),
        ("spec", "n_divergent", 1),
        ("spec", "n_wrong_requests", 1),
        ("spec", "invariants.gemm_fallbacks", 1),
        ("spec", "invariants.single_token_steps", 1),
        ("spec", "invariants.untuned_products", 1),
        ("spec", "invariants.guessed_layouts", 1),
        ("spec", "invariants.faults", 1),
        ("spec", "invariants.debug_switches", 1),
        ("baseline", "share_of_floor", 0.899),
        ("baseline", "over_plain-torch", 0.751),
        ("baseline", "over_hf-static", 0.751),
        ("baseline", "n_wrong_requests", 1),
        ("baseline", "invariants.gemm_fallbacks", 1),
        ("baseline", "invariants.untuned_products", 1),
        ("baseline", "invariants.guessed_layouts", 1),
        ("baseline", "invariants.faults", 1),
        ("baseline", "invariants.debug_switches", 1),
    ],
)
def test_every_gate_fails_alone_and_is_missing_alone(config: GatesConfig, of: str, value: str, bad: float) -> None:
    for given_value, word, result in ((bad, "fail", "red"), (None, "missing", "incomplete")):
        changed = {value: given_value}
        results = judged(config, **({"spec": changed} if of == "spec" else {"base": changed}))
        not_passed = [found for found in results if found.word != "pass"]
        assert [found.word for found in not_passed] == [word], [line_of(found) for found in not_passed]
        assert f" {of}: " in not_passed[0].name
        assert outcome(results) == result
        assert not_passed[0].value == given_value
        assert line_of(not_passed[0]) in listing(results)


def test_every_threshold_of_the_packaged_gates_is_tried_above(config: GatesConfig) -> None:
    tried = {(mark[0], mark[1]) for mark in test_every_gate_fails_alone_and_is_missing_alone.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    mode = config.find("single32k")
    assert {(gate.of, gate.value) for gate, _ in mode.thresholds("micro", config.invariants)} == tried


def test_the_packaged_thresholds_are_at_least_those_asked_for(config: GatesConfig) -> None:
    wanted = {
        ("single32k", "spec", "speedup"): 2.0, ("single32k", "spec", "acceptance_length"): 3.0,
        ("single32k", "spec", "speedup_at_dial"): 2.5, ("single32k", "baseline", "share_of_floor"): 0.90,
        ("single32k", "spec", "share_of_floor"): 0.87, ("batch4_16k", "spec", "speedup"): 1.0,
        ("batch4_16k", "spec", "acceptance_length"): 2.2, ("batch4_16k", "baseline", "share_of_floor"): 0.89,
        ("batch4_16k", "spec", "share_of_floor"): 0.80,
    }  # fmt: skip
    at_least = {(m.name, g.of, g.value): g.at_least for m in config.mode for g in m.gate}
    at_most = {(m.name, g.of, g.value): g.at_most for m in config.mode for g in m.gate}
    for key, least in wanted.items():
        assert (at_least[key] or 0) >= least, key
    for mode in ("single32k", "batch4_16k"):
        assert (at_most[mode, "baseline", "over_plain-torch"] or 9) <= 0.75
    assert (at_most["batch4_16k", "spec", "step_over_base"] or 9) <= 3.0 / 2.3
    lengths = {mode.name: mode.micro.steps for mode in config.mode}
    assert lengths == {"single32k": 512, "batch4_16k": 128}
    assert all(mode.full.steps > mode.micro.steps and mode.full.rounds > mode.micro.rounds for mode in config.mode)
    assert config.green_in_a_row >= 3


def test_a_gate_against_a_peer_that_did_not_run_gives_the_peers_reason(config: GatesConfig) -> None:
    peer = row("Baseline_Single_Context32K/hf-static", None, 0, "MemoryError: does not fit")
    found = judge_mode(config, config.find("single32k"), "micro", [*rows({"over_hf-static": None}), peer])
    gate = by_name(found, "time of hf-static's step")
    assert gate.word == "missing"
    assert "MemoryError: does not fit" in gate.detail


def test_an_engine_that_did_not_run_leaves_all_its_gates_missing_with_the_reason(config: GatesConfig) -> None:
    none = [row("Baseline_Single_Context32K", None, 0, "does not fit: 131 GiB"),
            row("Speculative_Single_Context32K_3tokens", None, 3, "does not fit: 131 GiB")]  # fmt: skip
    found = judge_mode(config, config.find("single32k"), "micro", none)
    assert {gate.word for gate in found} == {"missing"}
    assert all("131 GiB" in gate.detail for gate in found)
    assert outcome(judge_run(config, "micro", [])) == "incomplete"


def test_a_trained_pair_has_no_planted_tokens_to_be_wrong_by(config: GatesConfig) -> None:
    trained = config.model_copy(update={"pair": "shipped"})
    values = [gate.name for gate in judged(trained)]
    assert not any("wrong tokens" in name for name in values)
    assert any("unlike the baseline's" in name for name in values)


def test_gates_are_stored_as_notebooks_store_theirs(config: GatesConfig) -> None:
    found = judged(config, spec={"speedup": 1.5, "n_steps": None})
    stored = {gate.name: gate_row(gate, rows()[0]) for gate in found}
    failed = stored["single32k spec: speed-up over our baseline, decoding only"]
    assert failed.kind == "gate"
    assert failed.values["passed"] is False
    assert (failed.values["value"], failed.values["threshold"]) == (1.5, "at least 2")
    assert stored["single32k spec: steps decoded"].status == "missing"


# -- the configuration


def test_the_hash_is_of_the_settings_and_not_of_their_looks(tmp_path: Path) -> None:
    known = load_gates(SMALL)
    looks = tmp_path / "looks.toml"
    looks.write_text("# another remark\n" + SMALL.read_text(encoding="utf-8"), encoding="utf-8")
    assert load_gates(looks).hash == known.hash
    assert load_gates(SMALL, "tiny").hash == known.hash, "the geometry is counted apart"
    assert load_gates(SMALL, "tiny").geometry == "tiny"
    hashes = {known.hash}
    for before, after in (
        ("steps = 6", "steps = 9"), ("at_least = 0.1", "at_least = 0.2"), ("batch = 4", "batch = 3"),
        ('"faults", ', ""), ('dtype = "float32"', 'dtype = "bfloat16"'),
    ):  # fmt: skip
        looks.write_text(SMALL.read_text(encoding="utf-8").replace(before, after, 1), encoding="utf-8")
        hashes.add(load_gates(looks).hash)
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ('device = "cpu"', 'device = "tpu"', "device"),
        ('invariants = ["single', 'invariants = ["every', "no invariant 'every"),
        ('name = "batch4"', 'name = "single"', "two modes of one name"),
        ("at_least = 0.1", "above = 0.1", "unknown key"),
        (", at_least = 0.1", "", "needs at_least or at_most"),
        ("batch = 4", "batch = 0", "batch"),
        ("steps = 6", "steps = 3", "steps"),
        ("geometry", "geometry ==", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(tmp_path: Path, before: str, after: str, what: str) -> None:
    path = tmp_path / "gates.toml"
    text = SMALL.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(ExperimentError, match=what):
        load_gates(path)


def test_the_environment_may_say_how_long_micro_runs_are(config: GatesConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MICRO_STEPS_VARIABLE, "24")
    shorter = load_gates(packaged_gates())
    assert {mode.micro.steps for mode in shorter.mode} == {24}
    assert [mode.full for mode in shorter.mode] == [mode.full for mode in config.mode]
    assert shorter.hash != config.hash, "green runs of another length count apart"
    [steps] = [one for _, one in shorter.mode[0].thresholds("micro", ()) if one.value == "n_steps"]
    assert steps.at_least == 24
    monkeypatch.setenv(MICRO_STEPS_VARIABLE, str(LEAST_STEPS))
    assert {mode.micro.steps for mode in load_gates(packaged_gates()).mode} == {LEAST_STEPS}
    for wrong in ("3", "many", "-8"):
        monkeypatch.setenv(MICRO_STEPS_VARIABLE, wrong)
        with pytest.raises(ExperimentError, match=f"EAGLE3_MICRO_STEPS='{wrong}'"):
            load_gates(packaged_gates())


def test_a_run_has_tokens_for_its_steps_those_that_are_not_counted_and_walks_above_the_dial(
    config: GatesConfig,
) -> None:
    mode = config.find("single32k")
    assert (mode.micro.steps, mode.acceptance_length, mode.spec) == (512, 3.0, 3)
    # Two warm steps, the last and one to spare; 2 % more than the dial, or every draft of every step.
    assert mode.tokens("micro", is_planted=True) == math.ceil(516 * 3.06)
    assert mode.tokens("micro", is_planted=False) == 516 * 4
    assert mode.tokens("full", is_planted=False) == (mode.full.steps + 4) * 4


def test_what_the_bench_would_refuse_is_refused_before_anything_is_made() -> None:
    small = load_gates(SMALL)
    mode = small.mode[0].model_copy(update={"peers": ("vllm",)})
    with pytest.raises(ExperimentError, match="no peer 'vllm'"):
        scenario_of(small, mode, "micro")
    with pytest.raises(ExperimentError, match="no mode 'single64k'"):
        small.find("single64k")
