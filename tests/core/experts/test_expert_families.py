"""Targets with experts: read as their transformers class reads them, in one file or many, and refused by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_heads import write_fp8
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3core.checkpoint import load_target, preflight, target_of, target_shapes
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.target import read_target_geometry
from eagle3core.errors import CheckpointError
from eagle3core.geometry import ExpertsGeometry
from eagle3core.weights import PackedExperts, PackedMlp, pack_checkpoints

pytestmark = pytest.mark.reference

SMALL: dict[str, Any] = {
    "n_layers": 4, "hidden": 32, "ffn": 48, "head_dim": 16, "vocab": 32, "draft_vocab": None, "taps": (0, 1, 3),
    "family": "qwen3_moe",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Four layers, of which the second is dense by list and the others have experts."""
    return write_random_pair(tmp_path_factory.mktemp("experts"), **SMALL, mlp_only_layers=[1])


def copied(source: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    rewrite_config(folder, **changes)
    return folder


def test_experts_and_the_layers_without_are_read_from_the_config(pair: tuple[Path, Path]) -> None:
    geometry = load_target(pair[0]).geometry
    assert geometry.block.experts == ExpertsGeometry(n=8, n_chosen=3, intermediate_size=24, is_normalised=True)
    assert (geometry.dense_layers, geometry.n_expert_layers) == ((1,), 3)
    assert geometry.block_of(1).experts is None
    assert geometry.block_of(2) is geometry.block


def test_they_are_as_many_weights_as_the_transformers_class_has(pair: tuple[Path, Path]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pair[0]))
    ours = sum(torch.Size(shape).numel() for _, shape in target_shapes(load_target(pair[0]).geometry))
    assert ours == sum(t.numel() for t in model.state_dict().values())


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 2, 3)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [0]}, (0, 1, 3)),
    ],
)
def test_layers_with_experts_are_those_of_the_transformers_class(
    tmp_path: Path, changes: dict[str, Any], dense: tuple[int, ...]
) -> None:
    target, _ = write_random_pair(tmp_path, **SMALL, **changes)
    geometry = load_target(target).geometry
    assert geometry.dense_layers == dense
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target)).model.layers
    assert tuple(i for i, layer in enumerate(layers) if not hasattr(layer.mlp, "experts")) == dense


def test_a_silent_config_means_what_the_class_defaults_to(tmp_path: Path) -> None:
    target, _ = write_random_pair(
        tmp_path, **{**SMALL, "n_layers": 1, "taps": (0,)}, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=False,
    )  # fmt: skip
    silent = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "rms_norm_eps")
    rewrite_config(target, **dict.fromkeys(silent))
    geometry, config = load_target(target).geometry, AutoConfig.from_pretrained(target)
    experts = geometry.block.experts
    assert experts is not None
    assert (experts.n, experts.n_chosen, experts.intermediate_size, experts.is_normalised) == (
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob,
    )  # fmt: skip
    assert geometry.block.rms_norm_eps == config.rms_norm_eps


def test_a_target_whose_layers_are_all_dense_has_no_experts(tmp_path: Path) -> None:
    target, _ = write_random_pair(tmp_path, **SMALL, mlp_only_layers=[0, 1, 2, 3])
    geometry = load_target(target).geometry
    assert (geometry.block.experts, geometry.dense_layers) == (None, ())


def test_a_width_that_no_layer_has_takes_no_memory(pair: tuple[Path, Path], tmp_path: Path) -> None:
    few = target_of(copied(pair[0], tmp_path / "dense", intermediate_size=96))
    assert few.block.intermediate_size == 96, "one layer is dense"
    everywhere = target_of(copied(pair[0], tmp_path / "experts", intermediate_size=10**9, mlp_only_layers=[]))
    assert everywhere.block.intermediate_size == everywhere.block.experts.intermediate_size  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"num_experts_per_tok": 9}, ("num_experts_per_tok is 9", "at most 8")),
        ({"num_experts": 7}, ("no place in this model",)),
        ({"num_experts": 9}, ("lacks 9 tensors: model.layers.0.mlp.experts.8.gate_proj.weight",)),
        ({"num_experts": 10**6}, ("num_experts is 1000000", "in all of the 3 layers with experts no more than the")),
        ({"num_hidden_layers": 2**31 - 1}, ("num_hidden_layers is 2147483647", "at most 10000")),
        ({"num_local_experts": 4}, ("num_local_experts is 4", "8, as num_experts says")),
        ({"mlp_only_layers": [4]}, ("mlp_only_layers is", "layers of 0 to 3")),
        ({"moe_intermediate_size": 32}, ("has shape [24, 32]", "[32, 32]")),
        ({"norm_topk_prob": "yes"}, ("norm_topk_prob is 'yes'",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config is 'fp8'",)),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(
    pair: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], shown: tuple[str, ...]
) -> None:
    directory = copied(pair[0], tmp_path / "target", **changes)
    with pytest.raises(CheckpointError) as caught:
        load_target(directory)
    for part in shown:
        assert part in str(caught.value)
    assert preflight(directory, pair[1]).errors


@pytest.mark.parametrize("method", ["modelopt", "fp8"])
def test_experts_in_fp8_are_read_as_the_values_they_mean(pair: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    quantised = write_fp8(pair[0], tmp_path / "target", method)
    read, twin = (load_target(path, dtype=torch.float32) for path in (quantised, tmp_path / "target_twin"))
    assert read.geometry == twin.geometry
    assert any(".experts." in name for name in twin.weights)
    assert all(torch.equal(read.weights[name], twin.weights[name]) for name in twin.weights)


def test_shards_give_the_weights_of_one_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    weights = load_file(pair[0] / "model.safetensors")
    (tmp_path / "config.json").write_bytes((pair[0] / "config.json").read_bytes())
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for i, (name, tensor) in enumerate(sorted(weights.items())):
        shards.setdefault(f"model-{i % 3}.safetensors", {})[name] = tensor
    for name, held in shards.items():
        save_file(held, tmp_path / name)
    index = {"weight_map": {tensor: name for name, held in shards.items() for tensor in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, sharded = load_target(pair[0]), load_target(tmp_path)
    assert whole.geometry == sharded.geometry
    assert all(torch.equal(whole.weights[name], sharded.weights[name]) for name in whole.weights)


def test_packed_experts_are_the_checkpoints_matrices(pair: tuple[Path, Path]) -> None:
    checkpoint = load_target(pair[0])
    weights = dict(checkpoint.weights)
    packed, _ = pack_checkpoints(checkpoint, None, device=torch.device("cpu"), block=4, packs=False)
    assert [type(layer.mlp) for layer in packed.layers] == [PackedExperts, PackedMlp, PackedExperts, PackedExperts]
    experts, prefix = packed.layers[2].mlp, "model.layers.2.mlp."
    assert isinstance(experts, PackedExperts)
    assert torch.equal(experts.router, weights[f"{prefix}gate.weight"])
    for i in range(8):
        gate, up, down = (weights[f"{prefix}experts.{i}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(experts.gate_up.of(i, torch.float32), torch.cat([gate, up]))
        assert torch.equal(experts.down.of(i, torch.float32), down)
    held = sum(tensor.numel() for layer in packed.layers for tensor in layer.tensors)
    shapes = [shape for name, shape in target_shapes(packed.geometry) if ".layers." in name]
    assert held == sum(torch.Size(shape).numel() for shape in shapes)


def test_the_published_config_of_the_30b_gives_its_sizes(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    geometry = read_target_geometry(Settings(config, "config.json"), tmp_path)
    assert geometry.dense_layers == ()
    n = sum(torch.Size(shape).numel() for _, shape in target_shapes(geometry))
    assert n / 1e9 == pytest.approx(30.53, abs=0.01)


def test_experts_are_read_more_of_by_more_rows() -> None:
    experts = ExpertsGeometry(n=128, n_chosen=4, intermediate_size=2880)
    assert experts.n_read(1) == pytest.approx(4)
    # Uniform routing of 4 of 128: 15.3 distinct for 4 rows, 51.0 for 16.
    assert [round(experts.n_read(rows), 1) for rows in (4, 16)] == [15.3, 51.0]
    assert replace(experts, n=32).n_read(16) == pytest.approx(28.2, abs=0.05)
