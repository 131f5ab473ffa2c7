"""Requests share a cache too small for all of them: some wait again, and each gets what it gets alone."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from block_accounts import assert_all_blocks_are_back, watched
from lettered import MOST_NEW, lettered_engine, lettered_prompts
from rings import exhaustive_but, slow_but
from test_requests_join_and_leave import assert_each_has_its_own, run_arrivals
from tiny_engines import Pair, is_empty, new_tokens, plain_tokens, random_prompts, tiny_engine, tokens_of

from eagle3core import ConfigError, Engine, RejectionAcceptance, SpeculativeConfig
from eagle3core.step.sizes import blocks_for

pytestmark = pytest.mark.reference

SMALL = 19  # blocks of 4 tokens: the longest request alone takes 17


def small_engine(letters: Pair, k: int | None, n_slots: int, n_behind: int, **changes: Any) -> Engine:
    return watched(lettered_engine(letters, k, n_slots, n_behind, **{"cache_blocks": SMALL, **changes}))


@pytest.mark.parametrize(("k", "n_behind"), slow_but([(None, 1), (3, 1)], [(None, 1), (3, 0), (3, 1)]))
def test_requests_that_wait_again_since_blocks_ran_out_get_what_they_get_alone(
    letters: Pair, alone: list[list[int]], k: int | None, n_behind: int
) -> None:
    engine = small_engine(letters, k, 4, n_behind, block_size=2, cache_blocks=34)
    asked = run_arrivals(engine, alone, 16, seed=0, run_on=0.8)
    assert_each_has_its_own(asked, alone)
    assert is_empty(engine)
    assert_all_blocks_are_back(engine)
    n_put_back = [handle.response().req_metrics.num_put_back for handle, _, _ in asked]
    assert sum(n_put_back) == engine.book.blocks.counts.n_put_back > 0, "blocks never ran out"


@pytest.mark.slow
@pytest.mark.parametrize(("k", "n_behind"), exhaustive_but([(3, 1)], [(None, 0), (3, 1)]))
def test_four_hundred_requests_through_a_small_cache_get_what_they_get_alone(
    letters: Pair, alone: list[list[int]], k: int | None, n_behind: int
) -> None:
    engine = small_engine(letters, k, 8, n_behind, block_size=2, cache_blocks=70)
    asked = run_arrivals(engine, alone, 400, seed=200 + n_behind, run_on=0.7)
    reasons = assert_each_has_its_own(asked, alone)
    assert {"stop", "length", "cancelled"} == set(reasons)
    assert is_empty(engine)
    assert_all_blocks_are_back(engine)
    assert engine.book.blocks.counts.n_put_back > 20


@pytest.mark.parametrize("block", [4, 64])
def test_a_cache_of_every_slots_longest_session_keeps_nobody_waiting(
    letters: Pair, alone: list[list[int]], block: int
) -> None:
    engine = lettered_engine(letters, 3, 4, 1, block_size=block, prefill_chunk=64)
    steps = engine.runner.enqueue
    n_running: list[int] = []

    def noted(n: int, *args: Any, **options: Any) -> None:
        n_running.append(n)
        steps(n, *args, **options)

    engine.runner.enqueue = noted  # type: ignore[method-assign]
    assert tokens_of(engine.generate(lettered_prompts(), new_tokens(MOST_NEW))) == alone
    assert n_running[0] == 4, "all slots at once"
    assert engine.book.blocks.counts.n_put_back == engine.book.blocks.counts.n_rewound == 0


def test_the_youngest_waits_again_and_goes_on_before_those_that_came_later(pair: Pair) -> None:
    """Three requests that grow to 12 blocks each through a cache of 22."""
    prompts = random_prompts([5, 5, 5])
    engine = watched(tiny_engine(pair, None, max_batch_size=3, cache_blocks=22))
    handles = [engine.add_request(prompt, new_tokens(40)) for prompt in prompts]
    ended: list[int] = []
    while engine.step():
        ended += [i for i, handle in enumerate(handles) if handle.finish_reason and i not in ended]
    responses = [handle.response() for handle in handles]
    assert ended + [i for i in range(3) if i not in ended] == [0, 1, 2]
    counts = [response.req_metrics.num_put_back for response in responses]
    assert counts[0] == 0, "the oldest never waits"
    assert counts[2] > 0
    assert tokens_of(responses) == plain_tokens(pair, prompts, 40)


@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_drawn_tokens_are_the_same_after_waiting_again(letters: Pair, k: int | None) -> None:
    prompts = lettered_prompts()
    limits = [new_tokens(MOST_NEW, temperature=0.9, top_p=0.95, seed=i) for i in range(len(prompts))]
    one_by_one = tiny_engine(letters, None, max_batch_size=1)
    expected = [tokens_of(one_by_one.generate([p], each))[0] for p, each in zip(prompts, limits, strict=True)]
    engine = small_engine(letters, k, 4, 1)
    assert tokens_of(engine.generate(prompts, limits)) == expected
    assert engine.book.blocks.counts.n_put_back > 0, "blocks never ran out"


@pytest.mark.parametrize("n_behind", slow_but([1], [0, 1]))
def test_tokens_drawn_by_rejection_are_the_same_after_waiting_again(letters: Pair, n_behind: int) -> None:
    """There a step draws other numbers in its middle than where it begins, so it has to begin where it would have."""
    prompts = lettered_prompts()
    limits = [new_tokens(MOST_NEW, temperature=2.0, seed=i, logprobs=True) for i in range(len(prompts))]
    spec = SpeculativeConfig(model=str(letters[1]), num_speculative_tokens=3, acceptance=RejectionAcceptance())
    one_by_one = tiny_engine(letters, None, max_batch_size=1, speculative_config=spec)
    expected = [one_by_one.generate([p], each)[0] for p, each in zip(prompts, limits, strict=True)]
    engine = small_engine(letters, None, 4, n_behind, speculative_config=spec, block_size=2, cache_blocks=34)
    responses = engine.generate(prompts, limits)
    assert tokens_of(responses) == tokens_of(expected)
    assert engine.book.blocks.counts.n_put_back > 0, "blocks never ran out"
    for ours, alone in zip(responses, expected, strict=True):
        pairs = zip(ours.logprobs or [], alone.logprobs or [], strict=True)
        assert all(a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-9 for a, b in pairs)
    assert_all_blocks_are_back(engine)


def test_a_request_that_is_cancelled_while_it_waits_again_has_all_its_tokens(letters: Pair) -> None:
    spec = SpeculativeConfig(model=str(letters[1]), num_speculative_tokens=3, acceptance=RejectionAcceptance())
    engine = small_engine(letters, None, 4, 0, speculative_config=spec)
    limits = [new_tokens(MOST_NEW, temperature=0.9, seed=i) for i in range(8)]
    handles = [engine.add_request(prompt, each) for prompt, each in zip(lettered_prompts(), limits, strict=True)]
    most: dict[int, list[int]] = {}
    cancelled = None
    while engine.step():
        waits = next((h for h in handles if h.request.kept_token is not None and h.id in most), None)
        if waits is not None and cancelled is None:
            cancelled = waits
            engine.cancel(waits.id)
            assert waits.token_ids == most[waits.id]
        most |= {handle.id: handle.token_ids for handle in handles if handle.request.kept_token is None}
    assert cancelled is not None, "nobody waited again"


def test_a_prompt_under_reading_is_put_back_before_any_that_runs(letters: Pair, alone: list[list[int]]) -> None:
    engine = small_engine(letters, None, 2, 0, cache_blocks=16, prefill_share=0.05)
    prompts = lettered_prompts()
    runs = engine.add_request(prompts[0], new_tokens(18))
    engine.step()
    reads = engine.add_request(prompts[6], new_tokens(18))
    was_read = False
    while engine.step():
        was_read |= reads.id in engine.book.reading
    assert was_read
    assert runs.response().req_metrics.num_put_back == 0
    assert reads.response().req_metrics.num_put_back > 0
    assert [runs.token_ids, reads.token_ids] == [alone[0], alone[6]]


def test_a_request_that_all_blocks_do_not_hold_is_refused_before_anything_is_decoded(letters: Pair) -> None:
    engine = lettered_engine(letters, 3, cache_blocks=12)
    prompt = lettered_prompts()[6]
    with pytest.raises(ConfigError) as caught:
        engine.generate([[1], prompt], new_tokens(18))
    assert caught.value.what == "prompt 1 has 44 tokens and may get 18, which takes 17 cache blocks"
    assert caught.value.allowed == "at most 12, all that the cache has"
    with pytest.raises(ConfigError, match="17 cache blocks"):
        engine.add_request(prompt, new_tokens(18))
    assert is_empty(engine)
    assert len(engine.generate([prompt[:30]], new_tokens(10))[0].token_ids) == 10


def test_what_drafts_did_not_fill_is_given_back_where_blocks_are_short(letters: Pair, alone: list[list[int]]) -> None:
    """The host counts with all drafts of the step under way, and learns how many were accepted when it waits for it."""
    engine = small_engine(letters, 3, 4, 1)
    assert tokens_of(engine.generate(lettered_prompts(), new_tokens(MOST_NEW))) == alone
    assert engine.book.blocks.counts.n_rewound > 0
    assert_all_blocks_are_back(engine)


def test_blocks_taken_ahead_where_many_are_empty_are_given_back_to_one_that_waits(letters: Pair) -> None:
    """Where there are plenty, no step has a block cleared before it; nobody waits for what another may never need."""
    engine, prompts = small_engine(letters, 3, 2, 0, cache_blocks=10, block_size=4), lettered_prompts()[:2]
    account, taken = engine.book.blocks, []
    first = engine.add_request(prompts[0][:4], new_tokens(24, ignore_eos=True))
    engine.step()
    taken.append(account.pool.n_held)
    second = engine.add_request(prompts[1][:4], new_tokens(24, ignore_eos=True))
    while not (first.finish_reason and second.finish_reason):
        engine.step()
        if not taken[1:]:
            assert len(engine.book.running) == 2, "the second waits for blocks that the first does not need"
            taken.append(account.counts.n_rewound)
    assert taken[0] == blocks_for(len(prompts[0][:4]) + 24 - 1 + engine.runner.sizes.in_flight, 4), (
        "all that it may come to hold"
    )
    assert taken[1] > 0
    assert_all_blocks_are_back(engine)


def test_infinities_that_others_left_in_the_cache_reach_nobody(letters: Pair, alone: list[list[int]]) -> None:
    engine = small_engine(letters, 3, 3, 1)
    pool, draw = engine.book.blocks.pool, random.Random(0)
    give_back = pool.give_back

    def spoil(blocks: Sequence[int]) -> None:
        value = draw.choice([torch.nan, torch.inf])
        for cache in engine.runner.state.pages:
            cache.index_fill_(cache.dim() - 4, torch.tensor(blocks, dtype=torch.int64), value)
        give_back(blocks)

    pool.give_back = spoil  # type: ignore[method-assign]
    handles = [engine.add_request(prompt, new_tokens(MOST_NEW)) for prompt in lettered_prompts()]
    while engine.step():
        pass
    assert [handle.token_ids for handle in handles] == alone


def test_blocks_taken_and_given_back_are_logged_on_request(
    letters: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = lettered_engine(letters, None, n_behind=0)
    with caplog.at_level(logging.INFO, "eagle3core"):
        engine.generate([[1, 2, 3]], new_tokens(3))
        assert "[KV]" not in caplog.text
        monkeypatch.setenv("EAGLE3_KV_DEBUG", "1")
        engine.generate([[1, 2, 3]], new_tokens(3))
    assert [message for message in caplog.messages if "[KV]" in message] == [
        "[EAGLE][KV] request 1 slot 0 takes 2 blocks [0, 1]; 2 of 34 held, 0 kept",
        "[EAGLE][KV] request 1 slot 0 gives back 2 blocks [0, 1]; 0 of 34 held, 0 kept",
    ]


def test_a_call_that_broke_off_leaves_all_blocks_free(letters: Pair, alone: list[list[int]]) -> None:
    engine = small_engine(letters, 3, 3, 1)
    for prompt in lettered_prompts()[:3]:
        engine.add_request(prompt, new_tokens(MOST_NEW))
    engine.step()
    engine.step()
    assert engine.book.blocks.pool.n_held
    engine.book.fail(RuntimeError("broken off"))
    assert engine.book.blocks.pool.n_available == SMALL
    assert tokens_of(engine.generate(lettered_prompts(), new_tokens(MOST_NEW))) == alone


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_target"])
def test_drafts_without_a_head_share_a_small_cache_too(letters: Pair, alone: list[list[int]], method: str) -> None:
    model = str(letters[0]) if method == "draft_target" else None
    spec = SpeculativeConfig(method=method, model=model, num_speculative_tokens=3)
    engine = watched(
        tiny_engine(letters, None, speculative_config=spec, max_batch_size=4, cache_blocks=SMALL, prefix_cache=True)
    )
    for _ in range(2):
        assert tokens_of(engine.generate(lettered_prompts(), new_tokens(MOST_NEW))) == alone
    counts = engine.book.blocks.counts
    assert min(counts.n_put_back, counts.n_found_tokens) > 0, "blocks never ran out, or nothing was found again"
    assert_all_blocks_are_back(engine)


def test_log_probabilities_are_the_same_after_waiting_again(letters: Pair) -> None:
    limits = new_tokens(MOST_NEW, logprobs=2)
    expected = tiny_engine(letters, None).generate(lettered_prompts(), limits)
    engine = small_engine(letters, 3, 4, 1, prefix_cache=True)
    found = engine.generate(lettered_prompts(), limits)
    assert engine.book.blocks.counts.n_put_back > 0, "blocks never ran out"
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        assert [each.token_id for each in mine.logprobs] == mine.token_ids == theirs.token_ids
        values = [torch.tensor([each.logprob for each in response.logprobs or ()]) for response in (mine, theirs)]
        torch.testing.assert_close(*values, rtol=1e-9, atol=1e-9)
