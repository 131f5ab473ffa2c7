"""A cache in FP8: what transformers decodes over the same rounded keys and values, whoever shares the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_accounts import assert_all_blocks_are_back, watched
from lettered import MOST_NEW, lettered_engine, lettered_pair, lettered_prompts
from rings import slow_but
from safetensors.torch import load_file, save_file
from tiny_engines import (
    DYNAMIC_TREE,
    FIXED_TREE,
    Pair,
    drafting_engine,
    new_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from eagle3core import CheckpointError, ConfigError, Engine, EngineConfig, SpeculativeConfig
from eagle3core.checkpoint import load_target, preflight
from eagle3core.geometry import CacheScales
from eagle3core.weights import PackedTarget
from lab.pairs import shipped_pair
from lab.pairs.prompts import prompts_for
from lab.parity.derived import cache_write

pytestmark = pytest.mark.reference

FP8: dict[str, Any] = {"cache_dtype": "fp8"}
LENGTHS = [3, 19, 1, 30]
# Each layer's scales by the names of another writer; a few keys are beyond 448 of them.
SCALES = (CacheScales(0.05, 0.02), CacheScales(0.004, 0.01))
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "older": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


def with_scales(target: Path, folder: Path, writer: str = "modelopt", **changed: Tensor | None) -> Path:
    """A copy of a target with a cache's scales beside its weights; `changed`: layer 1's, by "k" or "v"."""
    folder.mkdir()
    tensors = load_file(target / "model.safetensors")
    for layer, scales in enumerate(SCALES):
        for side, name, scale in zip("kv", NAMES[writer], scales, strict=True):
            tensor = changed.get(side, torch.tensor(scale)) if layer else torch.tensor(scale)
            if tensor is not None:
                tensors[f"model.layers.{layer}.{name}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((target / "config.json").read_text())
    return folder


class RoundedCache(DynamicCache):
    """Transformers' own cache, of keys and values that e4m3 leaves of them; `scales` of its layers."""

    def __init__(self, scales: tuple[CacheScales, ...] = SCALES) -> None:
        super().__init__()
        self.scales = scales

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        own = torch.tensor(self.scales[layer_idx])  # fp32, as files have them
        rounded = []
        for states, scale in zip((key_states, value_states), own, strict=True):
            stored = (states / scale.double()).clamp(-448, 448).to(torch.float8_e4m3fn)
            rounded.append(stored.to(states.dtype) * scale.double())
        return super().update(*rounded, layer_idx, *args, **kwargs)


def decoded_by_transformers(target: Path, prompt: list[int], n: int) -> tuple[list[int], list[float]]:
    """Greedy tokens over a rounded cache, and the log-probability of each."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float64, attn_implementation="eager").eval()
    cache, tokens, chances, read = RoundedCache(), [], [], torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(n):
            logits = model(read, past_key_values=cache, use_cache=True).logits[0, -1]
            tokens.append(int(logits.argmax()))
            chances.append(float(logits.log_softmax(-1)[tokens[-1]]))
            read = torch.tensor([[tokens[-1]]])
    return tokens, chances


@pytest.mark.parametrize("writer", slow_but(["modelopt"], NAMES))
def test_a_prompt_gives_what_transformers_gives_over_the_same_rounded_cache(
    pair: Pair, tmp_path: Path, writer: str
) -> None:
    scaled = with_scales(pair[0], tmp_path / "scaled", writer)
    prompts, n = random_prompts([19, 3]), 12
    responses = tiny_engine((scaled, pair[1]), 3, **FP8).generate(prompts, new_tokens(n, logprobs=True))
    plain = tiny_engine(pair, None).generate(prompts, new_tokens(n, logprobs=True))
    for prompt, response, as_computed in zip(prompts, responses, plain, strict=True):
        tokens, chances = decoded_by_transformers(pair[0], prompt, n)
        assert response.token_ids == tokens
        ours, theirs = torch.tensor([place.logprob for place in response.logprobs]), torch.tensor(chances)
        assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=1e-6)
        others = torch.tensor([place.logprob for place in as_computed.logprobs])
        assert (ours - others).abs().max() > 1e-3, "FP8 changes nothing, or nothing was tested"


@pytest.mark.slow
def test_the_shipped_pairs_loss_over_a_cache_in_fp8_stays_within_two_thousandths() -> None:
    """Held-out text; docs/engine.md has the figures of more of it."""
    target = shipped_pair().target
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    text = prompts_for(target, limit=64, max_tokens=256)[0]
    losses, same, n = torch.zeros(2, dtype=torch.float64), 0, 0
    for prompt in text:
        ids, stored = torch.tensor([prompt.ids]), RoundedCache((CacheScales(),) * 8)
        with torch.no_grad():
            both = [model(ids, past_key_values=cache, use_cache=True).logits[0, :-1] for cache in (None, stored)]
        losses += torch.stack([F.cross_entropy(each.double(), ids[0, 1:], reduction="sum") for each in both])
        same, n = same + int((both[0].argmax(-1) == both[1].argmax(-1)).sum()), n + len(both[0])
    assert n > 3000
    assert abs(losses[1] / losses[0] - 1) < 2e-3
    assert same / n > 0.95


@pytest.mark.parametrize(
    ("shape", "dtype"),
    slow_but(
        [({"num_speculative_tokens": 5}, "bfloat16"), (FIXED_TREE, "float32"), (DYNAMIC_TREE, "float32")],
        [({"num_speculative_tokens": 3}, "float64"), ({"num_speculative_tokens": 3}, "float32"),
         ({"num_speculative_tokens": 5}, "bfloat16"), ({"num_speculative_tokens": 2}, "float16"),
         (FIXED_TREE, "float32"), (DYNAMIC_TREE, "float32"), (DYNAMIC_TREE, "bfloat16")],
    ),
)  # fmt: skip
def test_drafts_change_no_token_whatever_their_own_cache(pair: Pair, shape: dict[str, Any], dtype: str) -> None:
    prompts, n_new = random_prompts(LENGTHS), new_tokens(14)
    expected = tokens_of(tiny_engine(pair, None, dtype=dtype, **FP8).generate(prompts, n_new))
    for draft_cache in ("as_computed", "fp8"):
        engine = drafting_engine(pair, {**shape, "draft_cache_dtype": draft_cache}, dtype=dtype, **FP8)
        assert tokens_of(engine.generate(prompts, n_new)) == expected
    by_bf16 = drafting_engine(pair, {**shape, "draft_cache_dtype": "fp8"}, dtype=dtype)
    expected = tokens_of(tiny_engine(pair, None, dtype=dtype).generate(prompts, n_new))
    assert tokens_of(by_bf16.generate(prompts, n_new)) == expected


@pytest.mark.slow
def test_a_small_model_drafts_over_a_cache_in_fp8(tmp_path: Path, pair: Pair) -> None:
    small = write_tiny_pair(tmp_path / "small", n_layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, taps=(0, 1), seed=7)
    scaled = with_scales(pair[0], tmp_path / "scaled")
    prompts, both = random_prompts(LENGTHS), {"method": "draft_target", "draft_cache_dtype": "fp8"}
    expected = tokens_of(tiny_engine((scaled, pair[1]), None, **FP8).generate(prompts, new_tokens(14)))
    engine = drafting_engine((scaled, small[0]), both, **FP8)
    assert tokens_of(engine.generate(prompts, new_tokens(14))) == expected
    own = drafting_engine((pair[0], scaled), both).runner.draft
    assert isinstance(own, PackedTarget)
    assert [layer.cache_scales for layer in own.layers] == read_scales()


def read_scales() -> list[CacheScales]:
    """What fp32 leaves of the scales."""
    return [CacheScales(*torch.tensor(scales).tolist()) for scales in SCALES]


@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_a_found_prefix_and_a_request_put_back_give_what_they_give_alone(tmp_path: Path, k: int | None) -> None:
    letters = lettered_pair(tmp_path)
    alone = tiny_engine(letters, None, max_batch_size=1, **FP8)
    prompts = lettered_prompts()[:12]
    expected = [tokens_of(alone.generate([prompt], new_tokens(MOST_NEW)))[0] for prompt in prompts]
    engine = watched(lettered_engine(letters, k, 4, 1, block_size=2, cache_blocks=34, prefix_cache=True, **FP8))
    for _ in range(2):  # the second time around, blocks of the first are found
        assert tokens_of(engine.generate(prompts, new_tokens(MOST_NEW))) == expected
    assert engine.book.blocks.counts.n_found_tokens > 0
    assert engine.book.blocks.counts.n_put_back > 0
    assert_all_blocks_are_back(engine)


def test_chunks_of_a_prompt_read_the_same_bytes(pair: Pair) -> None:
    prompts = random_prompts([30, 19])
    tokens = [tokens_of(tiny_engine(pair, None, prefill_chunk=chunk, **FP8).generate(prompts, new_tokens(12)))
              for chunk in (4, 8, 64)]  # fmt: skip
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_memory_plan_counts_a_byte_a_value(pair: Pair) -> None:
    both = {"draft_cache_dtype": "fp8"}
    stored, computed = (
        drafting_engine(pair, fields, dtype="float32", **changes).memory_plan
        for fields, changes in ((both, FP8), ({}, {}))
    )
    assert 4 * stored.target_kv_bytes == computed.target_kv_bytes > 0
    assert 4 * stored.draft_kv_bytes == computed.draft_kv_bytes > 0
    assert stored.scratch_bytes == computed.scratch_bytes
    engine = drafting_engine(pair, both, dtype="float32", **FP8)
    pages = engine.runner.state.pages
    assert sum(tensor.nbytes for tensor in pages) == stored.target_kv_bytes + stored.draft_kv_bytes
    assert {tensor.dtype for tensor in pages} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("writer", NAMES)
def test_scales_are_read_where_the_cache_is_in_fp8_and_else_left(pair: Pair, tmp_path: Path, writer: str) -> None:
    scaled = with_scales(pair[0], tmp_path / "scaled", writer)
    assert list(load_target(scaled, cache_dtype="fp8").cache_scales) == read_scales()
    assert load_target(scaled).cache_scales == ()
    assert preflight(scaled, pair[1]).errors == ()
    assert set(load_target(pair[0], cache_dtype="fp8").cache_scales) == {CacheScales(1.0, 1.0)}
    engine = Engine.from_pretrained(scaled, EngineConfig(device="cpu", session_len=64, **FP8))
    assert [layer.cache_scales for layer in engine.target.layers] == read_scales()


@pytest.mark.parametrize(
    ("scale", "words"),
    [(torch.tensor(0.0), r"v_scale has shape \[\], values from \[0.0\]"),
     (torch.tensor([1.0, 2.0]), r"v_scale has shape \[2\]"), (torch.tensor(float("nan")), "v_scale")],
)  # fmt: skip
def test_a_scale_that_is_none_is_refused(pair: Pair, tmp_path: Path, scale: Tensor, words: str) -> None:
    scaled = with_scales(pair[0], tmp_path / "scaled", "modelopt", v=scale)
    with pytest.raises(CheckpointError, match=words):
        load_target(scaled, cache_dtype="fp8")
    assert load_target(scaled).dtype == load_target(pair[0]).dtype


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: EngineConfig(cache_dtype="e5m2"), "cache_dtype is 'e5m2'"),  # type: ignore[arg-type]
     (lambda: SpeculativeConfig(model="x", draft_cache_dtype=None), "draft_cache_dtype is None"),  # type: ignore[arg-type]
     (lambda: SpeculativeConfig(method="ngram", draft_cache_dtype="fp8"), "'ngram' with draft_cache_dtype 'fp8'")],
)  # fmt: skip
def test_a_cache_that_is_not_built_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_what_is_recorded_of_a_cache_in_fp8_is_what_attention_reads(pair: Pair, tmp_path: Path) -> None:
    scaled = with_scales(pair[0], tmp_path / "scaled")
    runner = tiny_engine((scaled, pair[1]), None, **FP8).runner
    [stage] = [stage for stage in runner.programs[1] if stage.name == "target.1.attn"]
    [write] = [found for call in stage.calls if (found := cache_write(call)) is not None]
    codes = torch.randint(0, 127, write.k.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    write.k.copy_(codes)
    write.v.copy_(codes)
    write.slots.fill_(5)
    block = runner.sizes.block
    stored = codes[5 // block, :, 5 % block].flatten().double()
    for part, scale in zip(write.kept(), read_scales()[1], strict=True):
        assert part.dtype == write.q.dtype
        assert torch.allclose(part[0], stored * scale, rtol=1e-6)  # the factor was rounded to fp32
