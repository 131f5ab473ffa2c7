"""A target loads exactly as stored, or the error names file, tensor and value."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file, save_file

from eagle3core.checkpoint import load_target
from eagle3core.checkpoint.tensors import require_finite
from eagle3core.errors import CheckpointError
from eagle3core.weights import pack_checkpoints

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that tests copy before damaging it."""
    return write_random_pair(tmp_path_factory.mktemp("pair"), n_layers=2, taps=(0, 1, 2))[0]


@pytest.fixture
def target_dir(pristine: Path, tmp_path: Path) -> Path:
    """An own copy of the pristine target."""
    return Path(shutil.copytree(pristine, tmp_path / "target"))


def change_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (double underscore for a dot); None removes one."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        weights.pop(name, None)
        if value is not None:
            weights[name] = value
    save_file(weights, path)


def failure(directory: Path, **kwargs: Any) -> str:
    """The message with which loading ends."""
    with pytest.raises(CheckpointError) as caught:
        load_target(directory, **kwargs)
    assert "\n  allowed: " in str(caught.value)
    assert "\n  do: " in str(caught.value)
    return str(caught.value)


def test_a_target_is_loaded_bit_for_bit(pristine: Path) -> None:
    stored = load_file(pristine / "model.safetensors")
    loaded = load_target(pristine)
    assert set(loaded.weights) == set(stored)
    assert all(torch.equal(loaded.weights[name], stored[name]) for name in stored)
    assert loaded.dtype == torch.float32
    assert (loaded.geometry.n_layers, loaded.geometry.vocab_size, loaded.geometry.block.head_dim) == (2, 512, 16)


def test_a_target_is_cast_to_the_asked_dtype(pristine: Path) -> None:
    loaded = load_target(pristine, dtype=torch.float64)
    assert loaded.dtype == torch.float64
    assert {weight.dtype for weight in loaded.weights.values()} == {torch.float64}


def test_a_bf16_target_keeps_its_dtype_when_none_is_asked(tmp_path: Path) -> None:
    directory, _ = write_random_pair(tmp_path, n_layers=1, taps=(0, 1), dtype=torch.bfloat16)
    assert load_target(directory).dtype == torch.bfloat16


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    directory, _ = write_random_pair(tmp_path, n_layers=1, taps=(0, 1), tie=True)
    loaded = load_target(directory)
    assert loaded.weights["lm_head.weight"] is loaded.weights["model.embed_tokens.weight"]


@pytest.mark.parametrize("packs", [True, False])
def test_packing_leaves_no_raw_tensor_behind_under_a_tied_heads_name(tmp_path: Path, packs: bool) -> None:
    directory, _ = write_random_pair(tmp_path, n_layers=1, taps=(0, 1), tie=True)
    checkpoint = load_target(directory, dtype=torch.bfloat16)
    pack_checkpoints(checkpoint, None, device=torch.device("cpu"), block=16, packs=packs)
    assert checkpoint.weights == {}


def test_a_tied_target_with_another_stored_head_is_refused(target_dir: Path) -> None:
    rewrite_config(target_dir, tie_word_embeddings=True)
    assert "tie_word_embeddings is true" in failure(target_dir)


def test_biases_are_loaded_when_the_config_has_them(tmp_path: Path) -> None:
    directory, _ = write_random_pair(tmp_path, n_layers=1, taps=(0, 1), bias=True)
    weights = load_target(directory).weights
    assert weights["model.layers.0.self_attn.o_proj.bias"].shape == (64,)
    assert weights["model.layers.0.mlp.down_proj.bias"].shape == (64,)


def test_shards_named_by_an_index_are_read(target_dir: Path) -> None:
    whole = load_file(target_dir / "model.safetensors")
    names = sorted(whole)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: whole[name] for name in part}, target_dir / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (target_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (target_dir / "model.safetensors").unlink()
    assert all(torch.equal(load_target(target_dir).weights[name], whole[name]) for name in names)
    (target_dir / "b.safetensors").unlink()
    message = failure(target_dir)
    assert "b.safetensors does not exist" in message
    assert f"puts {len(shards['b.safetensors'])} tensors there" in message
    save_file({names[1]: whole[names[1]]}, target_dir / "b.safetensors")
    assert f"lacks {len(shards['b.safetensors']) - 1} tensors" in failure(target_dir)


def test_the_end_tokens_of_both_configs_are_merged(target_dir: Path) -> None:
    (target_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load_target(target_dir).geometry.eos_token_ids == (7, 2, 9)
    rewrite_config(target_dir, eos_token_id=[3, 9])
    assert load_target(target_dir).geometry.eos_token_ids == (7, 2, 9, 3)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert "target directory" in failure(tmp_path / "nowhere")
    assert "does not exist" in failure(tmp_path / "nowhere")


def test_a_missing_config_is_named_with_what_is_there(target_dir: Path) -> None:
    (target_dir / "config.json").rename(target_dir / "config.yaml")
    message = failure(target_dir)
    assert "config.json does not exist" in message
    assert "config.yaml, model.safetensors" in message


def test_missing_weights_are_named(target_dir: Path) -> None:
    (target_dir / "model.safetensors").unlink()
    assert "holds no weights (found config.json)" in failure(target_dir)


def test_an_unreadable_config_is_named(target_dir: Path) -> None:
    (target_dir / "config.json").write_text('{"model_type": "llama",')
    assert "cannot be read as JSON" in failure(target_dir)
    (target_dir / "config.json").write_text("[" * 100_000)
    assert "cannot be read as JSON: maximum recursion depth" in failure(target_dir)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_hidden_layers": 9999}, "num_hidden_layers is 9999\n  allowed: no more than the"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000\n  allowed: at most 10000"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 6}, "hidden_size is 64"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is 'a method without a name, 4 bits'"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"eos_token_id": [2, 2**31]}, "eos_token_id is [2, 2147483648]"),
    ],
)
def test_an_unusable_key_is_named_with_its_value(target_dir: Path, change: dict[str, Any], shown: str) -> None:
    rewrite_config(target_dir, **change)
    assert shown in failure(target_dir)


def test_a_truncated_file_is_named_with_both_sizes(target_dir: Path) -> None:
    path = target_dir / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    message = failure(target_dir)
    assert f"is {len(whole) - 1000} bytes long, truncated" in message
    assert f"{len(whole)} bytes, as its header says" in message
    path.write_bytes(whole[:20])
    assert "(20 bytes) has no readable safetensors header" in failure(target_dir)
    path.write_bytes(b"")
    assert "(0 bytes) has no readable safetensors header" in failure(target_dir)


def test_a_missing_tensor_is_named(target_dir: Path) -> None:
    change_weights(target_dir, model__layers__1__mlp__up_proj__weight=None)
    assert "lacks 1 tensors: model.layers.1.mlp.up_proj.weight" in failure(target_dir)


def test_a_tensor_without_a_place_is_named(target_dir: Path) -> None:
    change_weights(target_dir, model__layers__1__self_attn__q_norm__weight=torch.ones(16))
    message = failure(target_dir)
    assert "1 tensors with no place in this model: model.layers.1.self_attn.q_norm.weight" in message


def test_stored_inverse_frequencies_are_ignored(target_dir: Path) -> None:
    change_weights(target_dir, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in load_target(target_dir).weights


def test_a_wrong_shape_is_named_with_both_shapes(target_dir: Path) -> None:
    change_weights(target_dir, model__layers__0__self_attn__k_proj__weight=torch.ones(64, 64))
    message = failure(target_dir)
    assert "tensor model.layers.0.self_attn.k_proj.weight has shape [64, 64]" in message
    assert "[32, 64]" in message


def test_integer_weights_are_refused(target_dir: Path) -> None:
    change_weights(target_dir, model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert "tensor model.norm.weight has dtype int8" in failure(target_dir)


def test_non_finite_weights_are_counted_and_located(target_dir: Path) -> None:
    weight = torch.ones(128, 64)
    weight[3, 5] = float("nan")
    weight[7, 0] = float("inf")
    change_weights(target_dir, model__layers__0__mlp__gate_proj__weight=weight)
    message = failure(target_dir)
    assert "model.layers.0.mlp.gate_proj.weight (float32) holds 2 non-finite values of 8192" in message
    assert "first nan at index [3, 5]" in message


def test_a_weight_that_overflows_in_float16_is_refused_there_only(target_dir: Path) -> None:
    change_weights(target_dir, model__norm__weight=torch.full((64,), 1e6))
    assert load_target(target_dir, dtype=torch.bfloat16).dtype == torch.bfloat16
    message = failure(target_dir, dtype=torch.float16)
    assert "cast to float16 holds 64 non-finite values" in message
    assert "run in bfloat16 or float32" in message
    with pytest.raises(CheckpointError, match="cast to float16 holds 64 non-finite values"):
        load_target(target_dir, dtype=torch.float16, casts=False)


def test_a_value_at_the_end_of_a_long_weight_is_looked_at_too() -> None:
    weight = torch.zeros(3, 1 << 17)  # longer than what is looked at together
    weight[2, -1] = float("inf")
    with pytest.raises(
        CheckpointError, match=r"x holds 1 non-finite values of 393216, first inf at index \[2, 131071\]"
    ):
        require_finite(weight, weight.dtype, "x", "mend it")


def test_a_pickle_that_holds_code_is_never_run(target_dir: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (target_dir / "executed",)

    (target_dir / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload()}, target_dir / "pytorch_model.bin")
    assert "cannot be read with weights_only=True" in failure(target_dir)
    assert not (target_dir / "executed").exists()
