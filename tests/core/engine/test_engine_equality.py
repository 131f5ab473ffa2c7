"""Speculation changes no token: greedy output with any depth is the target's own, alone or in company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import (
    Pair,
    accepted_counts,
    engine_config,
    new_tokens,
    plain_engine,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import ConfigError, Engine, EngineConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.weights import PackedDraft, PackedTarget, pack_draft, pack_target

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17, 30]


@pytest.fixture(scope="module")
def baseline(pair: Pair) -> list[list[int]]:
    """Plain greedy output, 24 tokens a prompt."""
    return plain_tokens(pair, random_prompts(LENGTHS), 24)


def test_a_draft_that_is_right_eight_times_in_a_row_gives_the_baselines_tokens(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, vocab=2, seed=2)
    prompts = random_prompts(LENGTHS, n_vocab=2)
    responses = tiny_engine(pair, 8).generate(prompts, new_tokens(30))
    assert {0, 3, 8} <= accepted_counts(responses)
    assert tokens_of(responses) == plain_tokens(pair, prompts, 30)


def test_an_engine_gives_the_same_again(pair: Pair, baseline: list[list[int]]) -> None:
    engine = tiny_engine(pair, 2)
    for _ in range(2):
        assert tokens_of(engine.generate(random_prompts(LENGTHS), new_tokens(24))) == baseline


def test_one_configuration_gives_two_engines_the_same_semantics(pair: Pair) -> None:
    config = engine_config(pair, 3)
    first, second = (Engine.from_pretrained(pair[0], config) for _ in range(2))
    a, b = (engine.generate(random_prompts(LENGTHS), new_tokens(12)) for engine in (first, second))
    assert a == b
    assert (first.config, first.speculation) == (second.config, second.speculation)


@given(
    k=st.one_of(st.none(), st.integers(1, 8)),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    n_slots=st.integers(1, 4),
    n_new=st.integers(1, 10),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_any_batch_gives_each_prompts_own_tokens(
    pair: Pair, k: int | None, lengths: list[int], n_slots: int, n_new: int, seed: int
) -> None:
    prompts = random_prompts(lengths, seed=seed)
    alone = plain_engine(pair, 1)
    expected = [tokens_of(alone.generate([prompt], new_tokens(n_new)))[0] for prompt in prompts]
    together = tiny_engine(pair, k, max_batch_size=n_slots)
    assert tokens_of(together.generate(prompts, new_tokens(n_new))) == expected


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tie": True}, marks=pytest.mark.slow),
        pytest.param({"heads": 4, "kv_heads": 4}, marks=pytest.mark.slow),
        {"heads": 8, "kv_heads": 1},
        {"draft_hidden": 16, "draft_heads": 2, "draft_kv_heads": 1},
        pytest.param({"bias": True}, marks=pytest.mark.slow),
        {"own_head": False},
        {"vocab": 24, "draft_vocab": 5},
        pytest.param({"taps": (0, 2), "convention": "input"}, marks=pytest.mark.slow),
        {"rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_other_geometries_give_the_baselines_tokens(tmp_path: Path, changes: dict[str, object]) -> None:
    pair = write_tiny_pair(tmp_path, **changes)
    prompts = random_prompts([4, 11, 1])
    expected = plain_tokens(pair, prompts, 16)
    for k in (1, 4):
        responses = tiny_engine(pair, k).generate(prompts, new_tokens(16))
        assert tokens_of(responses) == expected
        assert all(response.req_metrics.spec_info is not None for response in responses)


def models(pair: Pair, taps: tuple[int, ...]) -> tuple[PackedTarget, PackedDraft]:
    """Both models as an engine takes them; the target captures what it is told to."""
    checkpoint = load_target(pair[0])
    head = load_draft(pair[1], checkpoint.geometry)
    target = pack_target(
        checkpoint.geometry, checkpoint.weights.__getitem__, dtype=checkpoint.dtype, device=torch.device("cpu"),
        block=64, taps=taps, packs=False,
    )  # fmt: skip
    return target, pack_draft(head.geometry, head.weights.__getitem__, head.draft_to_target, target, block=64)


def test_a_draft_given_to_an_engine_configured_without_speculation_is_left_alone(
    pair: Pair, baseline: list[list[int]]
) -> None:
    target, draft = models(pair, (0, 1, 2))
    engine = Engine(target, draft, EngineConfig(session_len=64, device="cpu"))
    assert (engine.draft, engine.runner.state.draft, engine.speculation.enabled) == (None, None, False)
    responses = engine.generate(random_prompts(LENGTHS), new_tokens(3))
    assert tokens_of(responses) == [tokens[:3] for tokens in baseline]
    assert all(response.req_metrics.spec_info is None for response in responses)


def test_a_target_that_captures_other_layers_than_the_draft_reads_is_refused(pair: Pair) -> None:
    target, draft = models(pair, (0, 1))
    with pytest.raises(ConfigError, match=r"captures the inputs of layers \(0, 1\), the draft reads \(0, 1, 2\)"):
        Engine(target, draft, engine_config(pair, 2))


def test_a_configured_draft_must_be_given(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="speculative_config was given without a draft model"):
        Engine(models(pair, ())[0], None, engine_config(pair, 2))
