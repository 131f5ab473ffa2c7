"""Every stage of the kernels' path agrees with Hugging Face, and a mistake is named at its stage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from proof_subjects import subject_on_disk, verdicts
from rings import slow_but
from tiny_engines import Pair, random_prompts

from lab.pairs.planted import find_geometry
from lab.parity.recording import PairUnderTest
from lab.probes.proofs.kernel_parity import STAGES, KernelParity, ParityPlan, wide_pair
from lab.probes.proofs.subject import Subject

pytestmark = pytest.mark.reference


PARITY = ParityPlan(k=3, steps=2)


def parity_of(nano_pair: Pair, subject: Subject) -> KernelParity:
    prompts = random_prompts([9, 70], n_vocab=256)
    return KernelParity(PairUnderTest(*nano_pair, "bfloat16", "cpu"), subject, prompts, PARITY)


def test_every_stage_of_the_kernels_agrees_with_hugging_face(nano_pair: Pair, nano_kernels: Subject) -> None:
    proof = parity_of(nano_pair, nano_kernels)
    found = verdicts(proof.checks())
    assert {name: one.detail for name, one in found.items() if not one.held} == {}
    assert len(found) == len(STAGES)
    assert found["nano draft.rope"].values["kinds"] == ["prefill", "extend", "chain1", "chain2", "after acceptance"]
    assert found["nano draft.norm"].values["kinds"] == ["extend", "chain1", "chain2", "after acceptance"]
    assert found["nano target.attn"].values["n_cells"] == 2 * 2 * 3  # prompts, layers, passes
    assert proof.report.passed


def test_random_layers_are_written_for_hugging_face_and_agree_with_it(tmp_path: Path) -> None:
    pair = wide_pair(tmp_path / "pair", find_geometry("nano"), torch.device("cpu"))
    prompts = random_prompts([9, 5], n_vocab=6144)
    found = verdicts(KernelParity(pair, subject_on_disk(pair), prompts, ParityPlan(k=2, steps=1)).checks())
    assert {name: one.detail for name, one in found.items() if not one.held} == {}
    assert found["on disk target.mlp"].values["n_cells"] == 2 * 2 * 2  # prompts, layers, passes


def scaled(subject: Subject, name: str) -> Subject:
    """The pair with one of the draft's tensors a little too large."""
    draft = subject.draft
    if name == "fc":
        fc = dataclasses.replace(draft.fc, weight=draft.fc.weight * 1.1)
        return dataclasses.replace(subject, draft=dataclasses.replace(draft, fc=fc))
    if name == "final_gain":
        return dataclasses.replace(subject, draft=dataclasses.replace(draft, final_gain=draft.final_gain * 1.2))
    holder = draft.layer.mlp if name == "down" else draft.layer
    map_ = getattr(holder, name)
    changed: Any = dataclasses.replace(holder, **{name: dataclasses.replace(map_, weight=map_.weight * 1.1)})
    layer = changed if holder is draft.layer else dataclasses.replace(draft.layer, mlp=changed)
    return dataclasses.replace(subject, draft=dataclasses.replace(draft, layer=layer))


@pytest.mark.parametrize(
    ("name", "stage"),
    slow_but(
        [("qkv", "draft.qkv"), ("final_gain", "draft.norm")],
        [
            ("fc", "draft.fc"),
            ("qkv", "draft.qkv"),
            ("o", "draft.attn"),
            ("down", "draft.mlp"),
            ("final_gain", "draft.norm"),
        ],
    ),
)
def test_a_mistake_in_a_stage_is_named_at_that_stage(
    nano_pair: Pair, nano_kernels: Subject, name: str, stage: str
) -> None:
    proof = parity_of(nano_pair, scaled(nano_kernels, name))
    found = verdicts(proof.checks())
    assert found[f"nano {stage}"].held is False
    first = proof.report.first_divergent
    assert first is not None
    assert first.stage == ("draft.feedback" if stage == "draft.mlp" else stage)
    for untouched in ("draft.taps", "target.head", "tree.tokens"):
        assert found[f"nano {untouched}"].held


def test_a_stage_that_nothing_recorded_is_missing(nano_pair: Pair, nano_kernels: Subject) -> None:
    proof = parity_of(nano_pair, nano_kernels)
    report = proof.report
    proof._report = dataclasses.replace(report, cells=[cell for cell in report.cells if cell.stage != "draft.rope"])
    found = verdicts(proof.checks())
    assert found["nano draft.rope"].held is None
    assert found["nano draft.qkv"].held
