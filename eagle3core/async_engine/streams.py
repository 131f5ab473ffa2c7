"""What an awaiting caller holds: tokens or text of a request as they come, from the thread that makes the rounds.

`Order` is the request between both sides: its tokens, its end or its error go to the caller's own event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

from eagle3core.batching import TextPieces
from eagle3core.config import GenerationConfig
from eagle3core.engine import Engine
from eagle3core.errors import ConfigError
from eagle3core.request import RequestHandle, Response
from eagle3core.step.outcome import TokenLogprob


class Order:
    """A request between its reader and the thread. The thread holds this and not the stream, which may go away."""

    def __init__(self, prompt: Sequence[int], generation: GenerationConfig | None) -> None:
        self.prompt, self.generation = prompt, generation
        self.loop = asyncio.get_running_loop()
        self.arrived: asyncio.Queue[int | BaseException | None] = asyncio.Queue()  # None: the end
        self.handle: RequestHandle | None = None
        self.is_left = False  # nobody reads it any more
        self._n_sent = 0

    def begin(self, engine: Engine) -> bool:
        """Let the request wait; whether it does. A refusal is sent to the reader."""
        try:
            self.handle = engine.add_request(self.prompt, self.generation)
        except BaseException as error:
            self._send([error])
        return self.handle is not None

    def deliver(self, engine: Engine) -> bool:
        """Send what is new; whether that was all."""
        assert self.handle is not None, "only what has begun is delivered"
        request = self.handle.request
        reason, tokens = request.finish_reason, request.token_ids[self._n_sent :]  # in this order: the end comes last
        self._n_sent += len(tokens)
        news: list[int | BaseException | None] = [*tokens]
        if reason == "cancelled" and engine.is_closed:
            news.append(closed("a request was under way"))
        elif reason is not None:
            news.append(request.error)
        if news and not self._send(news):
            engine.cancel_soon(self.handle)
            return True
        return reason is not None

    def _send(self, news: Sequence[int | BaseException | None]) -> bool:
        """Whether there is still an event loop to send to."""
        with suppress(RuntimeError):  # a loop that has been closed
            self.loop.call_soon_threadsafe(self._put, news)
            return True
        return False

    def _put(self, news: Sequence[int | BaseException | None]) -> None:
        for each in news:
            self.arrived.put_nowait(each)


class AsyncTokenStream(AsyncIterator[int]):
    """Tokens of a request, in order, as `AsyncEngine.stream` gives them.

    One that is closed, whose reader is cancelled while it waits, or that is no longer referred to cancels its request.
    """

    def __init__(self, order: Order, orders: SimpleQueue[Order | None]) -> None:
        self._order, self._orders = order, orders
        self._has_ended = False
        self._outcome: BaseException | None = None

    async def __anext__(self) -> int:
        """The next token.

        Raises:
            ConfigError: what `Engine.add_request` refuses, or the engine was closed.
            DecodeError: the request could not go on, or a round broke off, which is then its `__cause__`.
        """
        if not self._has_ended:
            try:
                news = await self._order.arrived.get()
            except asyncio.CancelledError:
                self._leave()
                raise
            if isinstance(news, int):
                return news
            self._has_ended, self._outcome = True, news
        raise self._outcome or StopAsyncIteration

    async def next_tokens(self) -> list[int]:
        """All tokens that are there, at least one.

        Raises:
            StopAsyncIteration: there are none left. Others: as `__anext__`.
        """
        tokens, arrived = [await anext(self)], self._order.arrived
        while not (self._has_ended or arrived.empty()):
            news = arrived.get_nowait()
            if isinstance(news, int):
                tokens.append(news)
            else:
                self._has_ended, self._outcome = True, news
        return tokens

    @property
    def is_whole(self) -> bool:
        """Whether the request has ended with all of its tokens taken, and without an error."""
        return self._has_ended and self._outcome is None and not self._order.is_left

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens so far, those under way included; none where they were not asked for."""
        handle = self._order.handle
        return [] if handle is None or handle.logprobs is None else handle.logprobs

    @property
    def response(self) -> Response:
        """The whole, once the request has ended.

        Raises:
            ConfigError: it has not, or was refused.
        """
        if self._order.handle is None:
            raise ConfigError(
                "a response was asked for of a request that has not begun", "one that has ended", "read its tokens"
            )
        return self._order.handle.response()

    async def aclose(self) -> None:
        """Give no more tokens, and cancel the request if it has not ended."""
        self._order.arrived.put_nowait(None)  # for a reader that waits, of whom there may be one in another task
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._has_ended = True
        if not self._order.is_left:
            self._order.is_left = True
            self._orders.put(self._order)  # which a destructor may do at any time


class AsyncTextStream(AsyncIterator[str]):
    """Text of a request in pieces, which together are the text of its response, as `AsyncEngine.stream_text` gives it.

    Args:
        tokens: the request's tokens. pieces: makes text of them.

    Attributes:
        tokens: likewise; closing it, or this, cancels the request.
        token_ids: tokens whose text has been given, or is held back because later ones may change it.
    """

    def __init__(self, tokens: AsyncTokenStream, pieces: TextPieces) -> None:
        self.tokens, self._pieces = tokens, pieces
        self.token_ids: list[int] = []
        self._is_done = False

    async def __anext__(self) -> str:
        """The next piece, not empty.

        Raises:
            ConfigError, DecodeError: as `AsyncTokenStream.__anext__`.
        """
        while not self._is_done:
            try:
                self.token_ids += await self.tokens.next_tokens()
            except StopAsyncIteration:
                self._is_done = True
            # Of a request that has ended it is known what may be shown: the text of its response.
            if self.tokens.is_whole:
                self._is_done = True
                piece = self._pieces.rest(self.response.text)
            else:
                piece = "" if self._is_done else self._pieces.more(self.token_ids)
            if piece:
                return piece
        raise StopAsyncIteration

    @property
    def response(self) -> Response:
        """As `AsyncTokenStream.response`."""
        return self.tokens.response

    async def aclose(self) -> None:
        """As `AsyncTokenStream.aclose`."""
        self._is_done = True
        await self.tokens.aclose()


def closed(what: str) -> ConfigError:
    """The refusal of a call, or of a request under way, on an engine that is closed."""
    return ConfigError(f"{what} on an engine that is closed", "an open engine", "make a new one")
