"""Many awaiting callers share one engine; cancellation, failure and closing reach each, and no thread is left."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from lettered import Letters, lettered_engine, lettered_prompts
from tiny_engines import Pair, is_empty, new_tokens

from eagle3core import AsyncEngine, ConfigError, DecodeError, Engine
from eagle3core.async_engine import THREAD_NAME
from eagle3core.trace import Trace

pytestmark = pytest.mark.reference


class Gate(Trace):
    """Holds the engine's thread at the first prompt until it is opened, so that nothing ends before its time."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def tap(self, name: str, value: torch.Tensor, valid: torch.Tensor | None = None) -> None:
        self.opened.wait(60)


Scene = Callable[[AsyncEngine], Coroutine[Any, Any, Any]]


def play(engine: Engine, scene: Scene) -> Any:
    """What a scene with an open engine returns; afterwards it is empty, and its thread gone."""

    async def open_and_close() -> Any:
        async with AsyncEngine(engine) as served:
            return await asyncio.wait_for(scene(served), 120)

    found = asyncio.run(open_and_close())
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}
    assert engine.is_closed
    assert is_empty(engine)
    return found


async def all_of(served: AsyncEngine, which: int, n: int) -> list[int]:
    """Every token of a stream."""
    return [token async for token in served.stream(lettered_prompts()[which], new_tokens(n))]


@pytest.mark.parametrize("k", [None, 3])
def test_twenty_streams_at_once_give_each_its_own_tokens(letters: Pair, alone: list[list[int]], k: int | None) -> None:
    asked = [(i % 8, 3 + i % 9) for i in range(20)]

    async def scene(served: AsyncEngine) -> list[list[int]]:
        return list(await asyncio.gather(*(all_of(served, which, n) for which, n in asked)))

    assert play(lettered_engine(letters, k, 4), scene) == [alone[which][:n] for which, n in asked]


@pytest.mark.parametrize("k", [None, 3])
def test_pieces_of_text_are_together_the_text_of_the_response_and_show_no_stop_word(
    letters: Pair, alone: list[list[int]], k: int | None
) -> None:
    texts = [Letters().decode(tokens, skip_special_tokens=True) for tokens in alone]
    words = [text[7:9] for text in texts]

    async def read(served: AsyncEngine, which: int) -> tuple[list[str], list[int], str]:
        limits = new_tokens(18, stop_words=(words[which],))
        stream = served.stream_text(lettered_prompts()[which], limits)
        pieces = [piece async for piece in stream]
        assert [piece async for piece in stream] == [], "the end stays the end"
        return pieces, stream.token_ids, stream.response.text

    async def scene(served: AsyncEngine) -> Any:
        return await asyncio.gather(*(read(served, which) for which in range(8)))

    for which, (pieces, token_ids, text) in enumerate(play(lettered_engine(letters, k, 3), scene)):
        assert "".join(pieces) == text == texts[which][: texts[which].index(words[which])]
        assert all(pieces), "no piece is empty"
        assert token_ids == alone[which][: len(token_ids)]
        assert words[which] in Letters().decode(token_ids, skip_special_tokens=True)


def test_a_text_stream_that_is_closed_gives_no_more_and_cancels_its_request(letters: Pair) -> None:
    engine = lettered_engine(letters, None, 2)

    async def scene(served: AsyncEngine) -> str | None:
        stream = served.stream_text(lettered_prompts()[6], new_tokens(19))
        await anext(stream)
        handle = stream.tokens._order.handle
        assert handle is not None
        await stream.aclose()
        assert [piece async for piece in stream] == []
        await served.generate(lettered_prompts()[2], new_tokens(2))
        return handle.finish_reason

    assert play(engine, scene) == "cancelled"


def test_a_failure_reaches_a_text_stream_after_the_text_that_was_right(letters: Pair, alone: list[list[int]]) -> None:
    engine = lettered_engine(letters, None, 2)
    damaged = alone[5][7]
    assert damaged not in lettered_prompts()[5], "the request breaks where it has chosen that token itself"
    engine.target.embedding[damaged] = torch.nan
    kept = alone[5][: alone[5].index(damaged) + 1]

    async def scene(served: AsyncEngine) -> list[str]:
        stream = served.stream_text(lettered_prompts()[5], new_tokens(18))
        pieces = []
        while not pieces or len("".join(pieces)) < len(kept):
            pieces.append(await anext(stream))
        with pytest.raises(DecodeError, match="not finite"):
            await anext(stream)
        return pieces

    assert "".join(play(engine, scene)) == Letters().decode(kept, skip_special_tokens=True)


def test_what_would_be_refused_is_known_before_it_is_added(letters: Pair) -> None:
    engine = lettered_engine(letters, None)
    engine.check_request([1, 2], new_tokens(3))
    for prompt in ([], [99], [1] * 64):
        with pytest.raises(ConfigError, match="prompt 0"):
            engine.check_request(prompt, new_tokens(3))
    assert is_empty(engine)


def test_generate_awaits_a_response(letters: Pair, alone: list[list[int]]) -> None:
    async def scene(served: AsyncEngine) -> Any:
        return await served.generate(lettered_prompts()[1], new_tokens(6))

    response = play(lettered_engine(letters, 3), scene)
    assert (response.token_ids, response.finish_reason) == (alone[1][:6], "length")


@pytest.mark.parametrize("leave", ["cancel the task", "close", "forget"])
def test_a_reader_that_goes_away_cancels_its_request_and_no_other(
    letters: Pair, alone: list[list[int]], leave: str
) -> None:
    engine, gate = lettered_engine(letters, None, 2), Gate()
    engine.trace = gate

    async def scene(served: AsyncEngine) -> list[int]:
        other = asyncio.create_task(all_of(served, 0, 18))
        stream = served.stream(lettered_prompts()[6], new_tokens(18))
        handle = None
        if leave == "cancel the task":
            reader = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.01)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            gate.opened.set()
        else:
            gate.opened.set()
            await anext(stream)
            handle = stream._order.handle
            if leave == "close":
                await stream.aclose()
                assert [token async for token in stream] == []
        del stream
        gc.collect()
        found = await other
        assert handle is None or handle.finish_reason == "cancelled"
        return found

    assert play(engine, scene) == alone[0][:18]


def test_a_refusal_reaches_the_caller_it_is_for(letters: Pair, alone: list[list[int]]) -> None:
    async def scene(served: AsyncEngine) -> list[int]:
        with pytest.raises(ConfigError, match="prompt 0 is empty"):
            await served.generate([])
        return await all_of(served, 2, 5)

    assert play(lettered_engine(letters, None), scene) == alone[2][:5]


def test_a_failure_inside_the_engine_reaches_every_caller_and_the_engine_serves_on(
    letters: Pair, alone: list[list[int]]
) -> None:
    engine = lettered_engine(letters, None, 2)

    class Failing(Trace):
        is_detailed = True

        def tap(self, name: str, value: torch.Tensor, valid: torch.Tensor | None = None) -> None:
            if name == "accept.tokens":
                raise RuntimeError("a planted failure")

    async def scene(served: AsyncEngine) -> list[int]:
        engine.trace = Failing()
        outcomes = await asyncio.gather(*(all_of(served, i % 8, 9) for i in range(6)), return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, DecodeError)
            assert isinstance(outcome.__cause__, RuntimeError)
        engine.trace = Trace()
        return await all_of(served, 4, 9)

    assert play(engine, scene) == alone[4][:9]


def test_a_close_while_streams_are_read_is_told_to_each(letters: Pair) -> None:
    engine, gate = lettered_engine(letters, None, 2), Gate()
    engine.trace = gate

    async def scene(served: AsyncEngine) -> None:
        readers = [asyncio.create_task(all_of(served, i % 8, 18)) for i in range(6)]
        while not engine.book.reading:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(served.close())
        await asyncio.sleep(0.01)
        gate.opened.set()
        await closing
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, ConfigError), outcome
            assert "closed" in str(outcome)
        with pytest.raises(ConfigError, match="closed"):
            served.stream([1])

    play(engine, scene)


def test_an_engine_that_someone_else_closes_is_told_to_its_readers(letters: Pair) -> None:
    engine, gate = lettered_engine(letters, None, 2), Gate()
    engine.trace = gate

    async def scene(served: AsyncEngine) -> None:
        reader = asyncio.create_task(all_of(served, 6, 18))
        while not engine.book.reading:  # and stays so, behind the gate
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine._turn._waiting:
            await asyncio.sleep(0.001)
        gate.opened.set()
        await closing
        with pytest.raises(ConfigError, match="closed"):
            await reader

    play(engine, scene)


def test_two_event_loops_share_one_engine(letters: Pair, alone: list[list[int]]) -> None:
    engine = lettered_engine(letters, 3, 2)
    served = AsyncEngine(engine)
    found: dict[int, list[int]] = {}

    def run(which: int) -> None:
        found[which] = asyncio.run(all_of(served, which, 9))

    threads = [threading.Thread(target=run, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    asyncio.run(served.close())
    assert found == {which: alone[which][:9] for which in range(3)}
    assert is_empty(engine)
