"""A small model as the draft: a chain of its likeliest tokens, from a cache of its own, changes no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import BY_MEANING, ORDER, packed_pair, write_nano_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from random_pairs import rewrite_config
from tiny_engines import (
    Pair,
    accepted_counts,
    drafting_engine,
    drawn_alone,
    engine_config,
    is_empty,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import CheckpointError, ConfigError, Engine, EngineConfig, SpeculativeConfig
from eagle3core.step.replay import EagerReplayer, Replayer, emulate
from eagle3core.step.run import DeviceRunner
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.tree import chain_tree

LENGTHS = [3, 9, 1, 17]


def small_engine(target: Path, small: Path, k: int, **changes: Any) -> Engine:
    return drafting_engine((target, small), {"method": "draft_target", "num_speculative_tokens": k}, **changes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the tiny pair's six tokens and nothing else of it."""
    changes = {"n_layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "taps": (0, 1), "seed": 7}
    return write_tiny_pair(tmp_path_factory.mktemp("small"), **changes)[0]


@pytest.mark.reference
@given(
    k=st.integers(1, 8),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    n_slots=st.integers(1, 4),
    n_new=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.0, 1.2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=6)
def test_any_batch_gives_plain_decodings_tokens(
    pair: Pair, small: Path, k: int, lengths: list[int], n_slots: int, n_new: int, temperature: float, seed: int
) -> None:
    prompts = random_prompts(lengths, seed=seed)
    limits, expected = drawn_alone(pair, prompts, n_new, temperature, seed)
    engine = small_engine(pair[0], small, k, max_batch_size=n_slots)
    assert tokens_of(engine.generate(prompts, limits)) == expected
    assert is_empty(engine)


@pytest.mark.reference
@pytest.mark.parametrize("k", [1, 5])
def test_a_target_that_drafts_for_itself_is_right_every_time(pair: Pair, k: int) -> None:
    """Prompts of one to three chunks through two slots: every key of the draft's cache is where it belongs."""
    prompts = random_prompts([*LENGTHS, 5, 8])
    responses = small_engine(pair[0], pair[0], k, max_batch_size=2).generate(prompts, new_tokens(30))
    steps = [step for response in responses for step in response.req_metrics.steps]
    assert {step.n_accepted for step in steps if not step.cut} == {k}
    assert all(step.n_draft == k for step in steps)
    assert tokens_of(responses) == plain_tokens(pair, prompts, 30)


@pytest.mark.reference
def test_what_another_model_drafts_is_its_own_greedy_text(pair: Pair, small: Path) -> None:
    """At every step the drafts are how the small model would go on from all that is committed."""
    prompt, k = random_prompts([11])[0], 3
    engine = small_engine(pair[0], small, k)
    rows = []
    collect = engine.runner.collect

    def watched(*, everything: bool) -> Any:
        outcomes = collect(everything=everything)
        rows.extend(row for outcome in outcomes if outcome.step is not None for row in outcome.rows)
        return outcomes

    engine.runner.collect = watched  # type: ignore[method-assign]
    [response] = engine.generate([prompt], new_tokens(24))
    by_itself = Engine.from_pretrained(small, engine_config(pair, None))
    assert len(rows) == len(response.req_metrics.steps) > 5
    for row, step in zip(rows, response.req_metrics.steps, strict=True):
        text = [*prompt, *response.token_ids[: step.start]]
        assert row.drafts == by_itself.generate([text], new_tokens(k))[0].token_ids
    assert accepted_counts([response]) >= {0, 1}


@pytest.mark.reference
def test_the_plan_holds_the_small_models_cache_layer_by_layer(pair: Pair, small: Path) -> None:
    engine = small_engine(pair[0], pair[0], 2)
    state, plan = engine.runner.state, engine.memory_plan
    assert state.small is not None
    assert plan.draft_kv_bytes == state.small.k.nbytes + state.small.v.nbytes == plan.target_kv_bytes
    assert engine.draft is None
    assert (engine.speculation.enabled, engine.speculation.reason) == (
        True,
        "draft_target with 2 drafted tokens a step",
    )
    assert small_engine(pair[0], small, 2).memory_plan.draft_kv_bytes == plan.draft_kv_bytes // 4


@pytest.mark.reference
def test_a_model_that_does_not_fit_the_target_is_refused(pair: Pair, small: Path, tmp_path: Path) -> None:
    other = write_tiny_pair(tmp_path, vocab=7)[0]
    with pytest.raises(ConfigError, match="the model that drafts has 7 tokens, the target 6"):
        small_engine(pair[0], other, 2)
    short = write_tiny_pair(tmp_path / "short", max_position=48)[0]
    with pytest.raises(ConfigError, match="at most 48, the positions of the model that drafts"):
        small_engine(pair[0], short, 2)
    rewrite_config(other, num_hidden_layers=9)
    with pytest.raises(CheckpointError):
        small_engine(pair[0], other, 2)
    baseline = small_engine(pair[0], other, 2, on_draft_failure="baseline")
    assert not baseline.speculation.enabled
    assert baseline.runner.n_drafts == 0


@pytest.mark.reference
def test_a_head_and_a_model_are_not_taken_for_each_other(pair: Pair) -> None:
    head = tiny_engine(pair, 2)
    spec = SpeculativeConfig(method="draft_target", model="given", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="method is 'draft_target' with a PackedDraft"):
        Engine(head.target, head.draft, replace(head.config, speculative_config=spec))
    with pytest.raises(ConfigError, match="method is 'eagle3' with a PackedTarget"):
        Engine(head.target, head.target, head.config)


def kernel_engine(pair: Pair, k: int, replayer: Replayer, *, n_slots: int, chunk: int) -> Engine:
    """On the kernels' path, the target drafting for itself."""
    target, _ = packed_pair(pair, drafts=False)
    sizes = DeviceSizes(n_slots, 128, 128 + 2 * k, chain_tree(k), chunk=chunk, span=8)
    runner = DeviceRunner(target, target, sizes, arch="sm_90a", replayer=replayer, order=ORDER)
    spec = SpeculativeConfig(method="draft_target", model="given", num_speculative_tokens=k)
    config = EngineConfig(
        session_len=128, max_batch_size=n_slots, dtype="bfloat16", device="cpu", prefill_chunk=64,
        speculative_config=spec,
    )  # fmt: skip
    return Engine(target, target, config, runner=runner)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=64)


@pytest.mark.reference
def test_what_the_kernels_mean_gives_plain_decodings_tokens(nano: Pair) -> None:
    prompts = random_prompts([6, 40, 3], n_vocab=64)
    engine = kernel_engine(nano, 3, BY_MEANING, n_slots=2, chunk=16)
    assert engine.runner.has_kernels
    responses = engine.generate(prompts, new_tokens(14))
    steps = [step for response in responses for step in response.req_metrics.steps if not step.cut]
    assert sum(step.n_accepted for step in steps) >= 2.7 * len(steps), (
        "bf16 rounds by shape in plain torch, now and then"
    )


@pytest.mark.emulated
@pytest.mark.slow
def test_the_kernels_draft_with_a_model_and_its_drafts_are_right(nano: Pair) -> None:
    engine = kernel_engine(nano, 2, EagerReplayer(emulate), n_slots=1, chunk=8)
    [response] = engine.generate([[44, 9, 47]], new_tokens(4))
    assert [step.n_accepted for step in response.req_metrics.steps] == [2]
    assert len(response.token_ids) == 4
    assert torch.equal(engine.runner.state.small.k[:, 0, :, :5], engine.runner.state.k[:, 0, :, :5])  # type: ignore[union-attr]
