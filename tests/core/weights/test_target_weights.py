"""A target whose maps are in FP8, as stored or quantised at load: the tokens and logits of what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Draft, Target, speculate
from precision import allowed_error, largest_error
from quantised_heads import CONFIGS, MAPS, write_dequantised, write_fp8
from rings import slow_but
from safetensors.torch import load_file, save_file
from tiny_engines import (
    FIXED_TREE,
    Pair,
    drafting_engine,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)
from transformers import AutoModelForCausalLM

from eagle3core import CheckpointError, ConfigError, Engine
from eagle3core.checkpoint import load_target, target_shapes
from eagle3core.trace import RecordingTrace
from eagle3core.weights import Fp8Matrix, PackedTarget, bytes_on_device, pack_checkpoints, stacked

pytestmark = pytest.mark.reference

E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")
BLOCK = (16, 128)
WIDE: dict[str, Any] = {"hidden": 192, "ffn": 256, "vocab": 200}  # maps of more than one block of 128


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("wide"), **WIDE)


def stored_in_fp8(pair: Pair, folder: Path, method: str) -> tuple[Pair, Path]:
    """The pair with its target in a writer's FP8, and what that target means."""
    target = write_fp8(pair[0], folder / "target", method, block=BLOCK)
    return (target, pair[1]), target.with_name("target_twin")


def maps_of(target: PackedTarget) -> list[Any]:
    return [m for layer in target.layers for m in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]


@pytest.mark.parametrize("method", slow_but(["fp8"], CONFIGS))
def test_a_checkpoint_in_fp8_keeps_its_bytes_and_decodes_as_what_they_mean(
    wide: Pair, tmp_path: Path, method: str
) -> None:
    pair, twin = stored_in_fp8(wide, tmp_path, method)
    prompts = random_prompts([3, 19, 1], n_vocab=200)
    engine = drafting_engine(pair, {"num_speculative_tokens": 3}, dtype="float64", collect_draft_ranks=True)
    assert engine.target.weights == "fp8"
    assert all(m.weight.dtype == E4M3 for m in maps_of(engine.target))
    assert engine.target.layers[0].qkv.scales is not None
    assert engine.target.layers[0].qkv.scales.ndim == (2 if method == "fp8" else 1)
    assert engine.target.head.scales is None, "the head is not in FP8 in the file"
    given = load_file(pair[0] / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(engine.target.layers[1].o.weight.view(torch.uint8), given[name].view(torch.uint8))
    oracle = Target(twin)
    draft = Draft(pair[1], oracle)
    for prompt, response in zip(prompts, engine.generate(prompts, new_tokens(12)), strict=True):
        expected = speculate(oracle, draft, prompt, k=3, n_new=12)
        assert response.token_ids == expected.tokens
        assert [list(step.ranks) for step in response.req_metrics.steps] == [step.ranks for step in expected.steps]


def test_a_target_quantised_at_load_decodes_as_what_fp8_leaves_of_it(pair: Pair, tmp_path: Path) -> None:
    left = write_dequantised(pair[0], tmp_path / "left"), pair[1]
    prompts = random_prompts([3, 19, 1, 30])
    engine = tiny_engine(pair, 3, target_weights="fp8")
    assert all(m.scales is not None and m.weight.dtype == E4M3 for m in [*maps_of(engine.target), engine.target.head])
    ours = tokens_of(engine.generate(prompts, new_tokens(20)))
    assert ours == plain_tokens(left, prompts, 20)
    assert ours == tokens_of(tiny_engine(pair, None, target_weights="fp8").generate(prompts, new_tokens(20)))
    for fields in (FIXED_TREE, {"draft_weights": "fp8"}):
        drafting = drafting_engine(pair, fields, target_weights="fp8")
        assert ours == tokens_of(drafting.generate(prompts, new_tokens(20)))


@pytest.mark.parametrize("method", slow_but(["fp8"], [*CONFIGS, "at load"]))
def test_logits_err_at_most_twice_as_much_as_the_dequantised_models_in_transformers(
    wide: Pair, tmp_path: Path, method: str
) -> None:
    """In bf16; the truth is transformers in fp32 over what the bytes and scales mean."""
    if method == "at load":  # which quantises what it computes with, so in bf16
        pair = write_tiny_pair(tmp_path, **WIDE, dtype=torch.bfloat16)
        twin = write_dequantised(pair[0], tmp_path / "left")
    else:
        pair, twin = stored_in_fp8(wide, tmp_path, method)
    how = {"dtype": "bfloat16", "target_weights": "fp8" if method == "at load" else "as_stored"}
    plain, truth = (
        AutoModelForCausalLM.from_pretrained(twin, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    for prompt in random_prompts([3, 8, 21], n_vocab=200):
        trace = RecordingTrace()
        tiny_engine(pair, None, trace=trace, prefill_chunk=32, **how).generate([prompt], new_tokens(1))
        ours = trace.tensors["prefill/target.head"][:, :200]
        with torch.no_grad():
            theirs, exact = (model(torch.tensor([prompt])).logits[0, -1:] for model in (plain, truth))
        assert largest_error(ours, exact) <= allowed_error(theirs, exact)


def test_the_three_settings_differ_in_the_format_of_the_maps_alone(wide: Pair, tmp_path: Path) -> None:
    pair, twin = stored_in_fp8(wide, tmp_path, "compressed-tensors")
    made = {name: tiny_engine(pair, None, target_weights=name) for name in ("as_stored", "fp8", "dequantised")}
    formats = {name: (engine.target.weights, engine.target.head.scales is None) for name, engine in made.items()}
    assert formats == {"as_stored": ("fp8", True), "fp8": ("fp8", False), "dequantised": ("as_stored", True)}
    prompts = random_prompts([3, 19], n_vocab=200)
    stored, twins = made["as_stored"], tiny_engine((twin, pair[1]), None)
    answers = [tokens_of(engine.generate(prompts, new_tokens(9))) for engine in (stored, made["dequantised"], twins)]
    assert answers[0] == answers[1] == answers[2]
    assert made["dequantised"].target.embedding.dtype == stored.target.embedding.dtype


def test_blocks_that_no_kernel_reads_are_dequantised(wide: Pair, tmp_path: Path) -> None:
    odd = write_fp8(wide[0], tmp_path / "odd", "fp8", block=(16, 24))
    engine = tiny_engine((odd, wide[1]), None)
    assert engine.target.weights == "as_stored"
    assert engine.target.layers[0].o.weight.dtype == engine.target.dtype


@pytest.mark.parametrize("scales", [False, True], ids=["stored", "with scales"])
def test_a_head_in_the_file_in_fp8_is_kept_with_padding(pair: Pair, tmp_path: Path, scales: bool) -> None:
    """compressed-tensors leaves heads out by default, and quantises them where asked to."""
    path = write_fp8(pair[0], tmp_path / "target", "compressed-tensors")
    weights = load_file(path / "model.safetensors")
    head = weights["lm_head.weight"].float()
    if scales:
        weights["lm_head.weight_scale"] = head.abs().amax(1, keepdim=True) / 448
        weights["lm_head.weight"] = (head / weights["lm_head.weight_scale"]).to(E4M3)
        save_file(weights, path / "model.safetensors")
    packed, _ = pack_checkpoints(load_target(path, keeps_fp8=True), None, device=CPU, block=4, packs=False)
    rows, vocab = packed.head.rows, packed.geometry.vocab_size
    assert rows % 64 == 0
    if not scales:
        assert packed.head.scales is None
        return
    assert packed.head.scales is not None
    assert packed.head.scales.shape == (rows,)
    meant = packed.head.weight.float() * packed.head.scales[:, None]
    assert torch.equal(meant[:vocab], weights["lm_head.weight"].float() * weights["lm_head.weight_scale"])
    assert not meant[vocab:].any()


def test_matrices_are_stacked_with_every_scale_or_not_at_all() -> None:
    random = torch.Generator().manual_seed(1)

    def matrix(rows: int, scales: torch.Tensor) -> Fp8Matrix:
        return Fp8Matrix(torch.randn(rows, 160, generator=random).to(E4M3), scales)

    blocks = matrix(16, torch.rand(2, 2, generator=random))
    even = matrix(8, torch.full((8,), 0.5))
    uneven = matrix(8, torch.rand(8, generator=random))
    for parts in ([blocks, even], [even, uneven], [blocks, blocks]):
        together = stacked(parts)
        assert together is not None
        assert torch.equal(together.values(torch.float64), torch.cat([part.values(torch.float64) for part in parts]))
    assert stacked([blocks, uneven]) is None


def test_bytes_on_the_device_are_those_of_the_tensors_that_are_packed(wide: Pair, tmp_path: Path) -> None:
    for method in ("modelopt", "fp8"):
        (path, _), _ = stored_in_fp8(wide, tmp_path / method, method)
        for weights in ("as_stored", "fp8"):
            checkpoint = load_target(path, dtype=torch.bfloat16, keeps_fp8=True)
            planned = bytes_on_device(checkpoint, weights)
            packed, _ = pack_checkpoints(checkpoint, None, device=CPU, block=4, packs=False, weights=weights)
            assert packed.head.bias is not None  # of the rows that pad the vocabulary
            padding = (packed.head.rows - 200) * (packed.head.weight.element_size() * packed.head.k)
            padding += packed.head.bias.numel() * 2 + (4 * (packed.head.rows - 200) if weights == "fp8" else 0)
            held = sum(t.numel() * t.element_size() for t in packed.own_tensors())
            assert planned == held - padding
    maps = [shape for name, shape in target_shapes(checkpoint.geometry) if name.endswith(MAPS)]
    assert planned < sum(2 * rows * k for rows, k in maps)


@pytest.mark.parametrize(("packed", "asked"), [("fp8", "dequantised"), ("as_stored", "fp8")])
def test_an_engine_refuses_a_target_packed_in_another_format(pair: Pair, packed: Any, asked: str) -> None:
    target = tiny_engine(pair, None, target_weights=packed).target
    config = tiny_engine(pair, None, target_weights="as_stored").config
    with pytest.raises(ConfigError, match=f"target_weights is '{asked}' with a target whose maps are '{packed}'"):
        Engine(target, None, type(config)(**{**vars(config), "target_weights": asked}))


@pytest.mark.parametrize("scale", [3e38, float("inf")])
def test_a_scale_that_makes_weights_infinite_is_refused(pair: Pair, tmp_path: Path, scale: float) -> None:
    path = write_fp8(pair[0], tmp_path / "target", "modelopt")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight_scale"] = torch.tensor(scale)
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale times 448 holds 1 non-finite values"):
        load_target(path, keeps_fp8=True)


@pytest.mark.parametrize("value", ["int4", None, "bf16"])
def test_a_format_that_is_not_built_is_refused(pair: Pair, value: Any) -> None:
    with pytest.raises(ConfigError, match="target_weights is"):
        tiny_engine(pair, None, target_weights=value)


def test_a_draft_shares_the_head_that_was_quantised(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, own_head=False)
    prompts = random_prompts([3, 19, 1])
    drafting = tiny_engine(pair, 3, target_weights="fp8")
    assert drafting.draft is not None
    assert drafting.draft.head.scales is drafting.target.head.scales is not None
    plain = tiny_engine(pair, None, target_weights="fp8").generate(prompts, new_tokens(12))
    assert tokens_of(drafting.generate(prompts, new_tokens(12))) == tokens_of(plain)
