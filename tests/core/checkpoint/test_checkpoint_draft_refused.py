"""A draft that cannot be decoded with is refused: the error names flag, tensor and value."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_drafts import change, edit_weights, failure
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file

from eagle3core.checkpoint import load_draft
from eagle3core.geometry import TargetGeometry

pytestmark = pytest.mark.reference


def test_a_wrong_tap_count_is_told_from_a_wrong_shape(draft_dir: Path, target: TargetGeometry) -> None:
    message = failure(draft_dir, target, capture_layers=(1, 5), capture_convention="input")
    assert "tensor fc.weight reads 192 values, 3 taps of 64, but 2 taps [1, 5] are captured" in message
    assert "128 = 2 x 64 columns" in message


@pytest.mark.parametrize("value", [2.5, True, "x", [1], {"a": 1}])
def test_a_key_that_nobody_knows_is_refused_unless_it_is_off(
    draft_dir: Path, target: TargetGeometry, value: object
) -> None:
    for harmless in (0, False, "", [], {}):
        rewrite_config(draft_dir, attention_swirl=harmless, initializer_range=value)
        load_draft(draft_dir, target)
    rewrite_config(draft_dir, attention_swirl=value)
    assert f"attention_swirl is {value!r}" in failure(draft_dir, target)


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("eagle_config", "rope_is_neox_style", False),
        ("eagle_config", "attention_bias", True),
        ("rope_scaling", "sliding_window", 512),
        ("rope_scaling", "max_position_embeddings", 7),
    ],
)
def test_a_key_of_the_layer_where_nobody_reads_it_is_refused_if_it_says_something_else(
    draft_dir: Path, target: TargetGeometry, place: str, key: str, value: object
) -> None:
    kept = {"rope_type": "default"} if place == "rope_scaling" else {}
    rewrite_config(draft_dir, **{place: {**kept, key: value}})
    assert f"{place}: {key} is {value!r}" in failure(draft_dir, target)
    hidden = json.loads((draft_dir / "config.json").read_text())["hidden_size"]
    rewrite_config(draft_dir, **{place: {**kept, "hidden_size": hidden}})
    load_draft(draft_dir, target)


@pytest.mark.parametrize(
    ("keys", "tensor", "named"),
    [
        ({}, "layers.0.self_attn.kv_a_proj_with_mqa.weight", "latent attention (MLA)"),
        ({"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, None, "latent attention (MLA)"),
        ({}, "mask_hidden", "P-EAGLE"),
        ({"architectures": ["PEagleDraftModel"]}, None, "P-EAGLE"),
        ({"architectures": ["DFlashDraftModel"]}, None, "DFlash"),
        ({"architectures": ["Qwen3DSparkModel"]}, None, "DSpark"),
        ({"architectures": ["DeepSeekMTPModel"]}, None, "MTP"),
        ({}, "parallel_draft_heads.0.weight", "parallel draft heads"),
        ({}, "midlayer.mlp.up_proj.weight_scale", "quantised"),
        ({}, "midlayer.1.mlp.up_proj.weight", "several layers"),
        ({}, "layers.1.mlp.up_proj.weight", "several layers"),
        ({"speculators_model_type": "mlp_speculator"}, None, "another kind of speculator"),
    ],
)
def test_another_kind_of_head_is_named_and_no_defect(
    draft_dir: Path, target: TargetGeometry, keys: dict[str, Any], tensor: str | None, named: str
) -> None:
    rewrite_config(draft_dir, **keys)
    if tensor is not None:
        change(draft_dir, tensor, torch.ones(4))
    message = failure(draft_dir, target)
    assert named in message
    assert "no defect of the file" in message


def test_an_eagle1_head_is_recognised(draft_dir: Path, target: TargetGeometry) -> None:
    def strip(weights: dict[str, torch.Tensor]) -> None:
        for name in ("midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"):
            weights.pop(name)

    edit_weights(draft_dir, strip)
    message = failure(draft_dir, target)
    assert "like an EAGLE-1 or EAGLE-2 head" in message
    assert "set method='eagle'" in message


@pytest.mark.parametrize("name", ["fc.scale", "midlayer.self_attn.r_norm.weight", "midlayer.self_attn.o_proj.bias"])
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


def test_a_map_that_names_an_id_twice_is_refused(draft_dir: Path, target: TargetGeometry) -> None:
    offsets = load_file(draft_dir / "model.safetensors")["d2t"]
    offsets[11] = offsets[10] - 1
    change(draft_dir, "d2t", offsets)
    message = failure(draft_dir, target)
    assert "maps draft ids 10 and 11 to" in message
    assert "every target id once" in message


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize(("mistake", "said"), [("ids", "absolute ids"), ("arange", "holds 0, 1, 2 ...")])
def test_tables_that_hold_no_offsets_are_named_with_their_mistake(
    draft_dir: Path, target: TargetGeometry, proven: bool, mistake: str, said: str
) -> None:
    # Ids so low that taking them for offsets stays within the vocabulary: nothing but the proof tells them apart.
    ids = torch.arange(128) + torch.arange(128) // 3
    mask = torch.zeros(512, dtype=torch.bool).index_fill_(0, ids, True)
    change(draft_dir, "t2d", mask if proven else None)
    change(draft_dir, "d2t", ids - torch.arange(128))
    load_draft(draft_dir, target)
    change(draft_dir, "d2t", ids if mistake == "ids" else torch.arange(128))
    assert said in failure(draft_dir, target)


def test_zeros_and_another_heads_map_are_contradicted_by_the_mask(draft_dir: Path, target: TargetGeometry) -> None:
    offsets = load_file(draft_dir / "model.safetensors")["d2t"]
    change(draft_dir, "d2t", torch.cat([offsets[1:], offsets[-1:]]) + 1)
    assert "another head's" in failure(draft_dir, target)
    change(draft_dir, "d2t", torch.zeros(128, dtype=torch.int64))
    change(draft_dir, "t2d", torch.ones(512, dtype=torch.bool))
    assert "never loaded" in failure(draft_dir, target)


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
