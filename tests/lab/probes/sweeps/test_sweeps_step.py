"""Settings judged in a step: on the CPU twin for real, a planted pair's target pass run lane by lane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from proof_subjects import one_layer_subject

from eagle3core.kernels import tuned
from eagle3core.kernels.gemm import Tiling
from eagle3core.step import Program, launches_of, products_of
from lab.cli import main
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import planted_prompts, shapes_of
from lab.probes.proofs.subject import Subject
from lab.probes.sweeps.bake import bake, faults_of
from lab.probes.sweeps.choose import choose_all
from lab.probes.sweeps.in_step import (
    StepSweep,
    StepUnderSweep,
    competing_variants,
    pass_of,
    passes_of,
    step_regimes,
)
from lab.probes.sweeps.machines import TwinMachine
from lab.probes.sweeps.regimes import Regime, nearest
from lab.probes.sweeps.rows import SCREEN, SweepWriter, read_sweep

TREE = "dynamic-12/2/4"  # more than 8 rows, so that its products are of another regime than plain decoding's
pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def subject() -> Subject:
    return one_layer_subject()


def regimes_of(subject: Subject, *names: str) -> list[Regime]:
    return step_regimes("sm_90a", dict(passes_of(subject, names, 16)))


def under_sweep(subject: Subject, name: str) -> StepUnderSweep:
    assert subject.tokens is not None
    [prompt] = planted_prompts(subject.tokens, 1, 16)
    return StepUnderSweep(subject, name, prompt, TwinMachine.gpu)


def test_every_setting_is_built_ahead_in_the_form_in_which_it_leaves_rows_for_its_neighbour() -> None:
    shapes, name = shapes_of(find_geometry("llama-3.1-8b"), "sm_90a"), "dynamic-64/6/8"
    [regime] = (
        one for one in step_regimes("sm_90a", dict(passes_of(shapes, [name], 64)))
        if isinstance(one.key, tuned.GemmKey) and (one.key.weight_rows, one.key.k) == (4096, 4096)
    )  # fmt: skip
    made = {one.name for one in competing_variants(shapes, [name], 64, [regime], TwinMachine.gpu)}
    settings = [Tiling(**setting).name for setting in regime.settings]
    assert len(settings) > 3
    assert {f"gemm_bf16_residual_o8_{setting}_packed" for setting in settings} <= made


def test_maps_in_fp8_are_regimes_of_their_own_with_the_settings_that_compete_for_them() -> None:
    shapes = shapes_of(find_geometry("llama-3.1-8b"), "sm_90a", {"target_weights": "fp8", "cache_dtype": "fp8"})
    regimes = step_regimes("sm_90a", dict(passes_of(shapes, ["plain", "chain-3"], 64)))
    assert {one.key.dtype for one in regimes} == {"bf16_fp8"}
    assert len(regimes) == 5
    assert all(len(one.settings) > 3 and len(one.cases) == 2 for one in regimes)


@pytest.mark.slow
def test_settings_of_a_step_are_timed_in_its_pass_with_equal_bits_and_baked_with_their_rows(
    subject: Subject, tmp_path: Path
) -> None:
    found = regimes_of(subject, TREE)
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
    regime = next(one for one in regimes_of(subject, TREE) if "BASE_FFN_DOWN" in one.tags)
    assert isinstance(regime.key, tuned.GemmKey)
    changed = step.launches({regime.key: regime.settings[1]})
    names = [(a.variant.name, b.variant.name) for a, b in zip(step.launches({}), changed, strict=True)]
    assert 1 <= sum(a != b for a, b in names) <= 2


def test_a_regime_that_several_steps_share_is_judged_in_all_of_them(subject: Subject) -> None:
    found = regimes_of(subject, "plain", "chain-3", TREE)
    weights = [one.count * one.cases[0]["k"] * one.key.weight_rows for one in found]  # type: ignore[union-attr]
    assert weights == sorted(weights, reverse=True)
    shared = [one for one in found if len(one.cases) == 2]
    assert {case["step"] for one in shared for case in one.cases} == {"plain", "chain-3"}
    assert all({case["step"] for case in one.cases} == {TREE} for one in found if one not in shared)
    passes: dict[str, Program] = dict(passes_of(subject, ["plain"], 16))
    assert list(products_of(passes["plain"])) == list(products_of(pass_of(passes["plain"])))
    assert {one.key for one in products_of(passes["plain"])} == {one.key for one in shared}
    assert list(launches_of(passes["plain"]))


def test_what_cannot_be_swept_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    assert main(["sweep", "step", "--steps", "plain,plain", "--build", str(tmp_path)]) == 2
    if not torch.cuda.is_available():
        assert main(["sweep", "step", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert main(["sweep", "step", "--steps", "chain-99", "--build", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())
