"""One damaged request among eight: seven right answers, one named fault, on every executor.

The damage is an embedding row of NaN in target and draft: a request breaks where it first meets that token, be it in
its prompt or as a token it chose itself. The right answers come from an engine without the damage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from device_engines import device_engine, engine_by_meaning, write_nano_pair
from rings import slow_but
from tiny_engines import (
    Pair,
    is_empty,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import DecodeError, Engine, EngineConfig, Response, SpeculativeConfig
from eagle3core.request import without_errors
from eagle3core.step.replay import EagerReplayer, emulate

N = 14
NAN = torch.nan


def damage(engine: Engine, token: int, value: float = NAN) -> None:
    """Make a token's embedding unusable for target and draft."""
    for model in (engine.target, engine.draft):
        if model is not None:
            model.embedding[token] = value


def expected(prompt: list[int], healthy: list[int], token: int) -> tuple[list[int], bool]:
    """What a request keeps where `token` is damaged, and whether it breaks; its last token is never read."""
    if token in prompt:
        return [], True
    if token in healthy[:-1]:
        return healthy[: healthy.index(token) + 1], True
    return healthy, False


def assert_only_the_damaged_break(
    make: Callable[[int | None], Engine], prompts: list[list[int]], tokens: Sequence[int], k: int | None, n: int = N
) -> list[int]:
    """How many requests each damaged token broke, each where it had to; the others are the healthy engine's."""
    healthy = tokens_of(make(None).generate(prompts, new_tokens(n, ignore_eos=True)))
    engine, n_broken = make(k), []
    models = [model for model in (engine.target, engine.draft) if model is not None]
    for token in tokens:
        kept = [model.embedding[token].clone() for model in models]
        damage(engine, token)
        broken = engine.generate(prompts, new_tokens(n, ignore_eos=True))
        for prompt, whole, response in zip(prompts, healthy, broken, strict=True):
            right, breaks = expected(prompt, whole, token)
            assert (response.token_ids, response.finish_reason) == (right, "error" if breaks else "length")
            assert isinstance(response.error, DecodeError if breaks else type(None))
        assert is_empty(engine)
        n_broken.append(sum(response.error is not None for response in broken))
        for model, row in zip(models, kept, strict=True):
            model.embedding[token] = row
    again = tokens_of(engine.generate(prompts[:2], new_tokens(3, ignore_eos=True)))
    assert again == [whole[:3] for whole in healthy[:2]], "nothing of the damage is left"
    return n_broken


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"), vocab=40)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("k", "dtype"),
    slow_but(
        [(None, "float64"), (3, "float64")],
        [(None, "float64"), (1, "float64"), (3, "float64"), (6, "float64"), (3, "bfloat16")],
    ),
)
def test_damaged_requests_end_where_they_must_and_the_others_are_right(tiny: Pair, k: int | None, dtype: str) -> None:
    prompts = random_prompts([5, 9, 3, 12, 7, 4, 17, 6], n_vocab=40, seed=3)
    n_broken = assert_only_the_damaged_break(lambda k: tiny_engine(tiny, k, dtype=dtype), prompts, (0, 7, 35), k)
    assert 0 < sum(n_broken) < 8 * len(n_broken), "some break and some do not, or nothing was shown"


@pytest.mark.reference
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinite_numbers_break_a_request_as_nan_does(tiny: Pair, value: float) -> None:
    engine = tiny_engine(tiny, 2)
    damage(engine, 7, value)
    [whole, broken] = engine.generate([[1, 2, 3], [1, 7, 3]], new_tokens(1))
    assert (whole.error, broken.finish_reason) == (None, "error")


@pytest.mark.reference
@pytest.mark.parametrize("column", [0, 17, 39])
def test_one_logit_that_is_not_a_number_is_found_wherever_it_lies(tiny: Pair, column: int) -> None:
    engine = tiny_engine(tiny, 2)
    head = engine.target.head
    assert not head.is_packed, "the row below would lie elsewhere"
    head.weight[column] = NAN
    [response] = engine.generate([[1, 2, 3]], new_tokens(4))
    assert (response.token_ids, response.finish_reason) == ([], "error")


@pytest.mark.reference
def test_a_draft_whose_logits_are_not_finite_costs_speed_and_no_token(tiny: Pair) -> None:
    prompts = random_prompts([5, 9], n_vocab=40, seed=3)
    expected = plain_tokens(tiny, prompts, N)
    engine = tiny_engine(tiny, 3, collect_draft_ranks=True)
    assert engine.draft is not None
    engine.draft.head.weight[:] = NAN
    responses = engine.generate(prompts, new_tokens(N))
    assert tokens_of(responses) == expected
    assert {step.n_accepted for response in responses for step in response.req_metrics.steps} == {0}


@pytest.mark.reference
def test_target_and_draft_without_finite_logits_accept_nothing(tiny: Pair) -> None:
    engine = tiny_engine(tiny, 3, collect_draft_ranks=True)
    assert engine.draft is not None
    [healthy] = plain_tokens(tiny, [[1, 2, 3]], N)
    damage(engine, healthy[0])
    engine.draft.head.weight[:] = NAN
    [response] = engine.generate([[1, 2, 3]], new_tokens(N))
    assert (response.token_ids, response.finish_reason) == (healthy[:1], "error")


@pytest.mark.reference
def test_the_fault_is_named_in_three_parts_and_whoever_measures_can_refuse_it(
    tiny: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(tiny, 2)
    damage(engine, 7)
    with caplog.at_level(logging.ERROR, "eagle3core"):
        responses: list[Response] = engine.generate([[1, 2], [7, 3]], new_tokens(3))
    assert "slot 1" in caplog.text
    assert "request 1 are not finite after 2 tokens of prompt and 0 generated" in caplog.text
    assert without_errors(responses[:1]) == responses[:1]
    with pytest.raises(DecodeError, match=r"(?s)not finite.*allowed: .*do: "):
        without_errors(responses)


@pytest.mark.reference
def test_a_stop_in_the_tokens_before_the_damage_ends_the_request_as_it_should(tiny: Pair) -> None:
    [healthy] = plain_tokens(tiny, [[1, 2, 3]], N)
    at = next(i for i in range(2, N) if healthy[i] not in healthy[:i])
    engine = tiny_engine(tiny, 3)
    damage(engine, healthy[at])
    [response] = engine.generate([[1, 2, 3]], new_tokens(N, stop_token_ids=[healthy[at]]))
    assert (response.token_ids, response.finish_reason) == (healthy[: at + 1], "stop")


@pytest.mark.reference
@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_the_kernels_path_finds_it_a_step_late_too(tmp_path_factory: pytest.TempPathFactory, k: int | None) -> None:
    pair = write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, vocab=64)
    prompts = random_prompts([6, 66, 3, 9, 12, 5, 7, 70], n_vocab=64, seed=2)
    n_broken = assert_only_the_damaged_break(lambda k: engine_by_meaning(pair, k, n_behind=1), prompts, (3, 30), k)
    assert 0 < sum(n_broken) < 16


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.exhaustive
def test_kernels_run_lane_by_lane_break_the_damaged_request_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=64)
    lanes = EagerReplayer(emulate)
    prompts = [[1, 2, 3], [1, 9, 3]]
    n_broken = assert_only_the_damaged_break(lambda k: device_engine(pair, k, lanes, chunk=8), prompts, (9,), k=1, n=3)
    assert n_broken[0] >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("k", [None, 1, 3, 7])
@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_on_a_gpu_one_damaged_request_among_eight_is_named_and_seven_are_right(
    tmp_path_factory: pytest.TempPathFactory, k: int | None, n_slots: int
) -> None:
    pair = write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5)
    prompts = random_prompts([6, 66, 3, 9, 12, 5, 7, 70], n_vocab=256, seed=2)

    def make(k: int | None) -> Engine:
        spec = None if k is None else SpeculativeConfig(model=str(pair[1]), num_speculative_tokens=k)
        config = EngineConfig(
            session_len=256, max_batch_size=n_slots, dtype="bfloat16", device="cuda", speculative_config=spec
        )
        made = Engine.from_pretrained(pair[0], config)
        assert made.backend.path == "kernels"
        return made

    own = next(token for token in prompts[3] if sum(token in prompt for prompt in prompts) == 1)
    assert assert_only_the_damaged_break(make, prompts, (own, 30), k, n=24)[0] >= 1
