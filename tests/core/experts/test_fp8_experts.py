"""Qwen3-MoE checkpoints whose experts are in FP8: their bytes stay, and decode as what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from precision import allowed_error, largest_error
from quantised_heads import CONFIGS, write_fp8
from rings import slow_but
from safetensors.torch import load_file, save_file
from tiny_engines import (
    Pair,
    drafting_engine,
    new_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)
from transformers import AutoModelForCausalLM

from eagle3core import CheckpointError
from eagle3core.checkpoint import load_target
from eagle3core.kernels.experts import OrderedMatrices, PlainMatrices
from eagle3core.trace import RecordingTrace
from eagle3core.weights import PackedExperts, PackedTarget, bytes_on_device, pack_checkpoints

pytestmark = pytest.mark.reference

E4M3, CPU = torch.float8_e4m3fn, torch.device("cpu")
BLOCK = (16, 128)
WIDE: dict[str, Any] = {"family": "qwen3_moe", "hidden": 160, "heads": 2, "kv_heads": 1, "head_dim": 64, "vocab": 192,
                        "n_layers": 1, "taps": (0, 1), "moe_intermediate_size": 160, "num_experts": 4}  # fmt: skip
DOWN = "model.layers.0.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Experts whose maps read more than one block of 128."""
    return write_tiny_pair(tmp_path_factory.mktemp("experts"), **WIDE, seed=3)


def in_fp8(pair: Pair, folder: Path, method: str) -> tuple[Pair, Path]:
    """The pair with its target in a writer's FP8, and what that target means."""
    target = write_fp8(pair[0], folder / "target", method, block=BLOCK)
    return (target, pair[1]), target.with_name("target_twin")


def experts_of(target: PackedTarget, layer: int = 0) -> PackedExperts:
    made = target.layers[layer].mlp
    assert isinstance(made, PackedExperts)
    return made


@pytest.mark.parametrize("method", slow_but(["fp8"], CONFIGS))
def test_experts_keep_their_bytes_and_decode_as_what_they_mean(pair: Pair, tmp_path: Path, method: str) -> None:
    stored, twin = in_fp8(pair, tmp_path, method)
    prompts = random_prompts([3, 19, 1], n_vocab=192)
    engine = drafting_engine(stored, {"num_speculative_tokens": 3}, dtype="float64")
    maps, given = experts_of(engine.target).down, load_file(stored[0] / "model.safetensors")
    assert isinstance(maps, PlainMatrices)
    assert maps.scales is not None
    assert maps.scales.shape == ((4, 20, 2) if method == "fp8" else (4, 160))
    assert torch.equal(maps.weight[2].view(torch.uint8), given[DOWN].view(torch.uint8))
    meant = tiny_engine((twin, pair[1]), None, dtype="float64").generate(prompts, new_tokens(12))
    assert tokens_of(engine.generate(prompts, new_tokens(12))) == tokens_of(meant)


@pytest.mark.parametrize("method", slow_but(["fp8"], CONFIGS))
def test_logits_err_at_most_twice_as_much_as_the_dequantised_models_in_transformers(
    pair: Pair, tmp_path: Path, method: str
) -> None:
    """In bf16; the truth is transformers in fp32 over what the bytes and scales mean."""
    stored, twin = in_fp8(pair, tmp_path, method)
    plain, truth = (
        AutoModelForCausalLM.from_pretrained(
            twin, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    for prompt in random_prompts([3, 8, 21], n_vocab=192):
        trace = RecordingTrace()
        engine = tiny_engine(stored, None, trace=trace, prefill_chunk=32, dtype="bfloat16")
        engine.generate([prompt], new_tokens(1))
        ours = trace.tensors["prefill/target.head"][:, :192]
        with torch.no_grad():
            theirs, exact = (model(torch.tensor([prompt])).logits[0, -1:] for model in (plain, truth))
        assert largest_error(ours, exact) <= allowed_error(theirs, exact)


@pytest.mark.parametrize(("method", "form"), [("fp8", "fp8_blocks"), ("modelopt", "fp8")])
def test_kernels_get_the_same_values_and_the_plan_counts_their_bytes(
    pair: Pair, tmp_path: Path, method: str, form: str
) -> None:
    (path, _), twin = in_fp8(pair, tmp_path, method)
    planned = bytes_on_device(load_target(path, dtype=torch.bfloat16, keeps_fp8=True), "as_stored")
    packed, _ = pack_checkpoints(
        load_target(path, dtype=torch.bfloat16, keeps_fp8=True), None, device=CPU, block=4, packs=True
    )
    meant = load_file(twin / "model.safetensors")
    maps = experts_of(packed).down
    assert isinstance(maps, OrderedMatrices)
    assert maps.form == form
    torch.testing.assert_close(maps.of(2, torch.float64), meant[DOWN].double(), rtol=2**-23, atol=0)
    held = sum(t.numel() * t.element_size() for t in packed.own_tensors())
    assert planned == held, "a head of whole groups of 64 rows is not padded"


def test_experts_of_several_formats_in_one_map_are_refused_with_a_way_out(pair: Pair, tmp_path: Path) -> None:
    (path, draft), _ = in_fp8(pair, tmp_path, "fp8")
    weights = load_file(path / "model.safetensors")
    del weights[f"{DOWN}_scale_inv"]
    weights[DOWN] = weights[DOWN].float()
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight is not stored as those"):
        tiny_engine((path, draft), None)
    prompts = random_prompts([3], n_vocab=192)
    assert tokens_of(tiny_engine((path, draft), None, target_weights="dequantised").generate(prompts, new_tokens(2)))


def test_what_is_not_yet_in_fp8_is_quantised_beside_experts_that_are(pair: Pair, tmp_path: Path) -> None:
    stored, _ = in_fp8(pair, tmp_path, "fp8")
    engine = tiny_engine(stored, None, target_weights="fp8")
    assert engine.target.head.scales is not None
    kept = experts_of(engine.target).gate_up
    before = experts_of(tiny_engine(stored, None).target).gate_up
    assert all(torch.equal(kept.of(i, torch.float64), before.of(i, torch.float64)) for i in range(4))
