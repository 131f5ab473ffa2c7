"""Drafts that are looked up change no token, and count for what they are: methods "ngram" and "suffix"."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import (
    Pair,
    accepted_counts,
    drafting_engine,
    drawn_alone,
    is_empty,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    tree_runner,
)

from eagle3core import Engine, InvariantViolated, Response
from eagle3core.lookup import LOOKUPS
from eagle3core.step.admission import SlotRequest
from eagle3core.step.tree import chain_tree
from eagle3core.trace import Trace

pytestmark = pytest.mark.reference

METHODS = sorted(LOOKUPS)
LENGTHS = [3, 9, 1, 17]


def lookup_engine(pair: Pair, method: str, k: int, **changes: Any) -> Engine:
    return drafting_engine(pair, {"method": method, "num_speculative_tokens": k}, **changes)


def proposals(method: str, prompt: list[int], response: Response, k: int) -> list[list[int]]:
    """What a look-up of its own proposes where each step of a response begins."""
    found = []
    for step in response.req_metrics.steps:
        lookup = LOOKUPS[method]()
        lookup.extend([*prompt, *response.token_ids[: step.start]])
        found.append(lookup.propose(k))
    return found


@given(
    method=st.sampled_from(METHODS),
    k=st.integers(1, 8),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    n_slots=st.integers(1, 4),
    n_new=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.0, 1.2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_any_batch_gives_plain_decodings_tokens_and_counts_what_was_proposed(
    pair: Pair, method: str, k: int, lengths: list[int], n_slots: int, n_new: int, temperature: float, seed: int
) -> None:
    prompts = random_prompts(lengths, seed=seed)
    limits, expected = drawn_alone(pair, prompts, n_new, temperature, seed)
    engine = lookup_engine(pair, method, k, max_batch_size=n_slots)
    responses = engine.generate(prompts, limits)
    assert tokens_of(responses) == expected
    assert is_empty(engine)
    for prompt, response in zip(prompts, responses, strict=True):
        for step, drafts in zip(response.req_metrics.steps, proposals(method, prompt, response, k), strict=True):
            follows = response.token_ids[step.start :]
            agreeing = next((i for i, t in enumerate(drafts) if [t] != follows[i : i + 1]), len(drafts))
            assert step.n_draft == len(drafts)
            assert step.n_accepted == agreeing or (step.cut and step.n_accepted > agreeing)


@pytest.mark.parametrize("method", METHODS)
def test_text_that_repeats_itself_is_accepted_and_fewer_steps_are_made(pair: Pair, method: str) -> None:
    # Six tokens and no randomness: before long the output runs in a circle.
    responses = lookup_engine(pair, method, 4, session_len=128).generate(random_prompts(LENGTHS), new_tokens(90))
    assert accepted_counts(responses) >= {0, 1, 2, 3, 4}
    infos = [response.req_metrics.spec_info for response in responses]
    assert all(info is not None and info.num_drafts < 60 for info in infos)
    for info, response in zip(infos, responses, strict=True):
        assert info is not None
        assert info.num_draft_tokens == sum(step.n_draft for step in response.req_metrics.steps)
        assert info.num_draft_tokens < 4 * info.num_drafts, "a look-up does not always find four tokens"
        assert info.num_rewound_tokens == info.num_draft_tokens - sum(s.n_accepted for s in response.req_metrics.steps)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_find_drafts_nothing_and_steps_stay_plain(pair: Pair, method: str) -> None:
    """A first token that stood nowhere before."""
    engine = lookup_engine(pair, method, 3)
    for prompt in [[token] for token in range(6)]:
        [response] = engine.generate([prompt], new_tokens(2))
        [step] = response.req_metrics.steps
        assert (step.n_draft, step.n_accepted) == ((1, 0) if response.token_ids[0] == prompt[0] else (0, 0)) or (
            step.n_accepted == 1 and response.token_ids == prompt * 2
        )


@pytest.mark.parametrize("method", METHODS)
def test_requests_join_leave_stop_and_stream_and_their_look_ups_go_with_them(pair: Pair, method: str) -> None:
    prompts = random_prompts(LENGTHS)
    expected = plain_tokens(pair, prompts, 24)
    engine = lookup_engine(pair, method, 3, max_batch_size=2)
    stop = expected[1][10]
    first, second = engine.add_request(prompts[0], new_tokens(24)), engine.add_request(prompts[3], new_tokens(24))
    for _ in range(3):
        engine.step()
    third = engine.add_request(prompts[1], new_tokens(24, stop_token_ids=(stop,)))
    engine.cancel(second.id)
    assert list(engine.stream(prompts[2], new_tokens(24))) == expected[2]
    while engine.step():
        assert engine.book._proposals._lookups.keys() <= {first.id, third.id}
    assert first.token_ids == expected[0]
    assert second.token_ids == expected[3][: len(second.token_ids)]
    assert third.token_ids == expected[1][: expected[1].index(stop) + 1]
    assert not engine.book._proposals._lookups
    last = engine.add_request(prompts[0], new_tokens(24))
    engine.step()
    assert engine.book._proposals._lookups.keys() == {last.id}
    engine.cancel(last.id)
    assert not engine.book._proposals._lookups
    assert is_empty(engine)


def test_an_engine_that_broke_off_drops_its_look_ups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lookup_engine(pair, "ngram", 3)
    engine.add_request(random_prompts([4])[0], new_tokens(24))
    engine.step()
    assert engine.book._proposals._lookups
    monkeypatch.setattr(engine.runner, "enqueue", broken)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert not engine.book._proposals._lookups


def broken(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("method", METHODS)
def test_no_draft_model_is_read_and_one_that_is_given_is_left_alone(pair: Pair, method: str) -> None:
    engine = lookup_engine(pair, method, 2)
    assert engine.draft is None
    assert (engine.speculation.enabled, engine.speculation.reason) == (True, f"{method} with 2 drafted tokens a step")
    assert engine.memory_plan.draft_kv_bytes == 0
    both = tiny_engine(pair, 2)
    again = Engine(both.target, both.draft, engine.config)
    assert (again.draft, again.runner.draft) == (None, None)
    prompts = random_prompts(LENGTHS)
    assert again.generate(prompts, new_tokens(9)) == engine.generate(prompts, new_tokens(9))


def test_the_caches_hold_the_tokens_in_flight(pair: Pair) -> None:
    """A session filled to its last token, with eight drafts beyond it."""
    prompt = random_prompts([20])[0]
    [plain] = tiny_engine(pair, None).generate([prompt], new_tokens(99))
    [drafted] = lookup_engine(pair, "suffix", 8).generate([prompt], new_tokens(99))
    assert drafted.token_ids == plain.token_ids
    assert len(prompt) + len(plain.token_ids) == 64


def test_performance_mode_takes_looked_up_drafts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(LENGTHS)
    expected = plain_tokens(pair, prompts, 24)
    monkeypatch.setenv("EAGLE3_PERF_MODE", "1")
    assert tokens_of(lookup_engine(pair, "ngram", 3).generate(prompts, new_tokens(24))) == expected


def test_drafts_are_refused_while_results_are_unread(pair: Pair) -> None:
    runner = tree_runner(pair[0], chain_tree(2))
    runner.admit(0, SlotRequest(0, [1, 2, 3], 8, ()), Trace())
    with pytest.raises(InvariantViolated, match="1 results under way"):
        runner.write_drafts({0: [1, 2]})
    runner.collect(everything=True)
    runner.write_drafts({0: [1]})
    runner.enqueue(1, 0, Trace())
    [outcome] = runner.collect(everything=True)
    assert outcome.rows[0].drafts == [1, -1]
