"""Drawn tokens through the engine: the same with drafts and without, alone and in company, for every seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import (
    DYNAMIC_TREE,
    N_VOCAB,
    Pair,
    accepted_counts,
    drafting_engine,
    is_empty,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
)

from eagle3core import ConfigError, Engine, GenerationConfig, RejectionAcceptance, SpeculativeConfig
from eagle3core.step.draw import kept_tokens
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17]


def tree_engine(pair: Pair, **changes: Any) -> Engine:
    return drafting_engine(pair, DYNAMIC_TREE, **changes)


def drawn(seed: int, **changes: Any) -> GenerationConfig:
    return new_tokens(16, temperature=1.0, seed=seed, **changes)


ANY_DRAW = st.tuples(
    st.integers(0, 2**64 - 5), st.sampled_from([0.6, 1.0, 1.8]), st.sampled_from([0, 3]), st.sampled_from([0.8, 1.0]),
    st.sampled_from([0.0, 0.2]), st.integers(1, 3),
)  # fmt: skip


@settings(max_examples=2)
@given(ANY_DRAW)
def test_drafts_and_company_change_no_drawn_token(pair: Pair, settings: tuple[Any, ...]) -> None:
    check_drawn_tokens(pair, *settings)


@pytest.mark.slow
@settings(max_examples=6)
@given(ANY_DRAW)
def test_drafts_and_company_change_no_drawn_token_at_further_settings(pair: Pair, settings: tuple[Any, ...]) -> None:
    check_drawn_tokens(pair, *settings)


def check_drawn_tokens(
    pair: Pair, seed: int, temperature: float, top_k: int, top_p: float, min_p: float, n_slots: int
) -> None:
    """Each request draws what it draws alone without drafts, beside others and with two kinds of drafts."""
    limits = [
        new_tokens(14, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed + i) for i in range(4)
    ]
    prompts = random_prompts(LENGTHS)
    alone = tiny_engine(pair, None, max_batch_size=1)
    expected = [tokens_of(alone.generate([prompt], each))[0] for prompt, each in zip(prompts, limits, strict=True)]
    for engine in (tiny_engine(pair, 3, max_batch_size=n_slots), tree_engine(pair, max_batch_size=n_slots)):
        assert tokens_of(engine.generate(prompts, limits)) == expected
        assert is_empty(engine)


@settings(max_examples=2)
@given(ANY_DRAW)
def test_company_changes_no_token_of_sampled_drafts(pair: Pair, settings: tuple[Any, ...]) -> None:
    """Another token than by matching drafts with draws, for some seeds, but always the same one."""
    seed, temperature, top_k, top_p, min_p, n_slots = settings
    spec = SpeculativeConfig(model=str(pair[1]), num_speculative_tokens=3, acceptance=RejectionAcceptance())
    limits = [
        new_tokens(14, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed + i) for i in range(4)
    ]
    prompts = random_prompts(LENGTHS)
    alone = tiny_engine(pair, None, max_batch_size=1, speculative_config=spec)
    expected = [tokens_of(alone.generate([prompt], each))[0] for prompt, each in zip(prompts, limits, strict=True)]
    engine = tiny_engine(pair, None, max_batch_size=n_slots, speculative_config=spec)
    limits[1] = new_tokens(9)  # a greedy one among them
    responses = engine.generate(prompts, limits)
    assert [tokens_of(responses)[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
    assert responses[1].token_ids == plain_tokens(pair, prompts[1:2], 9)[0]
    assert all(response.lossy is None for response in responses)
    assert is_empty(engine)


@pytest.mark.slow
def test_tokens_of_sampled_drafts_are_distributed_as_those_of_plain_draws(pair: Pair) -> None:
    """Two tokens behind the first, whose place the rule decides about, over seeds: both ways by one chi-square."""
    prompt, n = random_prompts([5])[0], 400
    spec = SpeculativeConfig(model=str(pair[1]), num_speculative_tokens=2, acceptance=RejectionAcceptance())
    counts: list[Counter[tuple[int, ...]]] = []
    for changes, first in (({}, 0), ({"speculative_config": spec}, 10_000)):
        engine = tiny_engine(pair, None, max_batch_size=16, **changes)
        limits = [new_tokens(3, temperature=0.9, top_k=2, seed=first + i) for i in range(n)]
        counts.append(Counter(tuple(tokens) for tokens in tokens_of(engine.generate([prompt] * n, limits))))
    keys = sorted(set(counts[0]) | set(counts[1]))
    assert len(keys) > 3
    statistic = sum((counts[0][key] - counts[1][key]) ** 2 / (counts[0][key] + counts[1][key]) for key in keys)
    freedom = torch.tensor((len(keys) - 1) / 2)
    assert float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2))) > 1e-4


def test_greedy_requests_beside_drawn_ones_keep_their_tokens(pair: Pair) -> None:
    prompts = random_prompts(LENGTHS)
    greedy = plain_tokens(pair, prompts, 16)
    limits = [new_tokens(16), drawn(1), new_tokens(16), drawn(2)]
    mixed = tokens_of(tree_engine(pair).generate(prompts, limits))
    assert [mixed[0], mixed[2]] == [greedy[0], greedy[2]]
    assert mixed[1] != greedy[1]
    assert mixed[1] == tokens_of(tiny_engine(pair, 2).generate(prompts[1:2], drawn(1)))[0]


def test_drafts_are_accepted_when_tokens_are_drawn(pair: Pair) -> None:
    responses = tree_engine(pair).generate(random_prompts(LENGTHS * 3), [drawn(i) for i in range(12)])
    assert accepted_counts(responses) >= {0, 1, 2}


def test_a_request_without_a_seed_names_the_one_it_was_given(pair: Pair) -> None:
    engine, prompt = tiny_engine(pair, 3), random_prompts([6])
    first, second = (engine.generate(prompt, new_tokens(16, temperature=1.5))[0] for _ in range(2))
    assert first.seed is not None
    assert first.seed != second.seed
    assert engine.generate(prompt, new_tokens(16, temperature=1.5, seed=first.seed))[0].token_ids == first.token_ids
    assert engine.generate(prompt, new_tokens(16))[0].seed is None


def test_a_temperature_near_zero_and_one_token_left_are_greedy(pair: Pair) -> None:
    prompts = random_prompts(LENGTHS)
    greedy = plain_tokens(pair, prompts, 16)
    for narrow in ({"temperature": 1e-9}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9},
                   {"temperature": 1.0, "min_p": 1.0}):  # fmt: skip
        assert tokens_of(tree_engine(pair).generate(prompts, new_tokens(16, seed=3, **narrow))) == greedy


@pytest.mark.slow
def test_first_tokens_of_many_seeds_are_distributed_as_the_targets_own(pair: Pair) -> None:
    prompt, n = random_prompts([5])[0], 300
    trace = RecordingTrace()
    tiny_engine(pair, None, trace=trace).generate([prompt], new_tokens(1))
    logits = trace.tensors["prefill/target.head"][-1:, :N_VOCAB]
    shares = torch.tensor([[0.9, 1.0, 0.0, 0.0]])
    law = kept_tokens(logits, shares, torch.zeros(1, dtype=torch.int64))[0]
    engine = tiny_engine(pair, None, max_batch_size=8)
    limits = [new_tokens(1, temperature=0.9, seed=i) for i in range(n)]
    counts = Counter(tokens[0] for tokens in tokens_of(engine.generate([prompt] * n, limits)))
    statistic = sum((counts[i] - n * float(p)) ** 2 / (n * float(p)) for i, p in enumerate(law) if p > 0)
    freedom = torch.tensor((int((law > 0).sum()) - 1) / 2)
    assert float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2))) > 1e-4


def test_performance_mode_draws_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(pair, 3)
    monkeypatch.setenv("EAGLE3_PERF_MODE", "1")
    with pytest.raises(ConfigError, match=r"temperature is 1\.0 in performance mode"):
        engine.generate(random_prompts([4]), drawn(1))
