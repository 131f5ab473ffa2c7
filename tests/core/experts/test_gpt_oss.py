"""gpt-oss: its files are read or refused by key, and its window is of token positions, in trees too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_pairs import MXFP4, write_random_pair
from safetensors.torch import load_file, save_file
from tiny_engines import random_prompts, tree_runner
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3core.checkpoint import load_target
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.target import read_target_geometry, target_shapes
from eagle3core.config import EngineConfig
from eagle3core.errors import CheckpointError
from eagle3core.geometry import TargetGeometry
from eagle3core.kernels.experts import Mxfp4Matrices
from eagle3core.step.admission import SlotRequest
from eagle3core.step.kernel_limits import why_plain_torch
from eagle3core.step.tree import FlatTree
from eagle3core.trace import RecordingTrace
from eagle3core.weights import PackedExperts, pack_checkpoints
from lab.parity.hf_target import TargetReference
from lab.probes.bench.floors import step_floor, weight_bytes

pytestmark = pytest.mark.reference

SMALL: dict[str, Any] = {
    "family": "gpt_oss", "n_layers": 3, "hidden": 32, "ffn": 64, "head_dim": 16, "vocab": 48, "draft_vocab": None,
    "taps": (0, 1, 2), "eos": [],
}  # fmt: skip
WINDOW = 4
# Three branches, the longest of seven drafts, whose rows lie further apart than a window's positions.
TREE = FlatTree((-1, 0, 0, 0, 1, 1, 2, 3, 4, 6, 7, 8, 8, 10, 11, 13, 14, 16))


@pytest.fixture(scope="module", params=["plain", "MXFP4"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"quantization_config": MXFP4} if request.param == "MXFP4" else {}
    folder = tmp_path_factory.mktemp("gpt_oss")
    return write_random_pair(folder, **SMALL, sliding_window=WINDOW, seed=5, **more)[0]


def published(**changes: Any) -> dict[str, Any]:
    """The config of gpt-oss-120b as it is published."""
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "num_local_experts": 128, "pad_token_id": 199999, "quantization_config": MXFP4,
        "rms_norm_eps": 1e-5, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": 201088, **changes,
    }  # fmt: skip


def geometry_of(config: dict[str, Any], folder: Path) -> TargetGeometry:
    return read_target_geometry(Settings(config, "config.json"), folder)


def test_the_published_config_of_the_120b_gives_its_sizes(tmp_path: Path) -> None:
    geometry = geometry_of(published(), tmp_path)
    experts = geometry.block.experts
    assert experts is not None
    assert (experts.n, experts.n_chosen, experts.gate, experts.is_mxfp4) == (128, 4, "clamped", True)
    assert geometry.windows[:3] == (128, 0, 128)
    assert geometry.block.rope.truncate is False
    assert weight_bytes(geometry, 2) / 1e9 == pytest.approx(65.2, abs=0.1)
    # ms at 4578 GB/s where all experts are alike likely: 1.09 for one row, 2.26 for four.
    for batch, ms in ((1, 1.09), (4, 2.26)):
        assert step_floor(geometry, None, k=0, batch=batch, cached=0, itemsize=2).ms(4578.0) == pytest.approx(
            ms, abs=0.01
        )
    reason = why_plain_torch(geometry, None, EngineConfig(), torch.bfloat16)
    assert "expert" not in (reason or "")  # its window and sinks are attention's


def test_all_but_its_experts_runs_on_the_kernels(tmp_path: Path) -> None:
    geometry = geometry_of(published(), tmp_path)
    dense = replace(geometry, block=replace(geometry.block, experts=None))
    assert dense.block.has_sinks
    assert why_plain_torch(dense, None, EngineConfig(), torch.bfloat16) is None


def test_a_silent_config_means_what_the_class_defaults_to(tmp_path: Path) -> None:
    said = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    silent = {key: value for key, value in published().items() if key in said}
    assert geometry_of(silent, tmp_path) == geometry_of(
        published(quantization_config=None, eos_token_id=None), tmp_path
    )


def test_they_are_the_tensors_of_the_transformers_class(tmp_path: Path) -> None:
    directory, _ = write_random_pair(tmp_path, **SMALL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert dict(target_shapes(load_target(directory).geometry)) == theirs


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"swiglu_limit": 8.0}, "swiglu_limit is 8.0"),
        ({"layer_types": ["full_attention"] * 35}, "a list of 36, 'sliding_attention' or 'full_attention'"),
        ({"layer_types": ["chunked_attention"] * 36}, "layer_types is"),
        ({"intermediate_size": 2881}, "intermediate_size is 2881"),
        ({"num_experts_per_tok": 200}, "at most 128, the experts there are"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'"),
        ({"model_type": "qwen3", "layer_types": None}, "quantization_config is 'mxfp4'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(changes: dict[str, Any], shown: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        geometry_of(published(**changes), tmp_path)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        (lambda scales: scales.fill_(255), "holds the scale 255"),
        (lambda scales: scales.float(), "has dtype float32"),
        (lambda scales: scales[:, :, :1].contiguous(), "has shape"),
    ],
)
def test_scales_that_give_no_numbers_are_refused(spoil: Any, shown: str, tmp_path: Path) -> None:
    directory, _ = write_random_pair(tmp_path, **SMALL, quantization_config=MXFP4)
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**weights, name: spoil(weights[name])}, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_target(directory)
    assert shown in str(caught.value)
    assert name in str(caught.value)


def test_experts_in_4_bits_stay_as_they_are_stored(tmp_path: Path) -> None:
    directory, _ = write_random_pair(tmp_path, **SMALL, quantization_config=MXFP4)
    checkpoint = load_target(directory)
    packed, _ = pack_checkpoints(checkpoint, None, device=torch.device("cpu"), block=4, packs=False)
    weights = load_file(directory / "model.safetensors")
    for i, layer in enumerate(packed.layers):
        assert isinstance(layer.mlp, PackedExperts)
        for name, maps in (("gate_up", layer.mlp.gate_up), ("down", layer.mlp.down)):
            assert isinstance(maps, Mxfp4Matrices)
            prefix = f"model.layers.{i}.mlp.experts.{name}_proj"
            assert torch.equal(maps.blocks, weights[f"{prefix}_blocks"])
            assert torch.equal(maps.scales, weights[f"{prefix}_scales"])
    held = sum(tensor.nbytes for layer in packed.layers for tensor in layer.tensors)
    assert held == sum(t.nbytes for name, t in weights.items() if ".layers." in name)


@pytest.mark.parametrize("n_prompt", [2, 13])
def test_a_node_of_a_tree_sees_its_window_by_position_and_not_by_row(target: Path, n_prompt: int) -> None:
    """Node by node: logits are those of transformers over the prompt and the node's own path, in fp64."""
    runner, trace = tree_runner(target, TREE), RecordingTrace()
    prompt = random_prompts([n_prompt], n_vocab=48, seed=1)[0]
    tokens = random_prompts([TREE.n_nodes], n_vocab=48, seed=2)[0]
    runner.admit(0, SlotRequest(0, prompt, 20, ()), RecordingTrace())
    tokens[0] = runner.collect(everything=True)[0].rows[0].tokens[0]
    runner.state.step.drafted.copy_(torch.tensor(tokens))
    runner.enqueue(1, 0, trace)
    runner.collect(everything=True)
    reference = TargetReference(target, dtype=torch.float64, compute_dtype=torch.float64, device=torch.device("cpu"))
    assert int(TREE.depths.max()) > WINDOW
    for node in range(TREE.n_nodes):
        path = [tokens[i] for i in TREE.mask[node].nonzero()[:, 0].tolist()]
        expected = reference.run(prompt + path)["head"][-1]
        found = trace.tensors["verify/target.head"][node, :48]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        shorter = reference.run((prompt + path)[-WINDOW:])["head"][-1]  # another text, where more is seen by some layer
        assert len(prompt + path) <= WINDOW or not torch.allclose(found, shorter, rtol=1e-3)
