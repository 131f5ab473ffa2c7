"""A key that the loader reads with another meaning is found by stage parity, whose reference reads the files itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagle_pairs import write_eagle_pair
from layout_files import Changes, read_head, write_head
from places import ROOT
from random_pairs import write_random_pair
from rings import slow_but

from eagle3core import CheckpointError, Engine, EngineConfig, SpeculativeConfig
from lab.errors import ExperimentError
from lab.parity import run_stage_parity
from lab.parity.faults import FAULTS, with_fault
from lab.parity.faults.of_layouts import LAYOUT_FAULTS
from lab.parity.stages import StageReport

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path]
PROMPTS = [[5, 17, 99, 30, 41, 44, 8]]
QKV = tuple(f"midlayer.self_attn.{name}_proj" for name in "qkv")


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


# By name of the planted misreading: a head that has the key; None: any head shows it.
MISREADINGS: dict[str, Callable[[Changes], object] | None] = {
    "misread_norm_before_residual": lambda head: head.flags(norm_before_residual=True),
    "misread_norm_output": lambda head: head.flags(return_hidden_post_norm=True),
    "misread_norm_before_fc": norm_all,
    "misread_fc_norm": norm_each,
    "misread_hidden_act": lambda head: head.flags(hidden_act="gelu"),
    "misread_logit_scale": lambda head: head.flags(logit_scale=0.5),
    "misread_rope_style": lambda head: head.flags(rope_is_neox_style=False),
    "misread_rope_theta": lambda head: head.flags(rope_theta=7e4),
    "misread_taps": lambda head: head.taps([1, 3, 6]),
    "misread_d2t": None,
    "misread_qk_norm": Changes.norms_of_heads,
    "misread_sliding_window": near,
    "misread_attention_bias": biases,
    "misread_tied_head": tied,
}
OF_ANY_HEAD = sorted(name for name in MISREADINGS if "head with" not in FAULTS[name].needs and "tied" not in name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_random_pair(tmp_path_factory.mktemp("pair"), hidden=32, head_dim=8, ffn=48, vocab=128, draft_vocab=64)


def compared(pair: Pair, head: Path, fault: str = "", **how: Any) -> StageReport:
    return run_stage_parity(pair[0], head, prompts=PROMPTS, k=3, steps=1, fault=fault, **how)


def assert_named(report: StageReport, name: str) -> None:
    first = report.first_divergent
    assert first is not None, f"{name} was not found"
    assert (first.stage, first.kind) == (FAULTS[name].stage, FAULTS[name].kind), report.verdict


def test_every_misreading_that_can_be_planted_is_tried_and_listed_with_its_stage() -> None:
    assert MISREADINGS.keys() == {fault.name for fault in LAYOUT_FAULTS}
    listed = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    for fault in LAYOUT_FAULTS:
        assert f"| `{fault.name}` | {fault.what} | `{fault.stage}`, {fault.kind} | {fault.needs} |" in listed


@pytest.mark.parametrize("name", slow_but(OF_ANY_HEAD[::5], OF_ANY_HEAD))
def test_a_misreading_of_a_plain_head_is_named_at_its_stage(pair: Pair, name: str) -> None:
    assert_named(compared(pair, pair[1], name), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name, change in MISREADINGS.items() if change))
def test_a_misread_key_is_named_where_the_right_reading_passes(pair: Pair, tmp_path: Path, name: str) -> None:
    change = MISREADINGS[name]
    assert change is not None
    config, weights = read_head(pair[1])
    change(Changes(config, weights, 32, 128))
    head = write_head(tmp_path / "head", config, weights)
    right = compared(pair, head)
    assert right.passed, right.verdict
    assert_named(compared(pair, head, name), name)


def test_a_misreading_is_none_of_an_engine_without_an_eagle3_head(tmp_path: Path) -> None:
    target, draft = write_eagle_pair(tmp_path)
    engine = Engine.from_pretrained(
        target, EngineConfig(speculative_config=SpeculativeConfig(model=str(draft), method="eagle"), device="cpu")
    )
    with pytest.raises(ExperimentError, match="where drafts are made by eagle"):
        with_fault(engine, "misread_taps")


def test_what_norm_output_means_in_a_flat_file_can_be_told_to_parity(pair: Pair, tmp_path: Path) -> None:
    config, weights = read_head(pair[1])
    head = write_head(tmp_path / "head", {**config, "norm_output": True}, weights)
    for meaning in ("feedback", "head"):
        report = run_stage_parity(pair[0], head, prompts=PROMPTS, k=2, steps=1, norm_output=meaning)
        assert report.passed, report.verdict
    with pytest.raises(CheckpointError, match="norm_output is True"):
        compared(pair, head)


@pytest.mark.slow
def test_another_meaning_of_norm_output_is_found(pair: Pair, tmp_path: Path) -> None:
    config, weights = read_head(pair[1])
    head = write_head(tmp_path / "head", {**config, "norm_output": True}, weights)
    assert_named(compared(pair, head, "misread_norm_output", norm_output="feedback"), "misread_norm_output")
