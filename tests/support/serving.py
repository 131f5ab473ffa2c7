"""A server over a tiny pair whose tokens are letters: as an application, and at a real socket read by hand."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
from lettered import N_LETTERS
from tiny_engines import Pair, is_empty, letter_tokenizer, tiny_engine

from eagle3core import GenerationConfig, Pipeline
from lab.serve.service import Service

if TYPE_CHECKING:
    from starlette.applications import Starlette

MISSING = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
WHY_NOT = f"{' and '.join(MISSING)} not installed (the extra serve)"
LETTERS = "abcdefghijklmnop"[:N_LETTERS]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}ab"
MOST_BYTES = 1 << 20
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DEADLINE_S = 120


def letter_pipe(pair: Pair, k: int | None = 3, **changes: Any) -> Pipeline:
    """A pipeline over a lettered pair."""
    tokenizer = letter_tokenizer(TEMPLATE, LETTERS)
    return Pipeline(tiny_engine(pair, k, tokenizer=tokenizer, **changes), tokenizer)


def offline(pair: Pair, asked: dict[str, Any]) -> list[str]:
    """What the texts of a completion's prompts give by `generate`, without drafts."""
    return [_alone(pair, prompt, asked["max_tokens"]) for prompt in asked["prompt"]]


@cache
def _alone(pair: Pair, prompt: str, n: int) -> str:
    with letter_pipe(pair, None, max_batch_size=1) as pipe:
        return pipe(prompt, GenerationConfig(max_new_tokens=n)).text


def play(service: Service, scene: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What a scene returns; afterwards nothing is left in the engine, and no place is taken."""

    async def whole() -> Any:
        try:
            return await asyncio.wait_for(scene(), DEADLINE_S)
        finally:
            await service.close()

    found = asyncio.run(whole())
    assert is_empty(service.pipe.engine)
    assert service.n_open == 0
    return found


def app(service: Service) -> Starlette:
    """The paths over a service."""
    from lab.serve.endpoints import application  # needs the extra

    return application(service, MOST_BYTES)


@asynccontextmanager
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without a socket; streams arrive when they have ended."""
    transport = httpx.ASGITransport(app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=DEADLINE_S) as opened:
        yield opened


def events_of(text: str) -> list[dict[str, Any]]:
    """Events of a stream that is whole: each a line of data, the last of them the word that it is."""
    lines = text.split("\n\n")
    assert lines[-1] == ""
    assert all(line.startswith("data: ") for line in lines[:-1])
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def text_of(events: list[dict[str, Any]], place: int = 0) -> tuple[str, str | None]:
    """Text and reason that the events of one prompt give together."""
    choices = [one for event in events for one in event["choices"] if one["index"] == place]
    texts = [one["text"] if "text" in one else one["delta"].get("content", "") for one in choices]
    reasons = [one["finish_reason"] for one in choices]
    assert set(reasons[:-1]) <= {None}, "nothing comes after the end"
    return "".join(texts), reasons[-1]


@asynccontextmanager
async def listening(service: Service) -> AsyncIterator[int]:
    """A real server at a free port of this machine, as the command starts it."""
    from lab.serve.command import bound, serve

    with bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        running = asyncio.create_task(serve(service, taken, MOST_BYTES))
        try:
            while not await is_up(port):
                await asyncio.sleep(0.01)
            yield port
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def is_up(port: int) -> bool:
    """Whether something answers at a port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


class Reader:
    """A client by hand, as load generators are: a socket, a request, and lines as they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0

    @classmethod
    async def open(cls, port: int, path: str, body: dict[str, Any]) -> Reader:
        """Ask, and read the head of the answer."""
        opened = cls(*await asyncio.open_connection("127.0.0.1", port))
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
        opened._writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + raw)
        return opened

    async def head(self) -> None:
        """Read the status and the headers."""
        self.status = int((await self._reader.readline()).split()[1])
        while (await self._reader.readline()).strip():
            pass

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Events up to the last word; lengths of chunks between them are passed over."""
        while True:
            line = await self._reader.readline()
            assert line, "the stream broke off"
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    def leave(self) -> None:
        """Close the socket, whatever is still to come."""
        self._writer.transport.abort()


async def streamed(port: int, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every event of one stream."""
    reader = await Reader.open(port, path, {**body, "stream": True})
    await reader.head()
    assert reader.status == 200
    found = [event async for event in reader.events()]
    reader.leave()
    return found
