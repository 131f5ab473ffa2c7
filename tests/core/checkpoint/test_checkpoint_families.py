"""Each family of targets is read as its own transformers class reads it; what is not built is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_pairs import rewrite_config, write_random_pair
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3core.checkpoint import load_target
from eagle3core.errors import CheckpointError

pytestmark = pytest.mark.reference

SMALL: dict[str, Any] = {
    "n_layers": 2, "hidden": 32, "ffn": 48, "head_dim": 16, "vocab": 32, "draft_vocab": None, "taps": (0, 1),
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small target of every family."""
    root = tmp_path_factory.mktemp("families")
    # Qwen2's class takes its head size from the widths alone.
    sizes = {family: {"head_dim": 8} if family == "qwen2" else {} for family in FAMILIES}
    return {
        family: write_random_pair(root / family, **{**SMALL, **sizes[family], "family": family})[0]
        for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_brings_the_tensors_of_its_transformers_class(targets: dict[str, Path], family: str) -> None:
    config = AutoConfig.from_pretrained(targets[family])
    with torch.device("meta"):
        theirs = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    assert {name: tuple(t.shape) for name, t in load_target(targets[family]).weights.items()} == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_silent_config_means_what_the_class_defaults_to(
    targets: dict[str, Path], family: str, tmp_path: Path
) -> None:
    silent = ("max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "use_sliding_window")
    copied = tmp_path / "target"
    copied.mkdir()
    values = json.loads((targets[family] / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({key: v for key, v in values.items() if key not in silent}))
    (copied / "model.safetensors").symlink_to(targets[family] / "model.safetensors")
    geometry, config = load_target(copied).geometry, AutoConfig.from_pretrained(copied)
    assert geometry.max_position_embeddings == config.max_position_embeddings
    assert geometry.block.rms_norm_eps == config.rms_norm_eps
    assert geometry.block.rope.theta == config.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("family", "change", "shown"),
    [
        ("mistral", {"sliding_window": 1024}, "sliding_window is '1024 on 2 of 2 layers'"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1},
            "'512 on 1 of 2 layers'",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
            "'64 on 1 of 2 layers'",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config is 'gptq, 4 bits'",
        ),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is 'fp8'"),
        ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}, "is 'compressed-tensors'"),
        ("llama", {"model_type": "gemma3"}, "model_type is 'gemma3'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    targets: dict[str, Path], tmp_path: Path, family: str, change: dict[str, Any], shown: str
) -> None:
    directory = tmp_path / "target"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((targets[family] / name).read_bytes())
    rewrite_config(directory, **change)
    with pytest.raises(CheckpointError) as caught:
        load_target(directory)
    assert shown in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_partial_rotation_is_refused_where_transformers_does_not_know_it(
    targets: dict[str, Path], tmp_path: Path, family: str
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((targets[family] / name).read_bytes())
    rewrite_config(tmp_path, partial_rotary_factor=0.5)
    with pytest.raises(CheckpointError) as caught:
        load_target(tmp_path)
    for part in ("partial_rotary_factor is 0.5", "readers disagree", "set it to 1"):
        assert part in str(caught.value)
    ids = torch.arange(12)[None]
    theirs, whole = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (tmp_path, targets[family]))
    assert torch.equal(theirs(ids).logits, whole(ids).logits)  # other readers give other logits: hence the refusal


def test_modelopts_own_file_of_a_method_is_read_too(targets: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((targets["qwen3"] / name).read_bytes())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match="quant_algo is 'NVFP4'"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": 2048}),  # as many as there are positions
        ("qwen2", {"use_sliding_window": False, "sliding_window": 128}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}),
    ],
)
def test_a_window_that_nothing_can_leave_is_no_window(
    targets: dict[str, Path], tmp_path: Path, family: str, change: dict[str, Any]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((targets[family] / name).read_bytes())
    rewrite_config(tmp_path, **change)
    assert load_target(tmp_path).geometry.n_layers == 2
