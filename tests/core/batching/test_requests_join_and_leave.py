"""Requests that join, end and are cancelled at any step get, each of them, what they get alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from lettered import LENGTHS, MOST_NEW, cut, lettered_engine, lettered_prompts, random_limits
from rings import exhaustive_but
from tiny_engines import Pair, is_empty, new_tokens, tokens_of

from eagle3core import ConfigError, Engine, GenerationConfig, RequestHandle, SpeculativeConfig

pytestmark = pytest.mark.reference

Asked = tuple[RequestHandle, int, GenerationConfig]


def run_arrivals(
    engine: Engine, alone: list[list[int]], n_requests: int, seed: int, run_on: float = 0.0
) -> list[Asked]:
    """Requests that arrive at random steps, some of them cancelled at random steps, until all have ended; a share of
    them, `run_on`, ends by its budget alone."""
    draw, prompts = random.Random(seed), lettered_prompts()
    asked: list[Asked] = []
    is_busy = True
    while is_busy or len(asked) < n_requests:
        for _ in range(min(draw.choice([0, 0, 0, 1, 1, 2, 5]), n_requests - len(asked))):
            which = draw.randrange(len(prompts))
            limits = random_limits(draw, alone[which])
            if run_on and draw.random() < run_on:
                limits = new_tokens(MOST_NEW)
            asked.append((engine.add_request(prompts[which], limits), which, limits))
        if asked and draw.random() < 0.05:
            engine.cancel(draw.choice(asked[-16:])[0].id)
        is_busy = engine.step()
    return asked


def assert_each_has_its_own(asked: list[Asked], alone: list[list[int]]) -> dict[str, int]:
    """That every request got what it gets alone, a cancelled one its beginning; how many ended for which reason."""
    reasons: dict[str, int] = {}
    for handle, which, limits in asked:
        own = cut(alone[which], limits)
        reason = str(handle.finish_reason)
        reasons[reason] = reasons.get(reason, 0) + 1
        if reason == "cancelled":
            assert handle.token_ids == own[: len(handle.token_ids)]
        else:
            assert handle.token_ids == own, (handle, limits)
            assert reason == ("length" if len(own) == limits.max_new_tokens and not is_stop(own, limits) else "stop")
    return reasons


def is_stop(tokens: list[int], limits: GenerationConfig) -> bool:
    """Whether the last token ends a request otherwise than by the budget."""
    longer = new_tokens(len(tokens) + 1, stop_words=limits.stop_words, stop_token_ids=limits.stop_token_ids)
    return cut([*tokens, -65], longer) == tokens


@pytest.mark.parametrize(("k", "n_behind"), [(None, 1), (3, 0), (3, 1)])
def test_requests_that_arrive_at_any_step_get_what_they_get_alone(
    letters: Pair, alone: list[list[int]], k: int | None, n_behind: int
) -> None:
    engine = lettered_engine(letters, k, 3, n_behind)
    reasons = assert_each_has_its_own(run_arrivals(engine, alone, 24, seed=n_behind), alone)
    assert {"stop", "length"} <= set(reasons)
    assert is_empty(engine)


@pytest.mark.parametrize(("method", "n_behind"), [("ngram", 0), ("suffix", 0), ("draft_target", 1)])
def test_requests_drafted_without_a_head_get_what_they_get_alone(
    letters: Pair, alone: list[list[int]], method: str, n_behind: int
) -> None:
    model = str(letters[0]) if method == "draft_target" else None
    spec = SpeculativeConfig(method=method, model=model, num_speculative_tokens=3)
    engine = lettered_engine(letters, None, 3, n_behind, speculative_config=spec)
    asked = run_arrivals(engine, alone, 24, seed=2)
    assert {"stop", "length"} <= set(assert_each_has_its_own(asked, alone))
    assert any(step.n_accepted for handle, _, _ in asked for step in handle.response().req_metrics.steps)
    assert is_empty(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "n_behind", "seed"),
    exhaustive_but([(3, 1, 0)], [(None, 0, 0), (None, 1, 1), (3, 0, 2), (3, 1, 0), (3, 1, 1)]),
)
def test_four_hundred_requests_through_eight_slots_get_what_they_get_alone(
    letters: Pair, alone: list[list[int]], k: int | None, n_behind: int, seed: int
) -> None:
    share = (0.5, 1.0, 0.9)[seed]
    engine = lettered_engine(letters, k, 8, n_behind, prefill_share=share)
    asked = run_arrivals(engine, alone, 400, seed=100 + seed)
    assert {"stop", "length", "cancelled"} == set(assert_each_has_its_own(asked, alone))
    assert is_empty(engine)
    again = tokens_of(engine.generate(lettered_prompts(), new_tokens(9)))
    assert again == [tokens[:9] for tokens in alone], "nothing is left behind"


class Interleavings(RuleBasedStateMachine):
    """Any order of adding, stepping, cancelling, generating and closing."""

    letters: Pair
    alone: list[list[int]]
    engines: dict[tuple[int | None, int], Engine]

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.engine: Engine | None = None

    @precondition(lambda self: self.engine is None)
    @rule(k=st.sampled_from([None, 2]), n_behind=st.sampled_from([0, 1]))
    def open(self, k: int | None, n_behind: int) -> None:
        self.engine, self.asked = lettered_engine(self.letters, k, 2, n_behind), []

    @precondition(lambda self: self.engine is not None)
    @rule(which=st.integers(0, len(LENGTHS) - 1), seed=st.integers(0, 99))
    def add(self, which: int, seed: int) -> None:
        assert self.engine is not None
        limits = random_limits(random.Random(seed), self.alone[which])
        self.asked.append((self.engine.add_request(lettered_prompts()[which], limits), which, limits))

    @precondition(lambda self: self.engine is not None)
    @rule()
    def step(self) -> None:
        assert self.engine is not None
        assert self.engine.step() == any(handle.finish_reason is None for handle, _, _ in self.asked)

    @precondition(lambda self: self.engine is not None)
    @rule()
    def advance(self) -> None:
        assert self.engine is not None
        self.engine.advance()

    @precondition(lambda self: self.engine is not None and self.asked)
    @rule(at=st.integers(0, 99))
    def cancel(self, at: int) -> None:
        assert self.engine is not None
        handle = self.asked[at % len(self.asked)][0]
        had_ended = handle.finish_reason is not None
        assert self.engine.cancel(handle.id) != had_ended
        assert handle.finish_reason is not None

    @precondition(lambda self: self.engine is not None)
    @rule(which=st.integers(0, len(LENGTHS) - 1))
    def generate(self, which: int) -> None:
        assert self.engine is not None
        [response] = self.engine.generate([lettered_prompts()[which]], new_tokens(4))
        assert response.token_ids == self.alone[which][:4]

    @precondition(lambda self: self.engine is not None)
    @rule()
    def close(self) -> None:
        assert self.engine is not None
        unfinished = [handle for handle, _, _ in self.asked if handle.finish_reason is None]
        self.engine.close()
        assert {handle.finish_reason for handle in unfinished} <= {"cancelled"}
        with pytest.raises(ConfigError, match="closed"):
            self.engine.step()
        assert is_empty(self.engine)
        self.engine = None

    def teardown(self) -> None:
        if self.engine is not None:
            while self.engine.step():
                pass
            assert is_empty(self.engine)
        assert_each_has_its_own(self.asked, self.alone)


def interleave(letters: Pair, alone: list[list[int]], examples: int, steps: int) -> None:
    """Run the machine."""
    machine = type("Machine", (Interleavings,), {"letters": letters, "alone": alone})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))


def test_any_order_of_calls_gives_every_request_its_own_tokens(letters: Pair, alone: list[list[int]]) -> None:
    interleave(letters, alone, examples=6, steps=15)


@pytest.mark.slow
def test_very_many_orders_of_calls_give_every_request_its_own_tokens(letters: Pair, alone: list[list[int]]) -> None:
    interleave(letters, alone, examples=20, steps=40)
