"""On the GPU's kernels, with the shipped pair: every way to draft and every way to ask gives plain decoding's bits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engines import accepted_counts, is_empty, new_tokens, tokens_of
from torch import Tensor

from eagle3core import (
    Engine,
    EngineConfig,
    ForcedAcceptance,
    MedusaAcceptance,
    RejectionAcceptance,
    RelaxedAcceptance,
    RequestHandle,
    SpeculativeConfig,
)
from eagle3core.trace import RecordingTrace, Trace
from lab.acceptance.shapes import shape_named
from lab.pairs import shipped_folder, shipped_pair
from lab.pairs.prompts import prompts_for
from lab.probes.bits.compare import sentences, strips_of
from lab.probes.bits.hashes import record_hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (shipped_folder() / "target" / "model.safetensors").is_file(), reason="this checkout has no shipped pair"
    ),
]

TREES = ("dynamic-8/3/4", "mc_sim_7b_63", "dynamic-60/7/10")
N_TOKENS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found, _ = prompts_for(shipped_pair().target, limit=12, max_tokens=256)
    return [list(prompt.ids) for prompt in found]


def engine(spec: SpeculativeConfig | None, *, trace: Trace | None = None, **changes: Any) -> Engine:
    settings = {"session_len": 512, "max_batch_size": 8, "dtype": "bfloat16", "device": "cuda", **changes}
    made = Engine.from_pretrained(shipped_pair().target, EngineConfig(**settings, speculative_config=spec), trace=trace)
    assert made.backend.path == "kernels", made.backend.path_reason
    return made


def looked_up(method: str) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=4)


def small_model(k: int) -> SpeculativeConfig:
    """The shipped target, drafting for itself."""
    return SpeculativeConfig(method="draft_target", model=str(shipped_pair().target), num_speculative_tokens=k)


def tree(name: str) -> SpeculativeConfig:
    return SpeculativeConfig(model=str(shipped_pair().draft), **shape_named(name).settings)


def chain(k: int) -> SpeculativeConfig:
    return SpeculativeConfig(model=str(shipped_pair().draft), num_speculative_tokens=k)


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[list[int]]:
    return tokens_of(engine(None, max_batch_size=1).generate(prompts, new_tokens(N_TOKENS, ignore_eos=True)))


@pytest.mark.parametrize("name", ["chain", *TREES])
def test_over_a_cache_in_fp8_drafts_change_no_token(prompts: list[list[int]], name: str) -> None:
    plain = tokens_of(engine(None, max_batch_size=1, cache_dtype="fp8").generate(prompts, new_tokens(N_TOKENS)))
    spec = replace(chain(4) if name == "chain" else tree(name), draft_cache_dtype="fp8")
    made = engine(spec, max_batch_size=4, cache_dtype="fp8", prefix_cache=True)
    for _ in range(2):  # the second time from kept blocks
        assert tokens_of(made.generate(prompts, new_tokens(N_TOKENS))) == plain


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_a_grown_tree_gives_the_tokens_of_plain_decoding(
    prompts: list[list[int]], alone: list[list[int]], name: str, n_slots: int
) -> None:
    responses = engine(tree(name), max_batch_size=n_slots).generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))
    assert tokens_of(responses) == alone
    assert accepted_counts(responses) >= {0, 1, 2, 3}, "nearly nothing is accepted: the tree is not what it should be"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_looked_up_drafts_give_the_tokens_of_plain_decoding(
    prompts: list[list[int]], alone: list[list[int]], method: str, n_slots: int
) -> None:
    made = engine(looked_up(method), max_batch_size=n_slots)
    responses = made.generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))
    assert tokens_of(responses) == alone
    assert accepted_counts(responses) >= {0, 1, 2}, "nearly nothing is accepted: the drafts do not reach their nodes"


@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_a_target_that_drafts_for_itself_is_right_and_gives_its_own_tokens(
    prompts: list[list[int]], alone: list[list[int]], n_slots: int
) -> None:
    made = engine(small_model(3), max_batch_size=n_slots)
    responses = made.generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))
    assert tokens_of(responses) == alone
    # A row of work gives the same bits in a draft's pass and in verification, so no draft is ever wrong.
    assert {step.n_accepted for r in responses for step in r.req_metrics.steps if not step.cut} == {3}


def accepted_logits(
    spec: SpeculativeConfig | None, prompt: list[int], n: int, warm_up: list[list[int]] | None = None
) -> Tensor:
    """Bits of the logits `[n, V]` that chose the tokens, along the accepted path of every step; after `warm_up`, from
    whose cache blocks they may begin."""
    trace = RecordingTrace()
    made = engine(spec, max_batch_size=1, prefix_cache=warm_up is not None)
    if warm_up is not None:
        made.generate(warm_up, new_tokens(4, ignore_eos=True))
    made.trace = trace
    runner, paths = made.runner, []
    enqueue = runner.enqueue

    def watched(*args: Any, **options: Any) -> None:
        enqueue(*args, **options)
        [path] = runner.state.last_paths(1).tolist()
        paths.append([node for node in path if node >= 0])

    runner.enqueue = watched  # type: ignore[method-assign]
    [response] = made.generate([prompt], new_tokens(n, ignore_eos=True))
    assert (response.req_metrics.num_cached_tokens > 0) == (warm_up is not None)
    rows = [trace.tensors[f"step{i}/verify/target.head"][path] for i, path in enumerate(paths)]
    return torch.cat([trace.tensors["prefill/target.head"], *rows])[:n].view(torch.int16)


@pytest.mark.parametrize("name", TREES)
def test_logits_along_the_accepted_path_are_plain_decodings_bits(prompts: list[list[int]], name: str) -> None:
    assert torch.equal(accepted_logits(tree(name), prompts[0], 48), accepted_logits(None, prompts[0], 48))


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_accepted_about_as_far_as_in_plain_torch(prompts: list[list[int]], name: str) -> None:
    """The drafts come from bf16 kernels here and from bf16 torch there: near, not equal."""
    lengths = []
    for device in ("cuda", "cpu"):
        settings = {"session_len": 512, "max_batch_size": 4, "dtype": "bfloat16", "device": device}
        made = Engine.from_pretrained(shipped_pair().target, EngineConfig(**settings, speculative_config=tree(name)))
        steps = [s for r in made.generate(prompts[:4], new_tokens(32, ignore_eos=True)) for s in r.req_metrics.steps]
        lengths.append(sum(step.n_accepted + 1 for step in steps) / len(steps))
    assert lengths[0] == pytest.approx(lengths[1], rel=0.15)


def test_a_tree_step_allocates_nothing_on_the_device(prompts: list[list[int]]) -> None:
    made = engine(tree(TREES[0]))
    made.generate(prompts[:3], new_tokens(4))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    made.generate(prompts[:3], new_tokens(40))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("spec", [chain(3), tree(TREES[0]), looked_up("suffix")], ids=["chain", "tree", "suffix"])
def test_drawn_tokens_are_the_same_with_drafts_and_without(prompts: list[list[int]], spec: SpeculativeConfig) -> None:
    ways: list[dict[str, Any]] = [{"temperature": t, "top_p": 0.95} for t in (0.7, 1.0, 1.3)]
    limits = [new_tokens(N_TOKENS, ignore_eos=True, seed=seed, **ways[seed % 3]) for seed in range(len(prompts))]
    limits[4] = new_tokens(N_TOKENS, ignore_eos=True)  # a greedy one beside them
    plain = engine(None, max_batch_size=1)
    expected = [tokens_of(plain.generate([prompt], each))[0] for prompt, each in zip(prompts, limits, strict=True)]
    assert tokens_of(engine(spec, max_batch_size=5).generate(prompts, limits)) == expected


@pytest.mark.parametrize(
    "spec", [None, chain(3), tree(TREES[0]), looked_up("ngram")], ids=["plain", "chain", "tree", "ngram"]
)
def test_requests_that_arrive_and_leave_at_any_step_get_what_they_get_alone(
    prompts: list[list[int]], alone: list[list[int]], spec: SpeculativeConfig | None
) -> None:
    made, draw = engine(spec, prefill_share=0.5), random.Random(3)
    asked: list[tuple[RequestHandle, int]] = []
    is_busy = True
    while is_busy or len(asked) < 100:
        for _ in range(min(draw.choice([0, 0, 0, 1, 2]), 100 - len(asked))):
            which = draw.randrange(len(prompts))
            asked.append(
                (made.add_request(prompts[which], new_tokens(draw.randint(1, N_TOKENS), ignore_eos=True)), which)
            )
        if asked and draw.random() < 0.05:
            made.cancel(draw.choice(asked[-8:])[0].id)
        is_busy = made.step()
    for handle, which in asked:
        assert handle.token_ids == alone[which][: len(handle.token_ids)], handle
        assert handle.finish_reason in ("length", "cancelled")
    assert is_empty(made)


@pytest.mark.parametrize(
    "spec", [None, chain(3), tree(TREES[0]), looked_up("ngram")], ids=["plain", "chain", "tree", "ngram"]
)
def test_twenty_short_prompts_that_arrive_together_share_passes_and_get_what_they_get_alone(
    prompts: list[list[int]], spec: SpeculativeConfig | None
) -> None:
    text, limits = [token for prompt in prompts for token in prompt], new_tokens(N_TOKENS, ignore_eos=True)
    short = [text[i : i + n] for i, n in enumerate([1, 64, 63, *range(7, 58, 3)])]
    plain = engine(None, max_batch_size=1)
    expected = [tokens_of(plain.generate([prompt], limits))[0] for prompt in short]
    made = engine(spec, max_batch_size=24, session_len=256)
    runs = [made.add_request(prompt[:100], new_tokens(100, ignore_eos=True)) for prompt in prompts[:3]]
    made.step()
    n_before = made.book.n_passes
    handles = [made.add_request(prompt, limits) for prompt in short]
    while made.step():
        pass
    assert made.book.n_passes - n_before == 3
    assert [handle.token_ids for handle in handles] == expected
    for handle, prompt in zip(runs, prompts, strict=False):
        assert [handle.token_ids] == tokens_of(plain.generate([prompt[:100]], new_tokens(100, ignore_eos=True)))
    assert is_empty(made)


@pytest.mark.parametrize("spec", [None, chain(3), tree(TREES[0])], ids=["plain", "chain", "tree"])
def test_requests_that_share_beginnings_in_a_small_cache_get_what_they_get_alone(
    prompts: list[list[int]], spec: SpeculativeConfig | None
) -> None:
    """400 requests of random lengths, stops, arrivals and cancellations, texts of up to 400 tokens that begin alike, in
    14 blocks of 64: two of the longest do not fit."""
    common = [token for prompt in prompts for token in prompt][:128]
    texts = [[*common, *prompt] for prompt in prompts]
    expected = tokens_of(engine(None, max_batch_size=1).generate(texts, new_tokens(120, ignore_eos=True)))
    made, draw = engine(spec, prefix_cache=True, cache_blocks=14), random.Random(4)
    asked: list[tuple[RequestHandle, list[int]]] = []
    is_busy = True
    while is_busy or len(asked) < 400:
        for _ in range(min(draw.choice([0, 0, 1, 3]), 400 - len(asked))):
            which, n, at = draw.randrange(len(texts)), draw.randint(1, 120), draw.randint(0, 400)
            stops, wanted = tuple(expected[which][at : at + 1]), expected[which][:n]
            if set(stops) & set(wanted):
                wanted = wanted[: wanted.index(stops[0]) + 1]
            limits = new_tokens(n, ignore_eos=True, stop_token_ids=stops)
            asked.append((made.add_request(texts[which], limits), wanted))
        if asked and draw.random() < 0.01:
            made.cancel(draw.choice(asked[-8:])[0].id)
        is_busy = made.step()
    for handle, wanted in asked:
        is_cut = handle.finish_reason == "cancelled"
        assert handle.token_ids == (wanted[: len(handle.token_ids)] if is_cut else wanted), handle
    assert {handle.finish_reason for handle, _ in asked} == {"length", "stop", "cancelled"}
    counts = made.book.blocks.counts
    assert min(counts.n_put_back, counts.n_found_tokens, made.book.blocks.pool.n_evicted) > 0
    assert counts.n_taken == counts.n_given_back
    assert is_empty(made)


def test_a_cached_beginning_changes_no_bit_of_the_logits(prompts: list[list[int]]) -> None:
    text = [token for prompt in prompts for token in prompt][:330]
    cold = accepted_logits(chain(3), text, 48)
    assert torch.equal(accepted_logits(chain(3), text, 48, warm_up=[text[:200]]), cold)


def test_growing_into_blocks_allocates_nothing_on_the_device(prompts: list[list[int]]) -> None:
    made = engine(chain(3), prefix_cache=True, cache_blocks=14)
    made.generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    made.generate([prompt[:40] for prompt in prompts[:2]], new_tokens(150, ignore_eos=True))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("spec", [chain(3), chain(7), *map(tree, TREES)], ids=["chain-3", "chain-7", *TREES])
def test_no_bit_of_any_stage_differs_from_plain_decoding(prompts: list[list[int]], spec: SpeculativeConfig) -> None:
    plain = record_hashes(engine(None, max_batch_size=1), prompts[:4], 32)
    strips = strips_of(plain, record_hashes(engine(spec, max_batch_size=4), prompts[:4], 32))
    assert sentences(strips, "plain", "drafts")[1] == "no bit of any stage differs"
    assert min(strip.n_compared for strip in strips) > 500


def by_rule(rule: Any, k: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig(model=str(shipped_pair().draft), num_speculative_tokens=k, acceptance=rule)


@pytest.mark.parametrize("n_slots", [3, 8])
def test_sampled_drafts_give_each_request_what_it_gets_alone(prompts: list[list[int]], n_slots: int) -> None:
    limits = [new_tokens(N_TOKENS, temperature=0.9, top_p=0.95, seed=i, ignore_eos=True) for i in range(len(prompts))]
    one_by_one = engine(by_rule(RejectionAcceptance()), max_batch_size=1)
    expected = [tokens_of(one_by_one.generate([p], each))[0] for p, each in zip(prompts, limits, strict=True)]
    responses = engine(by_rule(RejectionAcceptance()), max_batch_size=n_slots).generate(prompts, limits)
    assert tokens_of(responses) == expected
    assert accepted_counts(responses) >= {0, 1, 2}


@pytest.mark.parametrize("rule", [RejectionAcceptance(), MedusaAcceptance()])
def test_greedy_requests_keep_their_tokens_under_rules_for_drawn_ones(
    prompts: list[list[int]], alone: list[list[int]], rule: Any
) -> None:
    assert tokens_of(engine(by_rule(rule)).generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))) == alone


def test_forced_and_relaxed_lengths_are_what_they_say_on_the_gpu(
    prompts: list[list[int]], alone: list[list[int]]
) -> None:
    limits = new_tokens(1 + 8 * 3, ignore_eos=True)
    forced = engine(by_rule(ForcedAcceptance(length=3))).generate(prompts, limits)
    assert accepted_counts(forced) == {2}
    assert all(response.lossy is not None for response in forced)
    strict = engine(by_rule(RelaxedAcceptance(1, 0.0))).generate(prompts, new_tokens(N_TOKENS, ignore_eos=True))
    assert tokens_of(strict) == alone
