"""Tokens and text of one request as they come. Whoever iterates makes the engine's rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

from eagle3core.batching.closing import Closing
from eagle3core.batching.pieces import TextPieces
from eagle3core.errors import ConfigError
from eagle3core.request import RequestHandle, Response, detokenize


class Rounds(Protocol):
    """The part of an engine that a stream uses."""

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed, which ended its requests."""

    def advance(self, unless: Callable[[], bool] | None = None) -> bool:
        """Do the least that a round is made of, unless something holds by then."""

    def cancel_soon(self, request: RequestHandle) -> None:
        """End a request without waiting."""


class TokenStream(Closing, Iterator[int]):
    """Tokens of a request, in order; those of a step come one after the other.

    A stream that is closed, left as a context or no longer referred to cancels its request. One that ends by itself has
    a `response`.

    Attributes:
        handle: the request.
    """

    def __init__(self, engine: Rounds, handle: RequestHandle) -> None:
        self._engine, self.handle = engine, handle
        self._n_given = 0
        self._is_closed = False

    def __next__(self) -> int:
        """The next token.

        Raises:
            DecodeError: the request could not go on, or a round of another caller's broke off.
            ConfigError: the engine was closed, or the call comes from within a call.
            Exception: whatever a round that was made here broke off with.
        """
        [token] = self._next(1)
        return token

    def next_tokens(self) -> list[int]:
        """All tokens that are there, at least one.

        Raises:
            StopIteration: there are none left. Others: as `__next__`.
        """
        return self._next(None)

    def _next(self, most: int | None) -> list[int]:
        while not (self._is_closed or self._has_news()):
            self._engine.advance(unless=self._has_news)
        tokens = [] if self._is_closed else self.handle.request.token_ids[self._n_given :][:most]
        if not tokens:
            self._end()
        self._n_given += len(tokens)
        return tokens

    def _has_news(self) -> bool:
        request = self.handle.request
        # In this order: tokens come before the end, so what has ended has all of its tokens.
        return request.finish_reason is not None or len(request.token_ids) > self._n_given

    def _end(self) -> NoReturn:
        request = self.handle.request
        if not self._is_closed:
            if request.error is not None:
                raise request.error
            if request.finish_reason == "cancelled" and self._engine.is_closed:
                raise ConfigError("the engine was closed while a stream was read", "an open engine", "make a new one")
        raise StopIteration

    @property
    def response(self) -> Response:
        """The whole, once the request has ended.

        Raises:
            ConfigError: it has not.
        """
        return self.handle.response()

    def close(self) -> None:
        """Give no more tokens, and cancel the request if it has not ended."""
        self._is_closed = True
        if self.handle.finish_reason is None:
            self._engine.cancel_soon(self.handle)

    def __del__(self) -> None:
        self.close()


class TextStream(Closing, Iterator[str]):
    """Text of a request in pieces, which together are the text of its response.

    Args:
        tokens: the request's tokens.

    Attributes:
        tokens: likewise; closing it, or this, cancels the request.
    """

    def __init__(self, tokens: TokenStream) -> None:
        handle = tokens.handle
        self.tokens = tokens
        self._pieces = TextPieces(lambda ids: detokenize(handle.tokenizer, ids), handle.request.stop.words)
        self._token_ids: list[int] = []
        self._is_done = False

    def __next__(self) -> str:
        """The next piece, not empty.

        Raises:
            Exception: as `TokenStream.__next__`.
        """
        while not self._is_done:
            try:
                self._token_ids += self.tokens.next_tokens()
            except StopIteration:
                self._is_done = True
            request = self.tokens.handle.request
            # Of a request with all of its tokens here it is known what may be shown: the text of its response.
            if request.finish_reason is None or len(request.token_ids) > len(self._token_ids):
                piece = "" if self._is_done else self._pieces.more(self._token_ids)
            else:
                piece = self._pieces.rest(self.response.text)
            if piece:
                return piece
        raise StopIteration

    @property
    def response(self) -> Response:
        """As `TokenStream.response`."""
        return self.tokens.response

    def close(self) -> None:
        """As `TokenStream.close`."""
        self._is_done = True
        self.tokens.close()
