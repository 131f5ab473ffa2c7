"""Requests that begin alike share what was read once, and get what they get without: bit for bit where kernels run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_accounts import assert_all_blocks_are_back, watched
from device_engines import BY_MEANING, device_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from lettered import MOST_NEW, N_LETTERS, lettered_engine
from rings import exhaustive_but, slow_but
from test_requests_join_and_leave import assert_each_has_its_own, run_arrivals
from tiny_engines import Pair, is_empty, new_tokens, plain_tokens, random_prompts, tiny_engine, tokens_of
from torch import Tensor

from eagle3core import Engine
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.reference

COMMON = random_prompts([44], n_vocab=N_LETTERS, seed=3)[0]


def sharing_prompts() -> list[list[int]]:
    """Eight texts of one beginning: cut in blocks of four at a block's end, beside it, and gone on otherwise."""
    ends = random_prompts([3, 1, 9, 5], n_vocab=N_LETTERS, seed=4)
    return [
        COMMON, COMMON[:40], COMMON[:41], COMMON[:39], [*COMMON[:24], *ends[0]], [*COMMON[:25], *ends[1]],
        [*COMMON[:11], *ends[2]], ends[3],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def shared_alone(letters: Pair) -> list[list[int]]:
    """What each of them gives by itself, cold and without drafts."""
    engine = tiny_engine(letters, None, max_batch_size=1)
    return [tokens_of(engine.generate([prompt], new_tokens(MOST_NEW)))[0] for prompt in sharing_prompts()]


def caching_engine(letters: Pair, k: int | None, n_slots: int, n_behind: int = 1, **changes: Any) -> Engine:
    return watched(lettered_engine(letters, k, n_slots, n_behind, prefix_cache=True, **changes))


@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_a_text_that_was_read_before_is_read_from_its_last_whole_block_on(
    letters: Pair, shared_alone: list[list[int]], k: int | None
) -> None:
    engine = caching_engine(letters, k, 1)
    responses = [engine.generate([prompt], new_tokens(MOST_NEW))[0] for prompt in sharing_prompts()]
    assert tokens_of(responses) == shared_alone
    found = [response.req_metrics.num_cached_tokens for response in responses]
    # Of 40 tokens the last is read in any case. A draft's block holds the token after it too, so where a text goes on
    # otherwise right behind a block, that block is not found.
    assert found == [0, 36, 40, 36, 20 if k else 24, 24, 8, 0]
    assert engine.book.blocks.counts.n_found_tokens == sum(found)
    assert_all_blocks_are_back(engine)


def test_an_answer_that_is_asked_on_is_found_as_well(letters: Pair, shared_alone: list[list[int]]) -> None:
    engine = caching_engine(letters, 3, 1)
    prompt = sharing_prompts()[4]
    answer = engine.generate([prompt], new_tokens(MOST_NEW))[0].token_ids
    longer = [*prompt, *answer, 1, 2, 3]
    again = engine.generate([longer], new_tokens(9))[0]
    # Of 27 + 18 tokens the last steps' may not be final yet, in the draft's cache.
    assert again.req_metrics.num_cached_tokens >= 36
    assert [again.token_ids] == plain_tokens(letters, [longer], 9)


def test_without_the_setting_nothing_is_kept(letters: Pair) -> None:
    engine = lettered_engine(letters, 3)
    for _ in range(2):
        [response] = engine.generate([COMMON], new_tokens(3))
        assert response.req_metrics.num_cached_tokens == 0
    assert engine.book.blocks.pool.n_kept == 0


def all_rows(engine: Engine, blocks: list[int]) -> list[Tensor]:
    """Keys and values of both models in the blocks."""
    state = engine.runner.state
    assert state.draft is not None
    at = torch.tensor(blocks)
    return [state.k[:, at], state.v[:, at], state.draft.k[at], state.draft.v[at]]


def test_shared_blocks_are_only_read(letters: Pair, shared_alone: list[list[int]]) -> None:
    engine = caching_engine(letters, 3, 4)
    engine.generate([COMMON], new_tokens(1))
    request = engine.add_request(COMMON, new_tokens(1)).request
    shared = engine.book.blocks._found(request)
    assert len(shared) == 10, "of 44 tokens the last block holds the last token"
    before = [rows.clone() for rows in all_rows(engine, shared)]
    assert tokens_of(engine.generate(sharing_prompts(), new_tokens(MOST_NEW))) == shared_alone
    assert engine.book.blocks._found(request)[:10] == shared
    assert all(torch.equal(*pair) for pair in zip(before, all_rows(engine, shared), strict=True))


@pytest.mark.parametrize(("k", "n_behind"), slow_but([(None, 1), (3, 1)], [(None, 1), (3, 0), (3, 1)]))
def test_requests_that_share_and_wait_again_get_what_they_get_alone(
    letters: Pair, shared_alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, k: int | None, n_behind: int
) -> None:
    monkeypatch.setattr("test_requests_join_and_leave.lettered_prompts", sharing_prompts)
    engine = caching_engine(letters, k, 4, n_behind, block_size=2, cache_blocks=36)
    assert_each_has_its_own(run_arrivals(engine, shared_alone, 20, seed=5, run_on=0.8), shared_alone)
    pool, counts = engine.book.blocks.pool, engine.book.blocks.counts
    assert is_empty(engine)
    assert_all_blocks_are_back(engine)
    assert min(counts.n_put_back, counts.n_found_tokens, pool.n_evicted) > 0, "nothing shared, kept or run out"


@pytest.mark.slow
@pytest.mark.parametrize(("k", "n_behind"), exhaustive_but([(3, 1)], [(None, 1), (3, 1)]))
def test_four_hundred_requests_that_share_a_small_cache_get_what_they_get_alone(
    letters: Pair, shared_alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, k: int | None, n_behind: int
) -> None:
    monkeypatch.setattr("test_requests_join_and_leave.lettered_prompts", sharing_prompts)
    engine = caching_engine(letters, k, 8, n_behind, block_size=2, cache_blocks=70)
    asked = run_arrivals(engine, shared_alone, 400, seed=300, run_on=0.7)
    assert {"stop", "length", "cancelled"} == set(assert_each_has_its_own(asked, shared_alone))
    assert is_empty(engine)
    assert_all_blocks_are_back(engine)
    counts = engine.book.blocks.counts
    assert min(counts.n_put_back, counts.n_found_tokens, engine.book.blocks.pool.n_evicted) > 20


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(0, 44), st.integers(0, 5)), min_size=2, max_size=4))
def test_texts_cut_anywhere_get_what_they_get_alone(letters: Pair, cuts: list[tuple[int, int]]) -> None:
    prompts = [[*COMMON[:at], *[(at + i) % N_LETTERS for i in range(n)], 7] for at, n in cuts]
    engine = caching_engine(letters, 2, 2)
    found = [engine.generate([prompt], new_tokens(6))[0].token_ids for prompt in prompts]
    assert found == plain_tokens(letters, prompts, 6)


def logits_of(engine: Engine, prompt: list[int], n: int) -> tuple[list[int], Tensor, list[list[int]]]:
    """Tokens, the bits of the logits that chose them, and what was drafted."""
    trace = RecordingTrace()
    engine.trace = trace
    response = engine.generate([prompt], new_tokens(n))[0]
    steps = response.req_metrics.steps
    rows = [trace.tensors["prefill/target.head"]]
    rows += [trace.tensors[f"step{i}/verify/target.head"][: step.n_accepted + 1] for i, step in enumerate(steps)]
    drafted = [trace.tensors[f"step{i}/tree.tokens"].flatten().tolist() for i in range(len(steps))]
    return response.token_ids, torch.cat(rows)[:n].view(torch.int16), drafted


def test_a_cached_beginning_changes_no_bit_of_logits_and_no_draft_where_kernels_run(nano_pair: Pair) -> None:
    """The kernels' programs, each call computed by its definition, whose rows have the same bits at any chunk."""
    prompt = random_prompts([150], n_vocab=256)[0]
    cold = device_engine(nano_pair, 3, BY_MEANING, session_len=256, chunk=64)
    warm = device_engine(nano_pair, 3, BY_MEANING, session_len=256, chunk=64, prefix_cache=True)
    warm.generate([prompt[:140]], new_tokens(4))
    tokens, logits, drafts = logits_of(warm, prompt, 20)
    assert warm.book.blocks.counts.n_found_tokens == 128
    expected = logits_of(cold, prompt, 20)
    assert (tokens, drafts) == (expected[0], expected[2])
    assert torch.equal(logits, expected[1])
