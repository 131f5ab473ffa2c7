"""A draft loads from every plain published layout, bit for bit and with the taps that it names."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_drafts import IDS, change, edit_weights, failure
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file

from eagle3core.checkpoint import DraftCheckpoint, load_draft, load_target
from eagle3core.errors import CheckpointError
from eagle3core.geometry import TargetGeometry

pytestmark = pytest.mark.reference

CONVENTION = "eagle_aux_hidden_state_layer_convention"


def same_weights(left: DraftCheckpoint, right: DraftCheckpoint) -> bool:
    return set(left.weights) == set(right.weights) and all(
        torch.equal(left.weights[name], right.weights[name]) for name in left.weights
    )


def test_a_safailab_draft_is_loaded_bit_for_bit(draft_dir: Path, target: TargetGeometry) -> None:
    stored = load_file(draft_dir / "model.safetensors")
    draft = load_draft(draft_dir, target)
    assert set(draft.weights) == set(stored) - {"d2t", "t2d"}
    assert all(torch.equal(weight, stored[name]) for name, weight in draft.weights.items())
    assert draft.geometry.taps == (2, 4, 5)
    assert not draft.geometry.has_embedding
    assert draft.geometry.has_head


def test_the_map_holds_absolute_target_ids(draft_dir: Path, target: TargetGeometry) -> None:
    stored = load_file(draft_dir / "model.safetensors")
    draft = load_draft(draft_dir, target)
    assert draft.draft_to_target is not None
    assert draft.draft_to_target.dtype == torch.int64
    assert torch.equal(draft.draft_to_target, stored["t2d"].nonzero().flatten())
    change(draft_dir, "d2t", stored["d2t"].to(torch.int32))
    narrow = load_draft(draft_dir, target).draft_to_target
    assert narrow is not None
    assert torch.equal(narrow, draft.draft_to_target)


def test_every_layout_gives_the_same_weights(tmp_path: Path, target: TargetGeometry) -> None:
    plain = load_draft(write_random_pair(tmp_path / "a")[1], target)
    pickled = load_draft(write_random_pair(tmp_path / "b", bin=True)[1], target)
    nested = load_draft(write_random_pair(tmp_path / "c", layout="speculators")[1], target)
    prefixed_dir = write_random_pair(tmp_path / "d")[1]
    edit_weights(prefixed_dir, lambda w: w.update({f"model.{name}": w.pop(name) for name in list(w)}))
    prefixed = load_draft(prefixed_dir, target)
    for other in (pickled, nested, prefixed):
        assert same_weights(plain, other)
        assert other.geometry == plain.geometry


def test_tensors_that_decoding_does_not_need_are_dropped(draft_dir: Path, target: TargetGeometry) -> None:
    plain = load_draft(draft_dir, target)
    change(draft_dir, "verifier_lm_head.weight", torch.ones(4, 4))
    change(draft_dir, "midlayer.self_attn.rotary_emb.inv_freq", 1e4 ** -(torch.arange(8) / 8))
    assert same_weights(load_draft(draft_dir, target), plain)


def test_stored_frequencies_of_another_base_than_the_configs_are_those_of_training(
    draft_dir: Path, target: TargetGeometry
) -> None:
    change(draft_dir, "midlayer.self_attn.rotary_emb.inv_freq", (5e5 ** -(torch.arange(8) / 8)).half())
    with pytest.raises(CheckpointError, match=r"frequencies of base 5e\+05, but rope_theta is 10000"):
        load_draft(draft_dir, target)
    rewrite_config(draft_dir, rope_theta=5e5)
    assert load_draft(draft_dir, target).geometry.block.rope.theta == 5e5
    # Of a scaling writers store plain frequencies, or stretched ones.
    rewrite_config(draft_dir, rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert load_draft(draft_dir, target).geometry.block.rope.kind == "linear"


def test_equal_vocabularies_need_no_map(tmp_path: Path, target: TargetGeometry) -> None:
    directory = write_random_pair(tmp_path, draft_vocab=None)[1]
    assert load_draft(directory, target).draft_to_target is None
    change(directory, "d2t", torch.zeros(512, dtype=torch.int64))
    assert load_draft(directory, target).draft_to_target is None


def test_an_absent_head_is_shared_when_the_shapes_allow_it(tmp_path: Path, target: TargetGeometry) -> None:
    shared = load_draft(write_random_pair(tmp_path / "a", draft_vocab=None, own_head=False)[1], target)
    assert not shared.geometry.has_head
    assert "lm_head.weight" not in shared.weights
    assert "brings no lm_head.weight" in failure(write_random_pair(tmp_path / "b", own_head=False)[1], target)


def test_a_draft_of_another_width_brings_its_own_embedding(tmp_path: Path, target: TargetGeometry) -> None:
    directory = write_random_pair(tmp_path, draft_hidden=96, draft_heads=6, draft_kv_heads=1)[1]
    draft = load_draft(directory, target)
    assert draft.geometry.has_embedding
    assert draft.weights["embed_tokens.weight"].shape == (512, 96)
    assert draft.weights["midlayer.self_attn.q_proj.weight"].shape == (96, 192)
    change(directory, "embed_tokens.weight", None)
    assert "brings no embed_tokens.weight" in failure(directory, target)


def test_the_rotary_base_is_never_inherited(tmp_path: Path) -> None:
    target_dir, directory = write_random_pair(tmp_path / "a", rope={"rope_theta": 5e5})
    target = load_target(target_dir).geometry
    assert target.block.rope.theta == 5e5
    assert load_draft(directory, target).geometry.block.rope.theta == 10000.0
    own = write_random_pair(tmp_path / "b", draft_rope={"rope_theta": 7e4})[1]
    assert load_draft(own, target).geometry.block.rope.theta == 7e4


def test_the_head_size_follows_from_the_width_when_absent(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, head_dim=None)
    assert load_draft(draft_dir, target).geometry.block.head_dim == 16


@pytest.mark.parametrize(
    ("keys", "taps"),
    [
        ({}, (2, 4, 5)),
        ({IDS: [0, 3, 6]}, (0, 3, 6)),
        ({IDS: [1, 3, 6]}, (2, 4, 7)),
        ({IDS: [1, 3, 8]}, (1, 3, 8)),
        ({"eagle_config": {IDS: [2, 4, 6]}}, (2, 4, 6)),
        ({"eagle_config": {IDS: [0, 3, 6]}}, (1, 4, 7)),
        ({"eagle_config": {IDS: [1, 3, 6]}}, (2, 4, 7)),
        ({"eagle_config": {IDS: [1, 3, 6]}, CONVENTION: "input"}, (1, 3, 6)),
        ({"eagle_config": {IDS: [1, 3, 6], CONVENTION: "input"}}, (1, 3, 6)),
        ({IDS: [1, 3, 6], CONVENTION: "output"}, (2, 4, 7)),
        ({IDS: [2, 4, 7], "eagle_config": {IDS: [1, 3, 6]}}, (2, 4, 7)),
        ({"eagle_config": {IDS: [-1, 0, 7]}}, (0, 1, 8)),
    ],
)
def test_tap_ids_are_kept_in_input_numbering(
    draft_dir: Path, target: TargetGeometry, keys: dict[str, Any], taps: tuple[int, ...]
) -> None:
    rewrite_config(draft_dir, **keys)
    assert load_draft(draft_dir, target).geometry.taps == taps


def test_the_engine_setting_wins_over_the_checkpoint(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, **{IDS: [1, 3, 6]})
    draft = load_draft(draft_dir, target, capture_layers=(0, 2, 7), capture_convention="output")
    assert draft.geometry.taps == (1, 3, 8)
    assert "with convention None" in failure(draft_dir, target, capture_layers=(0, 2, 7))


def test_taps_that_no_evidence_settles_are_said_with_the_other_reading(
    draft_dir: Path, target: TargetGeometry, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite_config(draft_dir, eagle_config={IDS: [0, 3, 6]})
    with caplog.at_level(logging.WARNING, "eagle3core"):
        decision = load_draft(draft_dir, target).geometry.decisions[0]
    assert (decision.about, decision.answer) == ("taps", "inputs of layers [1, 4, 7], [0, 3, 6] in 'output' numbering")
    assert decision.other.startswith("'input' numbering")
    assert decision.line in caplog.text


def test_decisions_are_no_part_of_what_makes_two_heads_equal(draft_dir: Path, target: TargetGeometry) -> None:
    implied = load_draft(draft_dir, target).geometry
    rewrite_config(draft_dir, **{IDS: [2, 4, 5], CONVENTION: "input"})
    stated = load_draft(draft_dir, target).geometry
    assert stated.decisions[0].evidence != implied.decisions[0].evidence
    assert stated == implied


def test_a_draft_needs_no_engine_and_keeps_its_config_untouched(draft_dir: Path, target: TargetGeometry) -> None:
    before = json.loads((draft_dir / "config.json").read_text())
    load_draft(draft_dir, target, dtype=torch.bfloat16)
    assert json.loads((draft_dir / "config.json").read_text()) == before
