"""A draft whose maps are in FP8: the tokens of plain decoding, and the drafts of the head that FP8 leaves of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import write_nano_pair
from eagle_pairs import write_eagle_pair
from emulated_steps import check_first_step
from oracle import Draft, Target, speculate
from quantised_heads import MAPS, by_rows, e4m3_values, rounded_to_e4m3, write_dequantised
from rings import slow_but
from tiny_engines import (
    DYNAMIC_TREE,
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

from eagle3core import ConfigError, Engine, SpeculativeConfig
from eagle3core.checkpoint import draft_shapes, load_draft, load_target
from eagle3core.kernels.gemm import pack_weight, unpack_weight
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.weights import pack_checkpoints, quantised, stored_bytes

pytestmark = pytest.mark.reference

LENGTHS = [3, 19, 1, 30]
FP8 = {"draft_weights": "fp8"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_is_stored_as_the_nearest_e4m3_values_of_its_scale(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(4)
    weight = torch.randn(37, 48, generator=random).mul(torch.logspace(-6, 3, 37)[:, None]).to(dtype)
    weight[5] = 0
    stored, scales = quantised(weight)
    expected, expected_scales = by_rows(weight)
    assert stored.dtype == torch.float8_e4m3fn
    assert torch.equal(scales, expected_scales)
    assert torch.equal(stored.double(), expected)
    assert torch.equal(stored[weight.abs().amax(1) > 0].double().abs().amax(1), torch.full((36,), 448.0).double())


def test_rows_of_any_magnitude_are_finite_in_fp8() -> None:
    least, largest = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
    weight = torch.tensor([[least / 1024, 0.0], [least, -least], [largest, -1.0], [0.0, 0.0]])
    stored, scales = quantised(weight)
    assert stored.double().isfinite().all()
    assert (scales >= least).all()
    assert torch.equal(scales[3:], torch.ones(1))


def test_torchs_e4m3_is_the_formats_own_table() -> None:
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(table, e4m3_values())
    between = (table[1:] + table[:-1]) / 2  # ties, which go to the even of both
    assert torch.equal(between.float().to(torch.float8_e4m3fn).double(), rounded_to_e4m3(between))


@pytest.mark.parametrize("k", [64, 80])
@pytest.mark.parametrize(
    "epilogue", [Epilogue("store"), Epilogue("swiglu"), Epilogue("qkv", head_dim=32, block=16)], ids=lambda e: e.kind
)
def test_packing_e4m3_keeps_every_byte_and_unpacking_gives_it_back(epilogue: Epilogue, k: int) -> None:
    codes = torch.randint(0, 256, (96, k), generator=torch.Generator().manual_seed(k), dtype=torch.uint8)
    weight = codes.view(torch.float8_e4m3fn)
    packed = pack_weight(weight, epilogue)
    assert (packed.dtype, packed.shape) == (weight.dtype, (96, -(-k // 32) * 32))
    assert torch.equal(unpack_weight(packed, epilogue, k).view(torch.uint8), codes)
    assert packed.is_contiguous()


def test_a_lane_finds_its_sixteen_values_of_a_unit_side_by_side() -> None:
    codes = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    packed = pack_weight(codes.view(torch.float8_e4m3fn), Epilogue("store")).view(torch.uint8).view(2, 2, 32, 16)
    for tile, unit, lane in ((0, 0, 0), (1, 0, 7), (0, 1, 30), (1, 1, 17)):
        row, k = 16 * tile + lane // 4, 32 * unit + 8 * (lane % 4)
        lower, upper = codes[row, k : k + 8].tolist(), codes[row + 8, k : k + 8].tolist()
        order = (0, 2, 1, 3, 4, 6, 5, 7)
        assert packed[tile, unit, lane].tolist() == [*(lower[i] for i in order), *(upper[i] for i in order)]


def test_the_drafts_are_those_of_the_head_that_fp8_leaves(pair: Pair, tmp_path: Path) -> None:
    engine = drafting_engine(pair, {**FP8, "num_speculative_tokens": 4}, collect_draft_ranks=True)
    responses = engine.generate(random_prompts(LENGTHS), new_tokens(14))
    target = Target(pair[0])
    left, whole = Draft(write_dequantised(pair[1], tmp_path / "left"), target), Draft(pair[1], target)
    differs = False
    for prompt, response in zip(random_prompts(LENGTHS), responses, strict=True):
        expected = speculate(target, left, prompt, k=4, n_new=14)
        assert response.token_ids == expected.tokens
        ours = [(step.n_accepted, step.n_committed, list(step.ranks)) for step in response.req_metrics.steps]
        assert ours == [(step.n_accepted, len(step.tokens), step.ranks) for step in expected.steps]
        as_stored = speculate(target, whole, prompt, k=4, n_new=14)
        differs |= [step.ranks for step in as_stored.steps] != [step.ranks for step in expected.steps]
    assert differs, "FP8 changes some draft, or nothing was tested"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    slow_but(
        [({"num_speculative_tokens": 5}, "bfloat16"), (FIXED_TREE, "float32")],
        [({"num_speculative_tokens": 3}, "float64"), ({"num_speculative_tokens": 3}, "float32"),
         ({"num_speculative_tokens": 5}, "bfloat16"), ({"num_speculative_tokens": 2}, "float16"),
         (FIXED_TREE, "float32"), (DYNAMIC_TREE, "bfloat16")],
    ),
    ids=["fp64", "fp32", "bf16", "fp16", "fixed tree, fp32", "dynamic tree, bf16"],
)  # fmt: skip
def test_any_shape_and_dtype_gives_plain_decodings_tokens(pair: Pair, shape: dict[str, Any], dtype: str) -> None:
    prompts, n_new = random_prompts(LENGTHS), new_tokens(14)
    expected = tokens_of(tiny_engine(pair, None, dtype=dtype).generate(prompts, n_new))
    engine = drafting_engine(pair, {**FP8, **shape}, dtype=dtype)
    assert tokens_of(engine.generate(prompts, n_new)) == expected
    assert engine.speculation.reason.endswith("draft maps in fp8")


@pytest.mark.slow
def test_an_eagle_head_and_a_small_model_in_fp8_give_plain_decodings_tokens(tmp_path: Path) -> None:
    eagle = write_eagle_pair(tmp_path / "eagle")
    small = write_tiny_pair(tmp_path / "small", n_layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, taps=(0, 1), seed=7)
    prompts = random_prompts(LENGTHS)
    for pair, method in ((eagle, "eagle"), ((eagle[0], small[0]), "draft_target")):
        engine = drafting_engine(pair, {**FP8, "method": method})
        assert tokens_of(engine.generate(prompts, new_tokens(14))) == plain_tokens(pair, prompts, 14)


@pytest.mark.emulated
@pytest.mark.slow
def test_the_kernels_draft_the_chain_that_their_meaning_drafts(tmp_path: Path) -> None:
    nano = write_nano_pair(tmp_path, n_layers=1, vocab=64, taps=(0, 1))
    check_first_step(nano, None, draft_weights="fp8")


def test_what_a_draft_shares_with_its_target_stays_the_targets(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, own_head=False)
    checkpoint = load_target(pair[0])
    head = load_draft(pair[1], checkpoint.geometry)
    target, draft = pack_checkpoints(
        checkpoint, head, device=torch.device("cpu"), block=4, packs=False, draft_weights="fp8"
    )
    assert draft is not None
    assert draft.fc is not None
    assert draft.head is target.head
    assert draft.embedding is target.embedding
    assert (target.weights, draft.weights) == ("as_stored", "fp8")
    maps = (draft.fc, draft.layer.qkv, draft.layer.o, draft.layer.mlp.gate_up, draft.layer.mlp.down)
    assert all(m.weight.dtype == torch.float8_e4m3fn and m.scales is not None for m in maps)
    gains = (draft.final_gain, draft.layer.attn_gain, draft.layer.mlp_gain)
    assert all(gain.dtype == checkpoint.dtype for gain in gains)


@pytest.mark.parametrize("vocab", [6, 64])
def test_a_head_that_is_the_embedding_stays_as_it_is(tmp_path: Path, vocab: int) -> None:
    checkpoint = load_target(write_tiny_pair(tmp_path, tie=True, vocab=vocab)[0])
    small, _ = pack_checkpoints(checkpoint, None, device=torch.device("cpu"), block=4, packs=False, weights="fp8")
    assert small.head.scales is None
    assert small.head.weight.dtype == checkpoint.dtype
    assert torch.equal(small.head.weight[:vocab], small.embedding)
    assert small.weights == "fp8"


def test_the_memory_plan_counts_a_byte_a_value_and_a_scale_a_row(pair: Pair) -> None:
    as_stored, fp8 = (
        drafting_engine(pair, fields, dtype="float32").memory_plan.weight_bytes for fields in ({}, FP8)
    )  # fmt: skip
    maps = [shape for name, shape in draft_shapes(load_draft(pair[1], load_target(pair[0]).geometry).geometry)
            if name.endswith(MAPS)]  # fmt: skip
    assert len(maps) == 9
    assert as_stored - fp8 == sum(3 * rows * k - 4 * rows for rows, k in maps)
    assert stored_bytes("fc.weight", (32, 96), 2, "fp8") == 32 * 96 + 4 * 32
    assert stored_bytes("embed_tokens.weight", (6, 32), 4, "fp8") == 4 * 6 * 32
    assert stored_bytes("norm.weight", (32,), 4, "fp8") == 4 * 32


def test_an_engine_refuses_a_draft_packed_in_another_format(pair: Pair) -> None:
    engine = drafting_engine(pair, FP8)
    config = drafting_engine(pair, {}).config
    with pytest.raises(ConfigError, match=r"draft_weights is 'as_stored' with a draft whose maps are 'fp8'"):
        Engine(engine.target, engine.draft, config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"model": "x", "draft_weights": "int4"}, "draft_weights is 'int4'"),
     ({"model": "x", "draft_weights": None}, "draft_weights is None"),
     ({"method": "ngram", **FP8}, "method is 'ngram' with draft_weights 'fp8'")],
)  # fmt: skip
def test_a_format_that_is_not_built_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SpeculativeConfig(**fields)
