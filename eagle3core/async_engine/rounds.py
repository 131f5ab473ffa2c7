"""One engine for many awaiting callers: a thread of its own makes the rounds, and tokens arrive where they are awaited.

The thread alone adds, steps and cancels, so no event loop waits for the device. Orders reach it through one queue;
what it has to say goes to each caller's own event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Self

from eagle3core.async_engine.streams import AsyncTextStream, AsyncTokenStream, Order, closed
from eagle3core.batching import TextPieces
from eagle3core.config import GenerationConfig
from eagle3core.engine import Engine
from eagle3core.request import Response, detokenize

THREAD_NAME = "eagle3core rounds"


class AsyncEngine:
    """An engine that a background thread makes rounds of, for coroutines of any event loops.

    Args:
        engine: closed with this. Calls of its own still work, each waiting for the round under way.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders: SimpleQueue[Order | None] = SimpleQueue()  # None: close
        self._is_closed, self._entry = False, Lock()
        self._thread = Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def stream(self, prompt: Sequence[int], generation: GenerationConfig | None = None) -> AsyncTokenStream:
        """Tokens of a request as they come; to be called where an event loop runs. A refusal comes with the first.

        Raises:
            ConfigError: this was closed.
        """
        order = Order(prompt, generation)
        with self._entry:
            if self._is_closed:
                raise closed("stream was called")
            self._orders.put(order)
        return AsyncTokenStream(order, self._orders)

    def stream_text(self, prompt: Sequence[int], generation: GenerationConfig | None = None) -> AsyncTextStream:
        """As `stream`, in pieces of text; empty for an engine without a tokenizer.

        Raises:
            ConfigError: as `stream`.
        """
        tokenizer, words = self.engine.tokenizer, generation.stop_words if generation is not None else ()
        pieces = TextPieces(lambda ids: detokenize(tokenizer, ids), words)
        return AsyncTextStream(self.stream(prompt, generation), pieces)

    async def generate(self, prompt: Sequence[int], generation: GenerationConfig | None = None) -> Response:
        """The response to one prompt.

        Raises:
            ConfigError, DecodeError: as `AsyncTokenStream.__anext__`.
        """
        stream = self.stream(prompt, generation)
        async for _ in stream:
            pass
        return stream.response

    async def close(self) -> None:
        """End every request as cancelled, which their readers are told, and the thread."""
        with self._entry:
            if not self._is_closed:
                self._is_closed = True
                self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    def _work(self) -> None:
        """The thread: orders, then the least that a round is made of, then news, until it is told to close."""
        live: list[Order] = []
        while self._take_orders(live):
            with suppress(BaseException):  # has ended every request as its cause, so that each reader is told
                self.engine.advance(pauses=lambda: not self._orders.empty())
            live[:] = [order for order in live if not order.deliver(self.engine)]
        with suppress(BaseException):  # a device that is gone; the requests have ended, and that is told
            self.engine.close()
        for order in live:
            order.deliver(self.engine)

    def _take_orders(self, live: list[Order]) -> bool:
        """Take what has been ordered, waiting only with nothing to do; False when told to close."""
        while True:
            try:
                order = self._orders.get(block=not live)
            except Empty:
                return True
            if order is None:
                return False
            if order.is_left:
                self._drop(order, live)
            elif order.begin(self.engine):
                live.append(order)

    def _drop(self, order: Order, live: list[Order]) -> None:
        if order.handle is not None:
            self.engine.cancel_soon(order.handle)
            live[:] = [other for other in live if other is not order]
