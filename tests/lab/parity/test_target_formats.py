"""Stages of a target in FP8 are held against what its bytes and scales mean, or what quantising leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quantised_heads import CONFIGS, write_fp8
from rings import slow_but, slow_from
from tiny_engines import random_prompts, write_tiny_pair

from lab.parity import faults, run_stage_parity
from lab.parity.faults.of_formats import FORMAT_FAULTS
from lab.parity.recording import PairUnderTest, record
from lab.parity.stages import report_of

pytestmark = pytest.mark.reference

WIDE: dict[str, Any] = {"hidden": 192, "ffn": 256, "vocab": 200}  # maps of more than one block of 128
QWEN: dict[str, Any] = {**WIDE, "family": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 160}
GPT_OSS: dict[str, Any] = {**WIDE, "family": "gpt_oss", "head_dim": 16, "ffn": 160}
PROMPTS = random_prompts([9, 5], n_vocab=200)
HOW: dict[str, Any] = {"k": 2, "steps": 2, "prefill_chunk": 64}


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["float64", "bfloat16"]))
@pytest.mark.parametrize("stored", slow_but(["fp8"], [*CONFIGS, "at load"]))
def test_every_stage_agrees_with_what_the_maps_mean(tmp_path: Path, stored: str, dtype: str) -> None:
    target, draft = write_tiny_pair(tmp_path, **WIDE)
    weights = "fp8" if stored == "at load" else "as_stored"
    if stored != "at load":
        target = write_fp8(target, tmp_path / stored, stored, block=(16, 128))
    given: dict[str, Any] = {"prompts": PROMPTS, "dtype": dtype, "device": "cpu", "target_weights": weights}
    report = run_stage_parity(target, draft, **given, **HOW)
    assert report.first_divergent is None, report.verdict
    assert "stages agree" in report.verdict


@pytest.mark.parametrize("dtype", slow_but(["float64"], ["float64", "bfloat16"]))
@pytest.mark.parametrize("stored", slow_but(["fp8"], ["fp8", "modelopt", "at load", "gpt-oss at load"]))
def test_experts_in_fp8_agree_with_what_they_mean(tmp_path: Path, stored: str, dtype: str) -> None:
    family = GPT_OSS if stored == "gpt-oss at load" else QWEN
    target, draft = write_tiny_pair(tmp_path, **family)
    weights = "fp8" if stored.endswith("at load") else "as_stored"
    if weights == "as_stored":
        target = write_fp8(target, tmp_path / stored, stored, block=(16, 128))
    given: dict[str, Any] = {"prompts": PROMPTS, "dtype": dtype, "device": "cpu", "target_weights": weights}
    report = run_stage_parity(target, draft, **given, **HOW)
    assert report.first_divergent is None, report.verdict


@pytest.mark.parametrize("name", slow_from(2, [fault.name for fault in FORMAT_FAULTS if "MXFP4" not in fault.needs]))
def test_scales_of_others_are_named_at_their_stage(tmp_path: Path, name: str) -> None:
    target, draft = write_tiny_pair(tmp_path, **QWEN)
    stored, fault = write_fp8(target, tmp_path / "stored", "fp8", block=(16, 128)), faults.FAULTS[name]
    first = run_stage_parity(stored, draft, prompts=PROMPTS[1:], k=2, steps=1, fault=name).first_divergent
    assert first is not None, f"{name} was not found"
    assert (first.stage, first.kind) == (fault.stage, fault.kind), first


def test_a_target_in_fp8_does_not_pass_for_the_one_it_was_made_of(tmp_path: Path) -> None:
    pair = PairUnderTest(*write_tiny_pair(tmp_path, **WIDE), "float32", "cpu", target_weights="fp8")
    ours = record(pair, PROMPTS, **HOW)
    report = report_of(replace(pair, target_weights="as_stored"), ours, PROMPTS)
    assert report.first_divergent is not None
    assert report.first_divergent.stage == "target.0.attn"
