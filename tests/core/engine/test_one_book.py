"""Who is running is known by request id alone: results of one that has left never reach the next in its slot."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from lettered import Letters, cut
from rings import slow_but
from tiny_engines import Pair, is_empty, new_tokens, random_prompts, tiny_engine, tokens_of, write_tiny_pair

from eagle3core import GenerationConfig

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair over sixteen tokens, each a letter."""
    return write_tiny_pair(tmp_path_factory.mktemp("lettered"), seed=5, vocab=16)


def engine(pair: Pair, k: int | None, n_slots: int = 2) -> Any:
    """As on a GPU, results are read one step behind."""
    made = tiny_engine(pair, k, tokenizer=Letters(), max_batch_size=n_slots)
    made.runner.n_behind = 1
    return made


def alone(pair: Pair, prompts: list[list[int]], limits: list[GenerationConfig]) -> list[list[int]]:
    """What each request gives by itself, without drafts."""
    made = engine(pair, None, n_slots=1)
    return [made.generate([prompt], limit)[0].token_ids for prompt, limit in zip(prompts, limits, strict=True)]


@pytest.mark.parametrize("k", slow_but([3], [None, 3]))
def test_a_slot_that_host_and_device_end_in_neighbouring_steps_is_given_away_safely(
    lettered: Pair, k: int | None
) -> None:
    """A stop word is found a step late, the device ends the same slot by its budget in that step."""
    prompts = random_prompts([3, 9, 5], n_vocab=6)
    free = tokens_of(engine(lettered, None, 3).generate(prompts, new_tokens(32)))
    for at in (3, 8):
        word = Letters().decode(free[0][at - 2 : at + 1], skip_special_tokens=True)
        limits = [
            new_tokens(at + 2, stop_words=(word,)), new_tokens(40),
            new_tokens(40, stop_words=(Letters().decode(free[2][26:30], skip_special_tokens=True),)),
        ]  # fmt: skip
        made = engine(lettered, k)
        assert tokens_of(made.generate(prompts, limits)) == alone(lettered, prompts, limits)
        assert is_empty(made)


def random_schedule(seed: int, free: list[list[int]]) -> tuple[list[int], list[GenerationConfig]]:
    """Which prompts, in which order, and what ends each: a budget, stop tokens, stop words of its own text."""
    draw = random.Random(seed)
    order = [draw.randrange(len(free)) for _ in range(draw.randint(2, 7))]
    limits = []
    for which in order:
        budget, at = draw.randint(1, 24), draw.randint(1, 22)
        words: tuple[str, ...] = ()
        if draw.random() < 0.6:
            words = (Letters().decode(free[which][at - 1 : at + draw.randint(0, 2)], skip_special_tokens=True),)
        ends = tuple(draw.sample(range(16), draw.choice([0, 0, 1, 2])))
        limits.append(new_tokens(budget, stop_words=words, stop_token_ids=ends))
    return order, limits


def run_schedules(pair: Pair, seeds: range) -> int:
    """Random stops, budgets and refills give each request what it gives alone; how many requests that were."""
    prompts = random_prompts([3, 9, 1, 17, 5, 30], n_vocab=16)
    free = tokens_of(engine(pair, None, 3).generate(prompts, new_tokens(24)))
    engines = {(k, n): engine(pair, k, n) for k in (None, 1, 3) for n in (1, 2, 3)}
    n_requests = 0
    for seed in seeds:
        order, limits = random_schedule(seed, free)
        expected = [cut(free[which], limit) for which, limit in zip(order, limits, strict=True)]
        made = engines[random.Random(seed).choice(list(engines))]
        assert tokens_of(made.generate([prompts[which] for which in order], limits)) == expected, seed
        assert is_empty(made), seed
        n_requests += len(order)
    return n_requests


def test_random_schedules_give_every_request_its_own_tokens(lettered: Pair) -> None:
    assert run_schedules(lettered, range(6)) > 15


@pytest.mark.slow
def test_sixty_random_schedules_give_every_request_its_own_tokens(lettered: Pair) -> None:
    assert run_schedules(lettered, range(10, 70)) > 200


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.exhaustive
def test_three_hundred_random_schedules_give_every_request_its_own_tokens(lettered: Pair) -> None:
    assert run_schedules(lettered, range(100, 400)) > 1000


def test_debug_lines_number_steps_from_the_first_of_a_batch_after_refills_too(
    lettered: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EAGLE3_ACCEPT_DEBUG", "1")
    monkeypatch.setenv("EAGLE3_ACTIVE_DEBUG", "1")
    made = engine(lettered, 2, n_slots=1)
    with caplog.at_level(logging.INFO, "eagle3core"):
        made.generate(random_prompts([3, 9, 5], n_vocab=6), new_tokens(7))
    begun = [int(line.split("step ")[1].split(":")[0]) for line in caplog.messages if "[Active]" in line]
    read = [int(line.split("step ")[1].split(" ")[0]) for line in caplog.messages if "[Accept]" in line]
    assert begun.count(0) == read.count(0) == 3, "one slot: every request begins a batch of its own"
    assert set(read) <= set(begun)


def test_end_tokens_reach_the_device(lettered: Pair) -> None:
    prompt = random_prompts([9], n_vocab=6)
    free = tokens_of(engine(lettered, None).generate(prompt, new_tokens(12)))[0]
    made = engine(lettered, None)
    released: list[int] = []
    release = made.runner.release
    made.runner.release = lambda slot: (released.append(slot), release(slot))  # type: ignore[method-assign]
    response = made.generate(prompt, new_tokens(12, stop_token_ids=(free[4],)))[0]
    assert response.finish_reason == "stop"
    assert released == [], "the device stopped the slot by itself; the host had nothing to release"
