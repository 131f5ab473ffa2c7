"""The paths: each reads a body, asks the service, and answers whole or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eagle3core import Eagle3Error
from lab.serve import forms
from lab.serve.asked import ChatAsked, CompletionAsked, read_body
from lab.serve.counts import prometheus
from lab.serve.refusals import CLOSING, OVERLOADED, Refused, refusal_of
from lab.serve.service import Service, Work

PATHS = "/v1/completions, /v1/chat/completions, /v1/models, /health and /metrics"
PROMETHEUS = "text/plain; version=0.0.4"
_GONE = Response(status_code=499)  # what nobody reads any more; nginx has the number for it


def application(service: Service, most_bytes: int) -> Starlette:
    """The server's paths over a service, which is closed when the application ends.

    Args:
        most_bytes: of a request's body.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    async def completions(request: Request) -> Response:
        asked = read_body(CompletionAsked, await _body(request, most_bytes))
        form = forms.CompletionForm(service.name, service.token_text, includes_usage=asked.includes_usage)
        return await _answer(request, form, service.begin(await service.jobs(asked)), bool(asked.stream))

    async def chats(request: Request) -> Response:
        asked = read_body(ChatAsked, await _body(request, most_bytes))
        form = _chat_form(service, asked)
        return await _answer(request, form, service.begin(await service.jobs(asked)), bool(asked.stream))

    async def models(request: Request) -> Response:
        return JSONResponse(forms.models(service.name, service.config.session_len, service.created))

    async def health(request: Request) -> Response:
        told = {"status": "closing" if service.is_closing else "ok", "running": service.n_running,
                "waiting": service.n_waiting}  # fmt: skip
        return JSONResponse(told, status_code=CLOSING if service.is_closing else HTTPStatus.OK)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(prometheus(service.counts, service.now), media_type=PROMETHEUS)

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, Eagle3Error):
            error = refusal_of(error, is_closing=service.is_closing)
        assert isinstance(error, Refused), "bound to no other error"
        return _refusal(error)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            Refused: refused, Eagle3Error: refused, HTTPException: _of_http, ClientDisconnect: _of_nobody,
            Exception: _unforeseen,
        },
        lifespan=lifespan,
    )  # fmt: skip


def _chat_form(service: Service, asked: ChatAsked) -> forms.ChatForm:
    """How a chat is answered: in channels where the target writes them."""
    name, text, usage, answers = service.name, service.token_text, asked.includes_usage, service.pipe.answers
    if not answers.has_channels:
        return forms.ChatForm(name, text, includes_usage=usage)
    return forms.ChannelForm(name, text, answers, asked.stops, includes_usage=usage)


class Events(StreamingResponse):  # type: ignore[misc]  # starlette's types are not looked at
    """A stream of events; whichever way it ends, its work is closed."""

    def __init__(self, form: forms.Form, work: Work) -> None:
        super().__init__(_events(form, work), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            await self._work.close()


async def _events(form: forms.Form, work: Work) -> AsyncIterator[bytes]:
    """Pieces, the end of each answer, what it took if asked for; an error in the place of what it kept from coming."""
    n_letters: dict[int, int] = {}  # of the tokens told of, by prompt
    ended = []
    try:
        async for piece in work.pieces():
            is_first, before = piece.place not in n_letters, n_letters.get(piece.place, 0)
            yield form.piece(piece, before, is_first=is_first)
            n_letters[piece.place] = before + form.letters_of(piece.logprobs)
            ended += [] if piece.response is None else [piece.response]
        if form.includes_usage:
            yield form.usage(ended)
    except Eagle3Error as error:
        yield forms.event(refusal_of(error, is_closing=work.service.is_closing).body())
    yield forms.DONE


async def _answer(request: Request, form: forms.Form, work: Work, is_streamed: bool) -> Response:
    if is_streamed:
        return Events(form, work)
    try:
        answers = await _unless_gone(request, work.whole())
    finally:
        await work.close()
    return _GONE if answers is None else JSONResponse(form.whole(answers))


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """What `work` gives; None, and it is cancelled, when the client leaves first."""
    wanted, gone = asyncio.ensure_future(work), asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait((wanted, gone), return_when=asyncio.FIRST_COMPLETED)
        return await wanted if wanted.done() else None
    finally:
        wanted.cancel()
        gone.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most_bytes: int) -> bytes:
    """The body, of a limited length.

    Raises:
        Refused: longer, or said to be something else than JSON.
    """
    # A web page can make a browser send texts and forms anywhere without being asked, but no JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        allowed = "application/json"
        raise Refused(415, f"the body is sent as {kind or 'nothing in particular'}", allowed, f"send it as {allowed}")
    parts, n_bytes = [], 0
    async for part in request.stream():
        parts.append(part)
        n_bytes += len(part)
        if n_bytes > most_bytes:
            raise Refused(
                413, f"the body has more than {most_bytes} bytes", f"up to {most_bytes >> 20} MiB",
                "shorten the prompt, or start the server with a larger --max-body-mib",
            )  # fmt: skip
    return b"".join(parts)


async def _of_http(request: Request, error: Exception) -> Response:
    """What no path answers to."""
    assert isinstance(error, HTTPException), "bound to no other error"
    what = f"{request.method} {request.url.path} is answered with {error.status_code} {error.detail}"
    return _refusal(Refused(error.status_code, what, PATHS, "correct path and method"), error.headers)


async def _of_nobody(request: Request, error: Exception) -> Response:
    """The client left before its body was read."""
    return _GONE


async def _unforeseen(request: Request, error: Exception) -> Response:
    """An error of our own; its traceback goes to the log."""
    what = f"unforeseen: {type(error).__name__}"
    return _refusal(Refused(500, what, "no error of our own", "report it with the traceback in the server's log"))


def _refusal(error: Refused, headers: Any = None) -> Response:
    later = {"Retry-After": "1"} if error.status == OVERLOADED else {}
    return JSONResponse(error.body(), status_code=error.status, headers={**dict(headers or {}), **later})
