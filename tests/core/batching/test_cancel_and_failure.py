"""Requests end early wherever they are, by a call, by a failure or with the engine; none is lost without a reason."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from failing_trace import Broken
from lettered import lettered_engine, lettered_prompts
from rings import slow_but
from tiny_engines import Pair, is_empty, letter_tokenizer, new_tokens, tiny_engine, tokens_of

from eagle3core import ConfigError, DecodeError, Engine, Pipeline, RequestHandle
from eagle3core.trace import Trace

pytestmark = pytest.mark.reference


def finish(engine: Engine) -> None:
    """Step until no request is left."""
    while engine.step():
        pass


def everywhere(letters: Pair, n_behind: int = 1) -> tuple[Engine, dict[str, RequestHandle]]:
    """An engine with a request in each state."""
    engine, prompts = lettered_engine(letters, 3, 3, n_behind), lettered_prompts()
    handles = {"finished": engine.add_request(prompts[0], new_tokens(1))}
    finish(engine)
    handles["running"] = engine.add_request(prompts[1], new_tokens(18))
    engine.step()
    handles |= {"reading": engine.add_request(prompts[6], new_tokens(9))}
    handles |= {"waiting": engine.add_request(prompts[3], new_tokens(9))}
    engine.step()
    book = engine.book
    assert list(book.running) == [handles["running"].id]
    assert list(book.reading) == [handles["reading"].id]
    assert list(book.waiting) == [handles["waiting"].request]
    return engine, handles


@pytest.mark.parametrize(
    ("state", "n_behind"),
    slow_but(
        [("waiting", 1), ("reading", 0), ("running", 1), ("finished", 0)],
        [(state, n) for state in ("waiting", "reading", "running", "finished") for n in (0, 1)],
    ),
)
def test_a_request_is_cancelled_in_every_state_and_the_others_get_their_own(
    letters: Pair, alone: list[list[int]], state: str, n_behind: int
) -> None:
    engine, handles = everywhere(letters, n_behind)
    chosen = handles[state]
    before = chosen.token_ids
    assert engine.cancel(chosen.id) == (state != "finished")
    assert not engine.cancel(chosen.id), "again does nothing"
    assert chosen.finish_reason == ("length" if state == "finished" else "cancelled")
    finish(engine)
    assert is_empty(engine)
    assert chosen.token_ids == before == chosen.response().token_ids
    for name, which, n in (("running", 1, 18), ("reading", 6, 9), ("waiting", 3, 9)):
        if name != state:
            assert handles[name].token_ids == alone[which][:n]
    assert engine.generate([lettered_prompts()[5]], new_tokens(9))[0].token_ids == alone[5][:9]


@pytest.mark.parametrize("n_behind", [0, 1])
def test_all_are_cancelled_and_the_slots_are_free_at_once(letters: Pair, n_behind: int) -> None:
    engine, handles = everywhere(letters, n_behind)
    for handle in handles.values():
        engine.cancel(handle.id)
    assert is_empty(engine)
    assert not engine.step()


@pytest.mark.parametrize("wrong", ["1", None, 1.5])
def test_what_is_no_id_is_refused_and_an_unknown_one_has_ended(letters: Pair, wrong: Any) -> None:
    engine = lettered_engine(letters, None)
    with pytest.raises(ConfigError, match="request_id is"):
        engine.cancel(wrong)
    assert not engine.cancel(99)


def test_an_unfinished_request_has_no_response_and_says_so_in_a_line(letters: Pair) -> None:
    engine = lettered_engine(letters, None)
    handle = engine.add_request(lettered_prompts()[0], new_tokens(5))
    with pytest.raises(ConfigError, match="request 0 was asked for its response after 0 tokens"):
        handle.response()
    assert repr(handle) == "RequestHandle(id=0, 0 tokens, unfinished)"
    finish(engine)
    text = handle.response().text
    assert repr(handle.response()) == f"Response({text!r}, 5 tokens, 'length')"


@pytest.mark.parametrize(
    ("stage", "n", "error"),
    slow_but(
        [("target.embed", 1, KeyboardInterrupt), ("target.embed", 3, RuntimeError), ("accept.tokens", 2, RuntimeError)],
        [
            (*at, error)
            for at in (("target.embed", 1), ("target.embed", 3), ("accept.tokens", 2))
            for error in (KeyboardInterrupt, RuntimeError)
        ],
    ),
)
def test_a_round_that_breaks_off_ends_every_request_with_its_reason_and_the_engine_works_on(
    letters: Pair, alone: list[list[int]], error: type[BaseException], stage: str, n: int
) -> None:
    engine, handles = everywhere(letters)
    engine.trace = Broken(stage, n, error)
    with pytest.raises(error):
        finish(engine)
    assert is_empty(engine)
    for name, which in (("running", 1), ("reading", 6), ("waiting", 3)):
        response = handles[name].response()
        assert response.finish_reason == "error"
        assert isinstance(response.error, DecodeError)
        assert isinstance(response.error.__cause__, error)
        assert "by a call that broke off" in str(response.error)
        assert response.token_ids == alone[which][: len(response.token_ids)]
    assert handles["finished"].finish_reason == "length"
    engine.trace = Trace()
    assert tokens_of(engine.generate(lettered_prompts(), new_tokens(9))) == [tokens[:9] for tokens in alone]


def test_an_interrupt_between_rounds_of_generate_ends_its_own_requests_alone(
    letters: Pair, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, handles = everywhere(letters)
    step, left = engine.step, [3]

    def interrupted() -> bool:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(lettered_prompts()[:3], new_tokens(18))
    monkeypatch.undo()
    assert len(list(engine.book.unfinished)) == 3, "those that were there before"
    finish(engine)
    assert [handles[name].token_ids for name in ("running", "reading")] == [alone[1][:18], alone[6][:9]]


def test_generate_beside_requests_that_were_there_before_gives_both_their_own(
    letters: Pair, alone: list[list[int]]
) -> None:
    engine, handles = everywhere(letters)
    found = tokens_of(engine.generate(lettered_prompts(), new_tokens(7)))
    assert found == [tokens[:7] for tokens in alone]
    finish(engine)
    assert [handles[name].token_ids for name in ("running", "reading", "waiting")] == [
        alone[1][:18], alone[6][:9], alone[3][:9],
    ]  # fmt: skip


CALLS: list[Callable[[Engine], Any]] = [
    lambda engine: engine.generate([[1]], new_tokens(1)),
    lambda engine: engine.generate([], new_tokens(1)),
    lambda engine: engine.add_request([1]),
    lambda engine: engine.stream([1]),
    lambda engine: engine.step(),
    lambda engine: engine.cancel(0),
]


def test_a_closed_engine_has_ended_its_requests_and_refuses_every_call(letters: Pair) -> None:
    engine, handles = everywhere(letters)
    with engine:
        pass
    assert {handle.finish_reason for name, handle in handles.items() if name != "finished"} == {"cancelled"}
    assert is_empty(engine)
    engine.close()
    for call in CALLS:
        with pytest.raises(ConfigError, match=r"(?s)was called on an engine that is closed.*allowed:.*do:"):
            call(engine)


def test_a_pipeline_is_closed_with_its_engine(pair: Pair) -> None:
    tokenizer = letter_tokenizer()
    with Pipeline(tiny_engine(pair, 2, tokenizer=tokenizer), tokenizer) as pipe:
        assert len(pipe("bad", new_tokens(3)).token_ids) == 3
    for call in (pipe, pipe.stream):
        with pytest.raises(ConfigError, match="closed"):
            call("bad")


def test_calls_from_within_a_call_are_refused(letters: Pair) -> None:
    engine, refused = lettered_engine(letters, None), []

    class Nested(Trace):
        def tap(self, name: str, value: torch.Tensor, valid: torch.Tensor | None = None) -> None:
            for call in (*CALLS, lambda engine: engine.close()):
                with pytest.raises(ConfigError, match="from within a call") as caught:
                    call(engine)
                refused.append(caught.value)

    engine.trace = Nested()
    engine.generate([[1, 2]], new_tokens(2))
    assert len(refused) == 2 * (len(CALLS) + 1), "at the prompt and at the first token"
    assert is_empty(engine)


def test_a_close_in_the_middle_of_another_threads_generate_ends_it_with_a_refusal(letters: Pair) -> None:
    engine, has_begun = lettered_engine(letters, None), Event()

    class Noting(Trace):
        def tap(self, name: str, value: torch.Tensor, valid: torch.Tensor | None = None) -> None:
            has_begun.set()

    engine.trace = Noting()
    with ThreadPoolExecutor(1) as threads:
        many = [prompt for _ in range(40) for prompt in lettered_prompts()]
        answer = threads.submit(engine.generate, many, new_tokens(18))
        has_begun.wait(60)
        engine.close()
        with pytest.raises(ConfigError, match="closed"):
            answer.result(60)
    assert is_empty(engine)


def test_threads_that_step_one_engine_together_lose_no_token(letters: Pair, alone: list[list[int]]) -> None:
    engine, prompts = lettered_engine(letters, 3, 3), lettered_prompts()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda which: list(engine.stream(prompts[which], new_tokens(9))), range(8)))
    assert found == [tokens[:9] for tokens in alone]
    assert is_empty(engine)
