"""Both caches in FP8, the kernels run lane by lane: plain decoding's tokens and bits, and those of their meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_engines import device_engine, device_runner, write_nano_pair
from emulated_steps import LANES, MEANING, check_first_step
from tiny_engines import Pair, decoded, new_tokens, random_prompts, tokens_of
from torch import Tensor

from eagle3core.step.tree import GrownTree
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.emulated

FP8: dict[str, Any] = {"cache_dtype": "fp8", "draft_cache_dtype": "fp8"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=64)


def logits_of(pair: Pair, k: int | None, prompt: list[int], n: int) -> tuple[list[int], Tensor]:
    """Tokens, and the bits of the logits `[n, V]` that chose them."""
    trace = RecordingTrace()
    engine = device_engine(pair, k, LANES, trace=trace, n_slots=1, chunk=8, cache_dtype="fp8")
    response = engine.generate([prompt], new_tokens(n))[0]
    rows = [trace.tensors["prefill/target.head"]]
    kept = [step.n_accepted + 1 for step in response.req_metrics.steps] if k else [1] * (n - 1)
    rows += [trace.tensors[f"step{i}/verify/target.head"][:count] for i, count in enumerate(kept)]
    return response.token_ids, torch.cat(rows)[:n].view(torch.int16)


def test_a_chain_gives_plain_decodings_tokens_and_the_bits_of_its_logits(pair: Pair) -> None:
    prompt, n = random_prompts([6], n_vocab=64, seed=2)[0], 4
    tokens, logits = logits_of(pair, None, prompt, n)
    drafted, same = logits_of(pair, 3, prompt, n)
    assert drafted == tokens
    assert torch.equal(same, logits)
    assert tokens == tokens_of(device_engine(pair, 3, MEANING, cache_dtype="fp8").generate([prompt], new_tokens(n)))[0]
    as_computed = device_engine(pair, None, LANES, n_slots=1, chunk=8, trace=(trace := RecordingTrace()))
    as_computed.generate([prompt], new_tokens(1))
    assert not torch.equal(trace.tensors["prefill/target.head"].view(torch.int16), logits[:1])


@pytest.mark.slow
def test_the_kernels_draft_the_chain_that_their_meaning_drafts(pair: Pair) -> None:
    check_first_step(pair, None, **FP8)


@pytest.mark.slow
@pytest.mark.exhaustive  # on a GPU: `test_modes_gpu`
def test_a_tree_run_by_the_kernels_gives_the_tokens_of_plain_decoding(pair: Pair) -> None:
    prompts = random_prompts([6, 11], n_vocab=64, seed=2)
    expected = tokens_of(device_engine(pair, None, MEANING, cache_dtype="fp8").generate(prompts, new_tokens(4)))
    runner = device_runner(pair, None, LANES, n_slots=2, tree=GrownTree(3, 3, 8), chunk=16, **FP8)
    assert {tensor.dtype for tensor in runner.state.pages} == {torch.float8_e4m3fn}
    tokens, rows = decoded(runner, prompts, 4)
    assert tokens == expected
    assert not any(row.fault for row in rows)


@pytest.mark.slow
def test_heads_that_are_normed_first_are_cached_as_their_meaning_caches_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    changes: dict[str, Any] = {"seed": 5, "n_layers": 1, "taps": (0, 1), "vocab": 64, "family": "qwen3"}
    qwen3 = write_nano_pair(tmp_path_factory.mktemp("qwen3"), **changes)
    check_first_step(qwen3, None, **FP8)
