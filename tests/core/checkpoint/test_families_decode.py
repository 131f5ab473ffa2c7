"""Targets that are not Llama's: tokens as transformers has them, and speculation that changes none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import BY_MEANING, device_engine, write_nano_pair
from tiny_engines import Pair, accepted_counts, new_tokens, random_prompts, tiny_engine, tokens_of, write_tiny_pair
from transformers import AutoModelForCausalLM

from eagle3core.step.replay import EagerReplayer, emulate

LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 7.0]}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "head_dim": 16},
    "qwen2": {"family": "qwen2", "rope": {"rope_theta": 1e6}},
    "qwen3": {"family": "qwen3", "head_dim": 16, "tie": True, "rope": {"rope_theta": 1e6}},
    # Sessions are longer than the trained 8 positions, and so are the prompts: both sides use the long factors.
    "llama, longrope": {
        "rope": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, **LONG},
    },
}  # fmt: skip


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_with_drafts_and_without(kind: str, tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, **KINDS[kind], seed=3)
    prompts, limits = random_prompts([11, 20, 9]), new_tokens(14)
    plain, drafted = (tiny_engine(pair, k).generate(prompts, limits) for k in (None, 3))
    assert tokens_of(drafted) == tokens_of(plain)
    assert len(accepted_counts(drafted)) > 1
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float64, attn_implementation="eager")
    for prompt, response in zip(prompts, plain, strict=True):  # teacher-forced: every token after all before it
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response.token_ids]])).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2).values
        sure = top[:, 0] - top[:, 1] > 1e-4  # transformers norms in fp32 whatever the weights are
        assert int(sure.sum()) > 10
        assert logits.argmax(-1)[sure].tolist() == torch.tensor(response.token_ids)[sure].tolist()


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("qwen3"), seed=5, n_layers=1, taps=(0, 1), vocab=64, family="qwen3")


@pytest.mark.reference
def test_on_the_kernels_path_heads_are_normed_by_the_launch_that_writes_the_cache(nano: Pair) -> None:
    prompts = random_prompts([6, 3], n_vocab=64, seed=2)
    engine, plain = (device_engine(nano, k, BY_MEANING) for k in (3, None))
    of_layer = [
        [(call.op, len(call.launches)) for call in stage.calls][:2]
        for program in engine.runner.all_programs
        for stage in program
        if stage.name == "target.0.attn"
    ]
    assert of_layer
    assert all(calls[0][0] == "gemm" and calls[1] == ("rope", 1) for calls in of_layer)
    gemms = engine.runner.gemms
    assert {product.tag for product in gemms.counts} >= {"BASE_QKV", "EAGLE3_QKV"}
    untuned = replace(gemms, is_required=True).untuned_words  # as on an H200, whose file has no such small maps
    assert "are not in the tuned file and run by the rule's tilings: BASE_FFN_DOWN, " in untuned
    assert "BASE_QKV" in untuned
    assert replace(gemms, tuned=frozenset(gemms.counts), is_required=True).untuned_words == ""
    limits = new_tokens(12)
    assert tokens_of(engine.generate(prompts, limits)) == tokens_of(plain.generate(prompts, limits))


@pytest.mark.emulated
@pytest.mark.slow
def test_the_emulated_kernels_give_the_tokens_of_their_meaning(nano: Pair) -> None:
    prompt, n = random_prompts([6], n_vocab=64, seed=2), new_tokens(4)
    drafted = device_engine(nano, 2, EagerReplayer(emulate), n_slots=1, chunk=16).generate(prompt, n)
    assert tokens_of(drafted) == tokens_of(device_engine(nano, None, BY_MEANING).generate(prompt, n))
