"""A draft loads from every plain published layout, or the error names flag, tensor and value and is logged."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file, save_file

from eagle3core.checkpoint import DraftCheckpoint, load_draft, load_target
from eagle3core.errors import CheckpointError
from eagle3core.geometry import TargetGeometry

pytestmark = pytest.mark.reference

IDS, CONVENTION = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_convention"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetGeometry, Path]:
    """A target's shapes and a draft that tests copy before damaging it."""
    target_dir, draft_dir = write_random_pair(tmp_path_factory.mktemp("pair"))
    return load_target(target_dir).geometry, draft_dir


@pytest.fixture
def target(pristine: tuple[TargetGeometry, Path]) -> TargetGeometry:
    """Shapes of the target: 8 layers of 64, vocabulary 512."""
    return pristine[0]


@pytest.fixture
def draft_dir(pristine: tuple[TargetGeometry, Path], tmp_path: Path) -> Path:
    """An own copy of the pristine draft."""
    return Path(shutil.copytree(pristine[1], tmp_path / "draft"))


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Store the tensors as `edit` leaves them."""
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


def change(directory: Path, name: str, value: torch.Tensor | None) -> None:
    """Replace one tensor; None removes it."""

    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights.pop(name, None)
        if value is not None:
            weights[name] = value

    edit_weights(directory, edit)


def failure(directory: Path, target: TargetGeometry, **kwargs: Any) -> str:
    """The message with which loading ends."""
    with pytest.raises(CheckpointError) as caught:
        load_draft(directory, target, **kwargs)
    assert "\n  allowed: " in str(caught.value)
    assert "\n  do: " in str(caught.value)
    return str(caught.value)


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
    change(draft_dir, "midlayer.self_attn.rotary_emb.inv_freq", torch.ones(8))
    assert same_weights(load_draft(draft_dir, target), plain)


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
        ({IDS: [1, 3, 6]}, (1, 3, 6)),
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


@pytest.mark.parametrize("ids", [[1, 3, 9], [-1, 3, 4], [3, 1, 5], [3, 3, 5]])
def test_taps_outside_the_target_or_out_of_order_are_refused(
    draft_dir: Path, target: TargetGeometry, ids: list[int]
) -> None:
    rewrite_config(draft_dir, **{IDS: ids})
    message = failure(draft_dir, target)
    assert f"are {ids} ('input' numbering) on a target of 8 layers" in message
    assert "distinct ascending ids from 0 to 8" in message


def test_two_lists_that_name_different_layers_are_refused(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, **{IDS: [1, 3, 6], "eagle_config": {IDS: [1, 3, 6]}})
    assert "name different layers" in failure(draft_dir, target)


def test_default_taps_are_refused_when_the_target_is_too_shallow(tmp_path: Path) -> None:
    target_dir, draft_dir = write_random_pair(tmp_path / "six", n_layers=6)
    message = failure(draft_dir, load_target(target_dir).geometry)
    assert "the default taps of 6 layers are [2, 3, 3]" in message
    assert "at least 7 layers" in message
    target_dir, draft_dir = write_random_pair(tmp_path / "seven", n_layers=7)
    assert load_draft(draft_dir, load_target(target_dir).geometry).geometry.taps == (2, 3, 4)


def test_a_wrong_tap_count_is_told_from_a_wrong_shape(draft_dir: Path, target: TargetGeometry) -> None:
    message = failure(draft_dir, target, capture_layers=(1, 5), capture_convention="input")
    assert "tensor fc.weight reads 192 values, 3 taps of 64, but 2 taps [1, 5] are captured" in message
    assert "128 = 2 x 64 columns" in message


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": False},
        {"return_hidden_post_norm": True},
        {"eagle_config": {"norm_output": True}},
        {"eagle_config": {"norm_before_fc": True}},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"eagle_config": {"use_last_layernorm": False}},
        {"use_aux_hidden_state": False},
        {"attention_bias": True},
        {"qkv_bias": True},
        {"num_hidden_layers": 2},
    ],
)
def test_a_variant_that_is_not_built_is_refused_by_its_flag(
    draft_dir: Path, target: TargetGeometry, keys: dict[str, Any]
) -> None:
    rewrite_config(draft_dir, **keys)
    flag, value = next(iter(keys.items()))
    if isinstance(value, dict):
        flag, value = next(iter(value.items()))
    message = failure(draft_dir, target)
    assert f"{flag} is {value}" in message
    assert "not built" in message


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_a_speculators_variant_is_refused_by_its_flag(tmp_path: Path, target: TargetGeometry, flag: str) -> None:
    directory = write_random_pair(tmp_path, layout="speculators")[1]
    rewrite_config(directory, **{flag: True})
    assert f"{flag} is True" in failure(directory, target)


def test_a_speculators_file_must_state_its_residual(tmp_path: Path, target: TargetGeometry) -> None:
    directory = write_random_pair(tmp_path, layout="speculators")[1]
    rewrite_config(directory, norm_before_residual=None)
    assert "norm_before_residual is missing" in failure(directory, target)


def test_norm_output_in_specforge_files_is_read_in_their_sense(
    draft_dir: Path, target: TargetGeometry, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite_config(draft_dir, norm_output=True)
    with caplog.at_level(logging.WARNING, "eagle3core"):
        assert load_draft(draft_dir, target).geometry.taps == (2, 4, 5)
    assert "norm_output is read in SpecForge's sense" in caplog.text


def test_an_eagle1_head_is_recognised(draft_dir: Path, target: TargetGeometry) -> None:
    def strip(weights: dict[str, torch.Tensor]) -> None:
        for name in ("midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"):
            weights.pop(name)

    edit_weights(draft_dir, strip)
    assert "like an EAGLE-1 or EAGLE-2 head" in failure(draft_dir, target)


@pytest.mark.parametrize("name", ["fc.bias", "input_norm.weight", "layers.1.mlp.up_proj.weight", "fc_norm.0.weight"])
def test_a_tensor_without_a_place_is_named(draft_dir: Path, target: TargetGeometry, name: str) -> None:
    change(draft_dir, name, torch.ones(4))
    assert f"holds 1 tensors with no place in this model: {name}" in failure(draft_dir, target)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "d2t"])
def test_a_missing_tensor_is_named(draft_dir: Path, target: TargetGeometry, name: str) -> None:
    change(draft_dir, name, None)
    assert f"lacks 1 tensors: {name}" in failure(draft_dir, target)


def test_one_tensor_under_two_names_is_refused(draft_dir: Path, target: TargetGeometry) -> None:
    change(draft_dir, "model.norm.weight", torch.ones(64))
    assert "are both norm.weight" in failure(draft_dir, target)


def test_a_wrong_shape_is_named_with_both_shapes(draft_dir: Path, target: TargetGeometry) -> None:
    change(draft_dir, "midlayer.self_attn.q_proj.weight", torch.ones(64, 64))
    message = failure(draft_dir, target)
    assert "tensor midlayer.self_attn.q_proj.weight has shape [64, 64]" in message
    assert "[64, 128]" in message


def test_non_finite_weights_are_refused(draft_dir: Path, target: TargetGeometry) -> None:
    weight = torch.ones(64)
    weight[63] = float("-inf")
    change(draft_dir, "norm.weight", weight)
    assert "norm.weight (float32) holds 1 non-finite values of 64, first -inf at index [63]" in failure(
        draft_dir, target
    )


def test_another_target_vocabulary_is_refused(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, vocab_size=640)
    message = failure(draft_dir, target)
    assert "vocab_size is 640" in message
    assert "512, the target's vocabulary" in message
    rewrite_config(draft_dir, vocab_size=512, draft_vocab_size=600)
    assert "draft_vocab_size is 600" in failure(draft_dir, target)


def test_another_target_width_is_refused(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, target_hidden_size=128)
    assert "target_hidden_size is 128" in failure(draft_dir, target)


def test_a_map_out_of_range_is_named_with_row_and_value(draft_dir: Path, target: TargetGeometry) -> None:
    offsets = load_file(draft_dir / "model.safetensors")["d2t"]
    offsets[127] = 512 - 127
    change(draft_dir, "d2t", offsets)
    message = failure(draft_dir, target)
    assert "maps 1 draft ids outside the target's vocabulary, first 127 -> 512 (offset 385)" in message
    assert "target ids from 0 to 511" in message
    offsets[0] = -1
    change(draft_dir, "d2t", offsets)
    assert "first 0 -> -1 (offset -1)" in failure(draft_dir, target)


def test_a_map_that_does_not_ascend_is_refused(draft_dir: Path, target: TargetGeometry) -> None:
    offsets = load_file(draft_dir / "model.safetensors")["d2t"]
    offsets[11] = offsets[10] - 1
    change(draft_dir, "d2t", offsets)
    message = failure(draft_dir, target)
    assert "maps draft ids 10 and 11 to" in message
    assert "strictly ascending" in message


@pytest.mark.parametrize("stored", [torch.zeros(64, dtype=torch.int64), torch.zeros(128)])
def test_a_map_of_wrong_form_is_refused(draft_dir: Path, target: TargetGeometry, stored: torch.Tensor) -> None:
    change(draft_dir, "d2t", stored)
    assert "[128] (draft_vocab_size) of int64 or int32" in failure(draft_dir, target)


def test_a_truncated_pickle_is_named(tmp_path: Path, target: TargetGeometry) -> None:
    directory = write_random_pair(tmp_path, bin=True)[1]
    path = directory / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-500])
    assert "cannot be read with weights_only=True" in failure(directory, target)


def test_a_failed_load_is_logged_with_its_prefix(
    draft_dir: Path, target: TargetGeometry, caplog: pytest.LogCaptureFixture
) -> None:
    (draft_dir / "model.safetensors").unlink()
    message = failure(draft_dir, target)
    record = caplog.records[-1]
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"[EAGLE][EagleModule::load] {message}"


def test_a_draft_needs_no_engine_and_keeps_its_config_untouched(draft_dir: Path, target: TargetGeometry) -> None:
    before = json.loads((draft_dir / "config.json").read_text())
    load_draft(draft_dir, target, dtype=torch.bfloat16)
    assert json.loads((draft_dir / "config.json").read_text()) == before
