"""FP8 checkpoints of three writers mean their dequantised twins; other ways of quantising are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Draft, Target, speculate
from quantised_heads import CONFIGS, write_fp8
from random_pairs import rewrite_config
from rings import slow_but
from safetensors.torch import load_file, save_file
from tiny_engines import Pair, engine_config, new_tokens, random_prompts

from eagle3core import CheckpointError, Engine, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target, preflight

pytestmark = pytest.mark.reference

METHODS = {method: (method, False) for method in CONFIGS} | {"modelopt's own file": ("modelopt", True)}


@pytest.fixture(scope="module", params=slow_but(["modelopt", "fp8"], METHODS))
def quantised_pair(request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Both models of the tiny pair in one writer's FP8; their twins lie beside them."""
    folder, (method, beside) = tmp_path_factory.mktemp("fp8"), METHODS[request.param]
    return (
        write_fp8(pair[0], folder / "target", method, beside=beside),
        write_fp8(pair[1], folder / "draft", method, beside=beside),
    )


def twins(pair: Pair) -> Pair:
    return pair[0].with_name("target_twin"), pair[1].with_name("draft_twin")


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_target_is_its_dequantised_twin(quantised_pair: Pair, dtype: torch.dtype, casts: bool) -> None:
    read, twin = (load_target(path, dtype=dtype, casts=casts) for path in (quantised_pair[0], twins(quantised_pair)[0]))
    assert read.geometry == twin.geometry
    assert read.weights.keys() == twin.weights.keys()
    assert all(torch.equal(read.weights[name].to(dtype), twin.weights[name].to(dtype)) for name in twin.weights)


def test_a_pair_decodes_and_drafts_as_its_twin_does(quantised_pair: Pair) -> None:
    prompts = random_prompts([3, 19, 1])
    engine = Engine.from_pretrained(
        quantised_pair[0], engine_config(quantised_pair, 3, collect_draft_ranks=True)
    )  # fmt: skip
    target = Target(twins(quantised_pair)[0])
    draft = Draft(twins(quantised_pair)[1], target)
    for prompt, response in zip(prompts, engine.generate(prompts, new_tokens(12)), strict=True):
        expected = speculate(target, draft, prompt, k=3, n_new=12)
        assert response.token_ids == expected.tokens
        assert [list(step.ranks) for step in response.req_metrics.steps] == [step.ranks for step in expected.steps]


def test_a_look_at_the_files_finds_nothing_wrong(quantised_pair: Pair) -> None:
    assert preflight(*quantised_pair).errors == ()


def changed(quantised: Path, folder: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with other tensors; None drops one."""
    folder.mkdir()
    weights = load_file(quantised / "model.safetensors")
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items() if tensor is not None}
    for name in [name.replace("__", ".") for name, tensor in tensors.items() if tensor is None]:
        del weights[name]
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((quantised / "config.json").read_text())
    return folder


UP = "model__layers__1__mlp__up_proj__weight"


@pytest.mark.parametrize(
    ("method", "tensors", "words"),
    [("compressed-tensors", {f"{UP}_scale": torch.ones(7, 1)}, r"weight_scale has shape \[7, 1\] beside a weight"),
     ("fp8", {f"{UP}_scale_inv": torch.ones(3, 1)}, r"one scale, 48, or \[3, 2\] for blocks of \[16, 24\]"),
     ("modelopt", {f"{UP}_scale": None}, "up_proj.weight is in e4m3 without a scale"),
     ("modelopt", {UP: torch.ones(48, 32)}, "up_proj.weight has a scale and is torch.float32"),
     ("modelopt", {f"{UP}_scale": torch.tensor(-0.5)}, "values that are no scales"),
     ("modelopt", {f"{UP}_scale": torch.tensor(float("nan"))}, "values that are no scales"),
     ("modelopt", {UP: torch.full((48, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "non-finite values"),
     ("modelopt", {UP: torch.zeros(48, 32).to(torch.float8_e5m2)}, "has a scale and is torch.float8_e5m2")],
)  # fmt: skip
def test_a_map_without_its_own_scales_is_refused(
    pair: Pair, tmp_path: Path, method: str, tensors: dict[str, Any], words: str
) -> None:
    directory = changed(write_fp8(pair[0], tmp_path / "target", method), tmp_path / "changed", **tensors)
    with pytest.raises(CheckpointError, match=words):
        load_target(directory)


def group(**weights: Any) -> dict[str, Any]:
    """The config of compressed-tensors with other settings of its weights."""
    config = json.loads(json.dumps(CONFIGS["compressed-tensors"]))
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "fp8", "fmt": "e5m2"}, {"quant_method": "fp8", "weight_block_size": [128]},
     {"quant_method": "fp8", "weight_block_size": [128, True]}, {"quant_method": "gptq", "bits": 4},
     {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"quant_method": "modelopt", "quant_algo": ["FP8"]},
     {"quant_method": "compressed-tensors"}, {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
     group(num_bits=4), group(type="int"), group(strategy="group"), group(symmetric=False), group(actorder="weight"),
     {**group(), "transform_config": {"R1": 1}}, {**group(), "sparsity_config": {"format": "sparse-24-bitmask"}}],
    ids=str,
)  # fmt: skip
def test_other_ways_are_refused_in_targets_and_in_heads(pair: Pair, tmp_path: Path, config: dict[str, Any]) -> None:
    quantised = [write_fp8(path, tmp_path / path.name, "modelopt") for path in pair]
    for directory in quantised:
        rewrite_config(directory, quantization_config=config)
    with pytest.raises(CheckpointError, match="quantization_config is"):
        load_target(quantised[0])
    with pytest.raises(CheckpointError, match="this is a quantised head"):
        load_draft(quantised[1], load_target(pair[0]).geometry)


def test_two_descriptions_of_which_one_is_not_read_are_refused(pair: Pair, tmp_path: Path) -> None:
    target = write_fp8(pair[0], tmp_path / "target", "modelopt")
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match="quant_algo is 'W4A8_AWQ'"):
        load_target(target)


def test_a_config_that_says_fp8_of_other_weights_is_refused(pair: Pair, tmp_path: Path) -> None:
    for index, path in enumerate(pair):
        folder = changed(path, tmp_path / str(index))
        rewrite_config(folder, quantization_config=CONFIGS["fp8"])
        with pytest.raises(CheckpointError, match=r"quantization_config is 'fp8', and no tensor of .* has a scale"):
            load_draft(folder, load_target(pair[0]).geometry) if index else load_target(folder)


def test_a_head_in_fp8_can_be_drafted_with_in_fp8(quantised_pair: Pair) -> None:
    spec = SpeculativeConfig(model=str(quantised_pair[1]), draft_weights="fp8")
    engine = Engine.from_pretrained(quantised_pair[0], engine_config(quantised_pair, None, speculative_config=spec))
    plain = Engine.from_pretrained(quantised_pair[0], engine_config(quantised_pair, None))
    prompts = random_prompts([3, 19, 1])
    ours, theirs = (each.generate(prompts, new_tokens(12)) for each in (engine, plain))
    assert [response.token_ids for response in ours] == [response.token_ids for response in theirs]
