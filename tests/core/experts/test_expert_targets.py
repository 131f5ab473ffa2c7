"""Targets with experts: tokens as transformers has them, and speculation that changes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_pairs import MXFP4
from rings import slow_but, slow_from
from tiny_engines import (
    DYNAMIC_TREE,
    FIXED_TREE,
    Pair,
    accepted_counts,
    drafting_engine,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import EngineConfig
from eagle3core.checkpoint import load_target
from eagle3core.loading import read_models
from eagle3core.step.kernel_limits import why_plain_torch
from lab.parity.hf_target import load_model

pytestmark = pytest.mark.reference

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"family": "qwen3_moe", "head_dim": 16, "rope": {"rope_theta": 1e6}},
    "qwen3_moe, shares of all": {"family": "qwen3_moe", "head_dim": 16, "norm_topk_prob": False, "tie": True},
    "gpt_oss": {"family": "gpt_oss", "head_dim": 16, "ffn": 32, "n_layers": 3, "sliding_window": 5},
    "gpt_oss in MXFP4": {"family": "gpt_oss", "ffn": 64, "quantization_config": MXFP4},
    "qwen3_moe, dense layers": {"family": "qwen3_moe", "n_layers": 4, "decoder_sparse_step": 2, "taps": (1, 2, 4)},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3}, "dynamic tree": DYNAMIC_TREE, "fixed tree": FIXED_TREE,
}  # fmt: skip


@pytest.fixture(scope="module", params=slow_but(["qwen3_moe", "gpt_oss"], KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("experts"), **KINDS[request.param], seed=3)


def reference_tokens(target: Path, prompts: list[list[int]], n: int) -> list[list[int]]:
    """Greedy tokens of transformers in fp32, one prompt after the other, by its own cache."""
    model, found = load_model(target, torch.float32, "eager").float(), []  # decoded experts come in bf16 in any case
    for prompt in prompts:
        with torch.no_grad():
            given = torch.tensor([prompt])
            ids = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=n, do_sample=False, eos_token_id=None
            )
        found.append(ids[0, len(prompt) :].tolist())
    return found


def assert_tokens_of_transformers(pair: Pair, n_prompts: int, *drafts: str) -> None:
    prompts = random_prompts([3 + (7 * i) % 23 for i in range(n_prompts)], seed=n_prompts)
    expected = reference_tokens(pair[0], prompts, 12)
    for kind in drafts:
        engine = drafting_engine(pair, DRAFTS[kind], dtype="float32")
        assert tokens_of(engine.generate(prompts, new_tokens(12))) == expected, kind


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    assert_tokens_of_transformers(pair, 3, "chain")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss in MXFP4"])
def test_greedy_tokens_are_those_of_transformers_after_64_prompts(kind: str, tmp_path: Path) -> None:
    assert_tokens_of_transformers(write_tiny_pair(tmp_path, **KINDS[kind], seed=8), 64, "chain", "dynamic tree")


@pytest.mark.parametrize("kind", slow_from(1, DRAFTS))
def test_drafts_change_no_token(pair: Pair, kind: str) -> None:
    prompts = random_prompts([11, 20, 9, 14])
    drafted = drafting_engine(pair, DRAFTS[kind]).generate(prompts, new_tokens(14))
    assert tokens_of(drafted) == plain_tokens(pair, prompts, 14)
    assert len(accepted_counts(drafted)) > 1


def test_a_small_model_with_experts_drafts(pair: Pair) -> None:
    fields = {"method": "draft_target", "model": str(pair[0]), "num_speculative_tokens": 3}
    prompts = random_prompts([7, 12])
    drafted = drafting_engine(pair, fields).generate(prompts, new_tokens(10))
    assert tokens_of(drafted) == plain_tokens(pair, prompts, 10)
    assert max(accepted_counts(drafted)) == 3  # it is the target itself


def test_the_memory_plan_counts_every_expert_and_the_rows_that_they_work_on(pair: Pair) -> None:
    engine = tiny_engine(pair, 3)
    weights = load_target(pair[0]).weights.values()
    stored = sum(tensor.numel() * (1 if tensor.dtype == torch.uint8 else 4) for tensor in weights)
    reading = read_models(pair[0], EngineConfig(dtype="float32", device="cpu", session_len=64))
    tied = reading.target.tie_word_embeddings
    table = reading.target.vocab_size * reading.target.block.hidden_size
    assert reading.weight_bytes == stored - 4 * table * tied
    experts, rows = engine.target.geometry.block.experts, engine.runner.state.act.experts
    assert experts is not None
    assert rows is not None
    assert rows.parts.shape[1] == experts.n_chosen * engine.target.geometry.block.hidden_size


def test_what_the_kernels_of_experts_cannot_take_is_named(tmp_path: Path) -> None:
    reasons = {
        24: "an expert's width is 24; the kernels take multiples of 32 where there are experts",
        32: None,
    }  # fmt: skip
    for inner, reason in reasons.items():
        how = {**KINDS["qwen3_moe"], "hidden": 64, "heads": 1, "kv_heads": 1, "head_dim": 64}
        pair = write_tiny_pair(tmp_path / str(inner), **how, moe_intermediate_size=inner)
        geometry = load_target(pair[0]).geometry
        assert why_plain_torch(geometry, None, EngineConfig(dtype="bfloat16"), torch.bfloat16) == reason
