"""Settings judged in a step: on the CPU twin for real, a planted pair's target pass run lane by lane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from proof_subjects import one_layer_subject

from eagle3core.kernels import tuned
from eagle3core.kernels.gemm import Tiling
from eagle3core.step import DeviceRunner, launches_of, products_of
from lab.cli import main
from lab.errors import ExperimentError
from lab.options.formats import Formats
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import planted_prompts, shapes_of
from lab.probes.proofs.subject import Subject
from lab.probes.sweeps.bake import bake, faults_of
from lab.probes.sweeps.choose import choose_all
from lab.probes.sweeps.in_step import (
    Model,
    StepSweep,
    StepUnderSweep,
    competing_variants,
    pass_of,
    program_of,
    regimes_of,
    step_setting,
)
from lab.probes.sweeps.machines import TwinMachine
from lab.probes.sweeps.regimes import Regime, nearest
from lab.probes.sweeps.rows import SCREEN, SweepWriter, read_sweep
from lab.probes.sweeps.step_command import named_so

TREE = "dynamic-12/2/4"  # more than 8 rows, so that its products are of another regime than plain decoding's
pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def subject() -> Subject:
    return one_layer_subject()


def runners_of(subject: Subject, *names: str, batch: int = 1) -> dict[str, DeviceRunner]:
    return {name: subject.runner(step_setting(name, 16, batch)) for name in names}


def regimes_in(subject: Subject, *names: str, model: Model = "target") -> list[Regime]:
    return regimes_of(runners_of(subject, *names), "sm_90a", model)


def under_sweep(subject: Subject, name: str, batch: int = 1, model: Model = "target") -> StepUnderSweep:
    assert subject.tokens is not None
    prompts = planted_prompts(subject.tokens, batch, 16)
    return StepUnderSweep(subject, name, prompts, TwinMachine.gpu, model)


def test_every_setting_is_built_ahead_in_the_form_in_which_it_leaves_rows_for_its_neighbour() -> None:
    shapes, name = shapes_of(find_geometry("llama-3.1-8b"), "sm_90a"), "dynamic-64/6/8"
    [regime] = (
        one for one in regimes_in(shapes, name)
        if isinstance(one.key, tuned.GemmKey) and (one.key.weight_rows, one.key.k) == (4096, 4096)
    )  # fmt: skip
    made = {one.name for one in competing_variants(runners_of(shapes, name), "sm_90a", [regime], TwinMachine.gpu)}
    settings = [Tiling(**setting).name for setting in regime.settings]
    assert len(settings) > 3
    assert {f"gemm_bf16_residual_o8_{setting}_packed" for setting in settings} <= made


def test_maps_in_fp8_are_regimes_of_their_own_with_the_settings_that_compete_for_them() -> None:
    shapes = shapes_of(find_geometry("llama-3.1-8b"), "sm_90a", {"target_weights": "fp8", "cache_dtype": "fp8"})
    regimes = regimes_in(shapes, "plain", "chain-3")
    assert {one.key.dtype for one in regimes} == {"bf16_fp8"}
    assert len(regimes) == 5
    assert all(len(one.settings) > 3 and len(one.cases) == 2 for one in regimes)
    assert [one.key.k for one in named_so(regimes, "4096x14336")] == [14336]
    assert named_so(regimes, "") == regimes
    with pytest.raises(ExperimentError, match="'bf16_fp8 rows<=8 4096x14336 packed'"):
        named_so(regimes, "rows<=16")


@pytest.mark.slow
def test_settings_of_a_step_are_timed_in_its_pass_with_equal_bits_and_baked_with_their_rows(
    subject: Subject, tmp_path: Path
) -> None:
    found = regimes_in(subject, TREE)
    few = [replace(one, settings=nearest(one.settings, 1)) for one in found[:1]]
    machine, out = TwinMachine(), tmp_path / "rows.jsonl"
    writer, step = SweepWriter(out, machine.gpu, machine.timer), under_sweep(subject, TREE)
    said: list[str] = []
    assert StepSweep(machine, writer, {TREE: step}, tell=said.append).run(few)
    rows = read_sweep(out)
    screened = rows.of("gemm", SCREEN)
    assert [row["shape"]["step"] for row in screened] == [TREE] * 2
    assert all(row["bits_equal"] and row["time_us"] > 0 for row in screened)
    choices, missing = choose_all(rows.cells, "gemm")
    assert not missing
    content = bake(tmp_path / "tuned.json", choices, rows, out, "sm_90a")
    assert TREE in content["gemm"][0]["shapes"][0]
    faults = [fault for fault in faults_of(content, lambda name: rows.cells) if "further from the best" not in fault]
    assert faults == [], "which setting is best is a matter of time alone"
    assert len(said) == 1
    StepSweep(machine, writer, {TREE: step}, tell=said.append).run(few)
    assert len(read_sweep(out).cells) == len(rows.cells), "what is there is not measured again"
    short = [one for one in step.launches({}) if "residual" not in one.variant.name]
    whole = step.logits_of(machine.call(step.launches({})))
    assert not torch.equal(step.logits_of(machine.call(short)), whole), "a wrong pass shows in its logits"


def test_a_pass_takes_the_settings_it_is_given(subject: Subject) -> None:
    step = under_sweep(subject, TREE)
    regime = next(one for one in regimes_in(subject, TREE) if "BASE_FFN_DOWN" in one.tags)
    assert isinstance(regime.key, tuned.GemmKey)
    changed = step.launches({regime.key: regime.settings[1]})
    names = [(a.variant.name, b.variant.name) for a, b in zip(step.launches({}), changed, strict=True)]
    assert 1 <= sum(a != b for a, b in names) <= 2


def test_a_regime_that_several_steps_share_is_judged_in_all_of_them(subject: Subject) -> None:
    found = regimes_in(subject, "plain", "chain-3", TREE)
    weights = [one.count * one.cases[0]["k"] * one.key.weight_rows for one in found]  # type: ignore[union-attr]
    assert weights == sorted(weights, reverse=True)
    shared = [one for one in found if len(one.cases) == 2]
    assert {case["step"] for one in shared for case in one.cases} == {"plain", "chain-3"}
    assert all({case["step"] for case in one.cases} == {TREE} for one in found if one not in shared)
    plain = pass_of(program_of(runners_of(subject, "plain")["plain"]))
    assert {one.key for one in products_of(plain)} == {one.key for one in shared}
    assert list(launches_of(plain))


def test_a_drafts_passes_settle_the_maps_that_are_the_drafts_alone() -> None:
    formats: Formats = {"draft_weights": "fp8", "target_weights": "fp8"}
    shapes = shapes_of(find_geometry("llama-3.1-8b"), "sm_90a", formats)
    found = regimes_in(shapes, "chain-3", model="draft")
    assert [(one.key.weight_rows, one.key.k) for one in found] == [  # type: ignore[union-attr]
        (32000, 4096), (6144, 8192), (4096, 12288),
    ]  # fmt: skip
    assert [one.count for one in found] == [3, 3, 1]
    others = regimes_in(shapes_of(find_geometry("llama-3.1-8b"), "sm_90a", {"draft_weights": "fp8"}), "chain-3",
                        model="draft")  # fmt: skip
    assert {(one.key.weight_rows, one.key.k) for one in others} - {  # type: ignore[union-attr]
        (one.key.weight_rows, one.key.k)
        for one in found  # type: ignore[union-attr]
    } == {(28672, 4096), (4096, 14336), (4096, 4096)}, "no map of a target in 16 bits is a draft's in FP8"


def test_a_drafts_passes_take_settings_and_give_the_same_bits_again_and_again(subject: Subject) -> None:
    step = under_sweep(subject, "chain-3", batch=2, model="draft")
    [regime] = (one for one in regimes_in(subject, "chain-3", model="draft") if "EAGLE3_FC" in one.tags)
    assert isinstance(regime.key, tuned.GemmKey)
    machine = TwinMachine()
    plain = machine.call(step.launches({}))
    first = step.logits_of(plain)
    assert len({tuple(row) for row in first[:2].tolist()}) == 2, "a row of each sequence"
    assert torch.equal(first, step.logits_of(plain))
    for setting in nearest(regime.settings, 1):
        assert torch.equal(step.logits_of(machine.call(step.launches({regime.key: setting}))), first)
    for part in ("draft_input", "store", "qkv", "streams", "residual", "swiglu", "head", "take_rows"):
        short = [one for one in step.launches({}) if part not in one.variant.name]
        assert len(short) < len(step.launches({}))
        assert not torch.equal(step.logits_of(machine.call(short)), first), f"a pass without {part} shows in its logits"
    assert any("argmax" in one.variant.name for one in step.launches({})), "each pass begins with the last one's choice"
    own = step.runner.state.draft
    assert own is not None
    assert step.logits_of(lambda: None).unique().numel() == 1
    assert own.act.sums.count_nonzero() == own.sums.count_nonzero() == 0, "nothing of the pass before is left"
    with pytest.raises(ExperimentError, match="without passes of the draft"):
        regimes_in(subject, "plain", model="draft")


def test_a_pair_in_fp8_makes_the_engine_of_a_step_that_drafts() -> None:
    formats: Formats = {"draft_weights": "fp8", "target_weights": "fp8", "draft_cache_dtype": "fp8"}
    shapes = shapes_of(find_geometry("nano"), "sm_90a", formats)
    spec = shapes.config(step_setting("chain-3", 16)).speculative_config
    assert spec is not None
    assert (spec.draft_weights, spec.draft_cache_dtype) == ("fp8", "fp8")


def test_sequences_that_end_before_the_last_is_read_are_told(subject: Subject) -> None:
    assert subject.tokens is not None
    long = planted_prompts(subject.tokens, 2, 16)
    step = StepUnderSweep(subject, "plain", long, TwinMachine.gpu)
    for request in list(step.engine.book.unfinished):
        step.engine.cancel(request.id)
    with pytest.raises(ExperimentError, match="0 still run once all are read"):
        step._follow()


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_several_sequences_say_how_many(subject: Subject, batch: int, tmp_path: Path) -> None:
    machine, step = TwinMachine(), under_sweep(subject, "plain", batch)
    sweep = StepSweep(machine, SweepWriter(tmp_path / "rows.jsonl", machine.gpu, machine.timer), {"plain": step})
    regime = regimes_of(runners_of(subject, "plain", batch=batch), "sm_90a")[0]
    shape = sweep._cell(regime, SCREEN, regime.cases[0], regime.default)["shape"]
    assert (shape["context"], shape["m"], shape.get("batch", 1)) == (16, batch, batch)


def test_what_cannot_be_swept_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    assert main(["sweep", "step", "--steps", "plain,plain", "--build", str(tmp_path)]) == 2
    if not torch.cuda.is_available():
        assert main(["sweep", "step", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert main(["sweep", "step", "--steps", "chain-99", "--build", str(tmp_path)]) == 2
    build = ["--build", str(tmp_path), "--geometry", "llama-3.2-1b"]
    assert main(["sweep", "step", "--steps", "plain", "--only", "no regime", *build]) == 2
    assert not list(tmp_path.iterdir())
