"""A request ends at the same token, for the same reason, with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rings import slow_but
from tiny_engines import (
    N_VOCAB,
    Pair,
    is_empty,
    letter_tokenizer,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import GenerationConfig, Response
from eagle3core.stop import StopCriteria

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17]
MANY = [3, 9, 1, 17, 8, 2, 30]
DEPTHS = (1, 8)


def outcomes(responses: list[Response]) -> list[tuple[Any, ...]]:
    """Everything a caller sees except the counters."""
    return [(r.text, r.token_ids, r.finish_reason, r.n_prompt_tokens) for r in responses]


def stopped_inside_a_run(responses: list[Response]) -> int:
    """Steps whose end fell on an accepted draft, so that agreed tokens behind it were dropped."""
    return sum(step.cut for response in responses for step in response.req_metrics.steps)


@pytest.mark.parametrize("token", range(0, N_VOCAB, 2))
def test_stop_tokens_end_a_request_alike(pair: Pair, token: int) -> None:
    limits = GenerationConfig(max_new_tokens=18, stop_token_ids=(token,))
    plain = tiny_engine(pair, None).generate(random_prompts(LENGTHS), limits)
    for k in DEPTHS:
        engine = tiny_engine(pair, k)
        assert outcomes(engine.generate(random_prompts(LENGTHS), limits)) == outcomes(plain)
        assert is_empty(engine)
    for response in plain:
        assert response.finish_reason == ("stop" if token in response.token_ids else "length")
        assert token not in response.token_ids[:-1]


def test_a_stop_in_the_middle_of_an_accepted_run_drops_what_was_agreed_behind_it(pair: Pair) -> None:
    n_cut = 0
    unlimited = plain_tokens(pair, random_prompts(MANY), 18)
    for token in range(N_VOCAB):
        limits = GenerationConfig(max_new_tokens=18, stop_token_ids=(token,))
        responses = tiny_engine(pair, 5).generate(random_prompts(MANY), limits)
        n_cut += stopped_inside_a_run(responses)
        for response, tokens in zip(responses, unlimited, strict=True):
            assert response.token_ids == tokens[: tokens.index(token) + 1 if token in tokens else 18]
    assert n_cut >= 5, "the case this test is about occurred"


@pytest.mark.parametrize("eos", [3, [3], [0, 4]])
def test_end_tokens_of_the_model_end_a_request_alike(tmp_path: Path, eos: int | list[int]) -> None:
    pair = write_tiny_pair(tmp_path, eos=eos)
    ends = {eos} if isinstance(eos, int) else set(eos)
    plain = tiny_engine(pair, None).generate(random_prompts(LENGTHS), new_tokens(18))
    assert {response.finish_reason for response in plain} == {"eos"}
    for response in plain:
        assert response.token_ids[-1] in ends
        assert not ends & set(response.token_ids[:-1])
    for k in DEPTHS:
        assert outcomes(tiny_engine(pair, k).generate(random_prompts(LENGTHS), new_tokens(18))) == outcomes(plain)


def test_end_tokens_can_be_ignored_and_still_be_stop_tokens(tmp_path: Path, pair: Pair) -> None:
    ending = write_tiny_pair(tmp_path, eos=3)
    unlimited = plain_tokens(pair, random_prompts(LENGTHS), 18)
    for k in (None, 4):
        engine = tiny_engine(ending, k)
        ignoring = engine.generate(random_prompts(LENGTHS), new_tokens(18, ignore_eos=True))
        assert tokens_of(ignoring) == unlimited
        stopping = engine.generate(random_prompts(LENGTHS), new_tokens(18, ignore_eos=True, stop_token_ids=(3,)))
        assert {response.finish_reason for response in stopping} == {"stop"}


@pytest.mark.parametrize("word", slow_but(["d", "dade"], ["d", "ad", "dade", "zz"]))
def test_stop_words_end_a_request_alike_and_are_cut_from_the_text(pair: Pair, word: str) -> None:
    limits = new_tokens(18, stop_words=(word, "never"))
    plain = tiny_engine(pair, None, tokenizer=letter_tokenizer()).generate(random_prompts(LENGTHS), limits)
    free = tiny_engine(pair, None, tokenizer=letter_tokenizer()).generate(random_prompts(LENGTHS), new_tokens(18))
    for stopped, whole in zip(plain, free, strict=True):
        at = whole.text.find(word)
        assert stopped.finish_reason == ("length" if at < 0 else "stop")
        assert stopped.text == (whole.text if at < 0 else whole.text[:at])
        assert len(stopped.token_ids) == (18 if at < 0 else at + len(word))
    for k in DEPTHS:
        engine = tiny_engine(pair, k, tokenizer=letter_tokenizer())
        assert outcomes(engine.generate(random_prompts(LENGTHS), limits)) == outcomes(plain)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
def test_the_number_of_new_tokens_is_exact(pair: Pair, n: int) -> None:
    for k in (None, 1, 3, 8):
        responses = tiny_engine(pair, k).generate(random_prompts(LENGTHS), new_tokens(n))
        assert {(len(r.token_ids), r.finish_reason) for r in responses} == {(n, "length")}


@pytest.mark.parametrize("session", slow_but([17, 31], [17, 20, 31]))
def test_the_session_limit_ends_a_request_alike(pair: Pair, session: int) -> None:
    prompts = random_prompts([1, 10, 15, 16])
    plain = tiny_engine(pair, None, session_len=session).generate(prompts, new_tokens(99))
    assert [len(r.token_ids) for r in plain] == [session - 1, session - 10, session - 15, session - 16]
    assert {response.finish_reason for response in plain} == {"length"}
    for k in DEPTHS:
        engine = tiny_engine(pair, k, session_len=session)
        assert outcomes(engine.generate(prompts, new_tokens(99))) == outcomes(plain)
        assert is_empty(engine)


def test_the_targets_last_position_can_be_used_with_any_depth(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path, max_position=24)
    prompts = random_prompts([20, 23])
    plain = tiny_engine(pair, None, session_len=24).generate(prompts, new_tokens(99))
    assert [len(response.token_ids) for response in plain] == [4, 1]
    for k in DEPTHS:
        assert outcomes(tiny_engine(pair, k, session_len=24).generate(prompts, new_tokens(99))) == outcomes(plain)


def test_a_stop_is_recognised_before_a_limit_and_an_end_token_before_both() -> None:
    limits = GenerationConfig(max_new_tokens=2, stop_token_ids=(5, 7))
    criteria = StopCriteria(limits, eos_token_ids=(7,), room=99, detokenize=None)
    assert [criteria.check(tokens) for tokens in ([1], [1, 7], [1, 5], [1, 1])] == [None, "eos", "stop", "length"]


def test_a_stop_word_of_characters_that_take_several_tokens_is_seen() -> None:
    limits = GenerationConfig(stop_words=("é",))
    criteria = StopCriteria(limits, (), 99, lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    spelled = list("année".encode())
    checks = [criteria.check(spelled[: n + 1]) for n in range(5)]
    assert checks == [None, None, None, None, "stop"]
    assert criteria.cut("année") == "ann"


@pytest.mark.parametrize("last", ["c", "c, and more text than the word has"])
def test_a_stop_word_is_seen_over_any_number_of_tokens_without_text(last: str) -> None:
    pieces = ["x", "a", "b", "", last]
    criteria = StopCriteria(GenerationConfig(stop_words=("abc",)), (), 99, lambda ids: "".join(pieces[i] for i in ids))
    tokens = [0, 1, 2, *[3] * 40, 4]
    assert [criteria.check(tokens[: n + 1]) for n in range(len(tokens))] == [None] * 43 + ["stop"]
    assert criteria.check([0, *[3] * 40, 4]) is None, "all tokens were looked at, and the word is not there"
