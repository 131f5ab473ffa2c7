"""A limit on the tokens of a step is kept in every step, and changes none of the tokens that are generated."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engines import (
    Pair,
    engine_config,
    is_empty,
    new_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import ConfigError, Engine, EngineConfig, RejectionAcceptance, SpeculativeConfig
from eagle3core.step.program import Program

pytestmark = pytest.mark.reference

LENGTHS = [5, 9, 3, 12]
N_NEW = 14
MOST = 7  # of 3 slots: 4 drafts alone, 2 of two requests, 1 of three
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "adaptive chain": {"num_speculative_tokens": 4, "adaptive": True},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "tree": {"choices": [[0], [1], [0, 0], [0, 1]]},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def limited_engine(pair: Pair, way: str, most: int | None = MOST) -> Engine:
    model = None if way == "ngram" else str(pair[1])
    spec = SpeculativeConfig(model=model, **WAYS[way])
    config = engine_config(pair, None, speculative_config=spec, max_tokens_per_step=most)
    return Engine.from_pretrained(pair[0], config)


def watched(engine: Engine) -> list[tuple[int, int]]:
    """(running requests, rows that the target verifies) of every step from now on, as the programs themselves say."""
    runner, seen = engine.runner, list[tuple[int, int]]()
    rows_of = {
        id(program): batch * runner.kinds[kind].tree.n_nodes
        for kind, by_rows in runner.steps.by_kind.items() for batch, program in by_rows.items()
    }  # fmt: skip
    run = runner._captured.run

    def noted(program: Program, trace: Any) -> None:
        if id(program) in rows_of:
            seen.append((len(engine.book.running), rows_of[id(program)]))
        run(program, trace)

    runner._captured.run = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_no_step_sends_more_tokens_and_the_output_is_plain_decodings(pair: Pair, way: str) -> None:
    prompts = random_prompts(LENGTHS)
    expected = tokens_of(tiny_engine(pair, None).generate(prompts, new_tokens(N_NEW)))
    engine = limited_engine(pair, way)
    seen = watched(engine)
    assert tokens_of(engine.generate(prompts, new_tokens(N_NEW))) == expected
    assert is_empty(engine)
    assert max(rows for _, rows in seen) <= MOST
    assert any(rows > n for n, rows in seen), "some step drafts"
    if way == "chain":  # as deep as fits: 5 tokens of one, 6 of two and of three; or none, where the draft reads first
        most = {n: max(rows for each, rows in seen if each == n) for n, _ in seen}
        assert {1, 3} <= most.keys()
        assert most.items() <= {1: 5, 2: 6, 3: 6}.items()


def test_the_records_say_each_steps_depth(pair: Pair) -> None:
    responses = limited_engine(pair, "chain").generate(random_prompts(LENGTHS[:3]), new_tokens(N_NEW))
    depths = {step.depth for response in responses for step in response.req_metrics.steps}
    assert 1 in depths
    assert depths <= {0, 1, 2, 3, 4}
    assert all(step.n_draft == step.depth for response in responses for step in response.req_metrics.steps)


def test_a_limit_that_no_step_reaches_leaves_the_engine_as_it_is(pair: Pair) -> None:
    engine = limited_engine(pair, "chain", most=15)
    assert engine.book.depths is None
    assert not engine.config.varies_depth


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"max_tokens_per_step": 0}, "max_tokens_per_step is 0"),
        ({"max_tokens_per_step": 7}, "max_tokens_per_step is 7 with max_batch_size 8"),
        ({"max_tokens_per_step": 9, "collect_draft_ranks": True}, "collect_draft_ranks is on with max_tokens_per_step"),
        ({"acceptance_log": ""}, "acceptance_log is ''"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(speculative_config=SpeculativeConfig(model="draft"), **changes)
    assert caught.value.what.startswith(what)
    assert caught.value.allowed
    assert caught.value.remedy


def test_drawn_drafts_are_refused_where_chains_become_shorter_alone() -> None:
    spec = SpeculativeConfig(model="draft", acceptance=RejectionAcceptance())
    assert not EngineConfig(speculative_config=spec, max_tokens_per_step=32).varies_depth
    with pytest.raises(ConfigError, match="max_tokens_per_step is 31 with acceptance"):
        EngineConfig(speculative_config=spec, max_tokens_per_step=31)
