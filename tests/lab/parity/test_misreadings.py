"""A key that the loader reads with another meaning is found by stage parity, whose reference reads the files itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_files import Changes, read_head, write_head
from random_pairs import write_random_pair

from eagle3core import CheckpointError
from eagle3core.checkpoint import draft as loading
from eagle3core.checkpoint.plan import DraftPlan, plan_draft
from lab.parity import run_stage_parity
from lab.parity.stages import StageReport

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path]
Misreading = Callable[[DraftPlan], DraftPlan]
PROMPTS = [[5, 17, 99, 30, 41, 44, 8]]
QKV = tuple(f"midlayer.self_attn.{name}_proj" for name in "qkv")


def as_if(**variant: Any) -> Misreading:
    return lambda plan: replace(
        plan, geometry=replace(plan.geometry, variant=replace(plan.geometry.variant, **variant))
    )


def other_base(plan: DraftPlan) -> DraftPlan:
    block = plan.geometry.block
    return replace(plan, geometry=replace(plan.geometry, block=replace(block, rope=replace(block.rope, theta=3e5))))


def one_lower(plan: DraftPlan) -> DraftPlan:
    return replace(plan, geometry=replace(plan.geometry, taps=tuple(i - 1 for i in plan.geometry.taps)))


def another_map(plan: DraftPlan) -> DraftPlan:
    assert plan.draft_to_target is not None
    return replace(plan, draft_to_target=plan.draft_to_target.roll(1))


def without_head_norms(plan: DraftPlan) -> DraftPlan:
    block = replace(plan.geometry.block, has_qk_norm=False)
    return replace(plan, geometry=replace(plan.geometry, block=block))


def near(head: Changes) -> None:
    head.flags(layer_types=["sliding_attention"], sliding_window=5)


def norm_all(head: Changes) -> None:
    head.flags(norm_before_fc=True)
    head.norm_over_all()


def norm_each(head: Changes) -> None:
    head.flags(fc_norm=True)
    head.norm_over_each()


def biases(head: Changes) -> None:
    head.flags(attention_bias=True)
    head.biases(*QKV)


def tied(head: Changes) -> None:
    head.own_embedding()
    head.full_vocabulary(own_head=False)
    head.flags(tie_word_embeddings=True)


MISREADINGS: dict[str, tuple[Callable[[Changes], object], Misreading]] = {
    "norm_before_residual": (lambda head: head.flags(norm_before_residual=True), as_if(normed_residual=False)),
    "normed feedback": (lambda head: head.flags(return_hidden_post_norm=True), as_if(feeds_normed=False)),
    "norm_before_fc": (norm_all, as_if(fusion_norm="none")),
    "fc_norm": (norm_each, as_if(fusion_norm="none")),
    "hidden_act": (lambda head: head.flags(hidden_act="gelu"), as_if(activation="silu")),
    "logit_scale": (lambda head: head.flags(logit_scale=0.5), as_if(logit_scale=1.0)),
    "rope_is_neox_style": (
        lambda head: head.flags(rope_is_neox_style=False), lambda plan: replace(plan, is_interleaved=False)
    ),
    "rope_theta": (lambda head: head.flags(rope_theta=7e4), other_base),
    "tap ids": (lambda head: head.taps([1, 3, 6]), one_lower),
    "d2t": (lambda head: None, another_map),
    "q_norm and k_norm": (Changes.norms_of_heads, without_head_norms),
    "layer_types with sliding_window": (near, lambda plan: replace(plan, geometry=replace(plan.geometry, window=0))),
    "attention_bias": (biases, as_if(qkv_bias=False)),
    "tie_word_embeddings": (tied, as_if(tied_head=False)),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_random_pair(tmp_path_factory.mktemp("pair"), hidden=32, head_dim=8, ffn=48, vocab=128, draft_vocab=64)


def compared(pair: Pair, head: Path) -> StageReport:
    return run_stage_parity(pair[0], head, prompts=PROMPTS, k=3, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISREADINGS)
def test_a_misread_key_fails_where_the_right_reading_passes(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, misread = MISREADINGS[name]
    config, weights = read_head(pair[1])
    change(Changes(config, weights, 32, 128))
    head = write_head(tmp_path / "head", config, weights)
    right = compared(pair, head)
    assert right.passed, right.verdict
    monkeypatch.setattr(loading, "plan_draft", lambda *given: misread(plan_draft(*given)))
    wrong = compared(pair, head)
    assert not wrong.passed
    assert wrong.first_divergent is not None
    assert wrong.first_divergent.stage.startswith(("draft.", "target.taps", "tree."))


def test_what_norm_output_means_in_a_flat_file_can_be_told_to_parity(pair: Pair, tmp_path: Path) -> None:
    config, weights = read_head(pair[1])
    head = write_head(tmp_path / "head", {**config, "norm_output": True}, weights)
    for meaning in ("feedback", "head"):
        report = run_stage_parity(pair[0], head, prompts=PROMPTS, k=2, steps=1, norm_output=meaning)
        assert report.passed, report.verdict
    with pytest.raises(CheckpointError, match="norm_output is True"):
        compared(pair, head)


@pytest.mark.slow
def test_another_meaning_of_norm_output_is_found(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = read_head(pair[1])
    head = write_head(tmp_path / "head", {**config, "norm_output": True}, weights)
    monkeypatch.setattr(loading, "plan_draft", lambda *given: as_if(feeds_normed=False)(plan_draft(*given)))
    report = run_stage_parity(pair[0], head, prompts=PROMPTS, k=2, steps=1, norm_output="feedback")
    assert report.first_divergent is not None
    assert report.first_divergent.stage == "draft.feedback"
