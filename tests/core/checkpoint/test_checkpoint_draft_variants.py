"""Variants that a draft's config asks for: one that is not built, or that its file contradicts, is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_drafts import IDS, change, failure
from random_pairs import rewrite_config, write_random_pair

from eagle3core.checkpoint import load_draft, load_target
from eagle3core.geometry import TargetGeometry

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("ids", [[0, 3, 9], [-2, 3, 4], [3, 1, 5], [3, 3, 5]])
def test_taps_outside_the_target_or_out_of_order_are_refused(
    draft_dir: Path, target: TargetGeometry, ids: list[int]
) -> None:
    rewrite_config(draft_dir, **{IDS: ids})
    message = failure(draft_dir, target)
    assert f"are {ids} ('input' numbering) on a target of 8 layers" in message
    assert "distinct ascending ids from 0 to 8" in message


def test_two_lists_that_name_different_layers_are_refused(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, **{IDS: [0, 3, 6], "eagle_config": {IDS: [0, 3, 6]}})
    assert "name different layers" in failure(draft_dir, target)


def test_default_taps_are_refused_when_the_target_is_too_shallow(tmp_path: Path) -> None:
    target_dir, draft_dir = write_random_pair(tmp_path / "six", n_layers=6)
    message = failure(draft_dir, load_target(target_dir).geometry)
    assert "the default taps of 6 layers are [2, 3, 3]" in message
    assert "at least 7 layers" in message
    target_dir, draft_dir = write_random_pair(tmp_path / "seven", n_layers=7)
    assert load_draft(draft_dir, load_target(target_dir).geometry).geometry.taps == (2, 3, 4)


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_output": False},
        {"norm_output": True},
        {"eagle_config": {"use_last_layernorm": False}},
        {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
        {"eagle_config": {"parallel_draft_step": 4}},
        {"eh_proj_before_attn": True},
        {"partial_rotary_factor": 0.5},
        {"final_logit_softcapping": 30.0},
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


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"fc_norm": True}, "fc_norm.0.weight"),
        ({"attention_bias": True}, "midlayer.self_attn.q_proj.bias"),
        ({"mlp_bias": True}, "midlayer.mlp.gate_proj.bias"),
        ({"bias": True}, "fc.bias"),
        ({"use_qk_norm": True}, "midlayer.self_attn.q_norm.weight"),
    ],
)
def test_a_variant_whose_tensors_are_missing_is_refused(
    draft_dir: Path, target: TargetGeometry, keys: dict[str, Any], missing: str
) -> None:
    rewrite_config(draft_dir, **keys)
    message = failure(draft_dir, target)
    assert "lacks" in message
    assert missing in message


def test_an_activation_that_is_not_built_is_refused(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, hidden_act="quick_gelu")
    assert "hidden_act is 'quick_gelu'" in failure(draft_dir, target)


def test_a_window_is_that_of_the_layer_where_a_key_says_that_it_has_one(
    draft_dir: Path, target: TargetGeometry
) -> None:
    has_one = ({"layer_types": ["sliding_attention"]}, {"use_sliding_window": True})
    has_none = ({"layer_types": ["full_attention"]}, {"use_sliding_window": False}, {})
    for keys, window in [*((keys, 2048) for keys in has_one), *((keys, 0) for keys in has_none)]:
        rewrite_config(draft_dir, sliding_window=2048, layer_types=None, use_sliding_window=None)
        rewrite_config(draft_dir, **keys)
        assert load_draft(draft_dir, target).geometry.window == window


def test_a_window_without_its_length_is_refused(draft_dir: Path, target: TargetGeometry) -> None:
    rewrite_config(draft_dir, layer_types=["sliding_attention"])
    assert "sliding_window is missing" in failure(draft_dir, target)


def test_a_tie_that_readers_take_differently_is_refused(tmp_path: Path, target: TargetGeometry) -> None:
    directory = write_random_pair(tmp_path, draft_vocab=None)[1]
    rewrite_config(directory, tie_word_embeddings=True)
    load_draft(directory, target)  # the head that is stored was trained
    change(directory, "embed_tokens.weight", torch.ones(512, 64))
    assert "differs from embed_tokens.weight" in failure(directory, target)
    change(directory, "embed_tokens.weight", None)
    change(directory, "lm_head.weight", None)
    assert "readers take different tensors" in failure(directory, target)


def test_a_speculators_file_must_state_its_residual(tmp_path: Path, target: TargetGeometry) -> None:
    directory = write_random_pair(tmp_path, layout="speculators")[1]
    rewrite_config(directory, norm_before_residual=None)
    assert "norm_before_residual is missing" in failure(directory, target)
