"""HTTP/1.1 as far as a client of events needs it, over asyncio's streams: one connection for many requests.

Connections are kept from request to request, as clients do: thousands a second would use up a machine's ports.
Source: RFC 9112, sections 6 and 7.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

HOST = "127.0.0.1"


class Connection:
    """A client's connection to a port of this machine, opened when it is first needed and after it was left.

    Attributes:
        status: of the answer under way.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._headers: dict[str, str] = {}
        self.status = 0

    async def ask(self, path: str, body: bytes = b"", *, method: str = "POST", kind: str = "application/json") -> None:
        """Send a request and read the head of its answer.

        Raises:
            OSError, EOFError: the connection could not be had, or broke off.
        """
        reader, writer = await self._opened()
        lines = (f"{method} {path} HTTP/1.1", f"Host: {HOST}", f"Content-Type: {kind}", f"Content-Length: {len(body)}")
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        await writer.drain()
        self.status = int((await _line(reader)).split()[1])
        self._headers = {}
        while line := await _line(reader):
            name, _, value = line.partition(b":")
            self._headers[name.strip().lower().decode()] = value.strip().lower().decode()

    async def whole(self) -> bytes:
        """All of the answer that is left.

        Raises:
            EOFError: it broke off.
        """
        return b"".join([part async for part in self._parts()])

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Events of a stream, up to the word that it is done.

        Raises:
            EOFError: it broke off. ValueError: what came is no event, or the word did not come.
        """
        rest, is_done = b"", False
        async for part in self._parts():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if is_done or not event.startswith(b"data: "):
                    raise ValueError(f"{event[:80]!r} came where an event was expected")
                is_done = event == b"data: [DONE]"
                if not is_done:
                    yield json.loads(event.removeprefix(b"data: "))
        if rest or not is_done:
            raise ValueError("the stream ended before it was done")

    def leave(self) -> None:
        """Close the connection at once, whatever is still to come."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._streams = None

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._headers.get("connection") == "close":
            self.leave()
        if self._streams is None:
            self._streams = await asyncio.open_connection(HOST, self._port)
        return self._streams

    async def _parts(self) -> AsyncGenerator[bytes]:
        """The answer's body in the pieces that it comes in."""
        assert self._streams is not None, "a request was sent"
        reader = self._streams[0]
        if self._headers.get("transfer-encoding") != "chunked":
            yield await reader.readexactly(int(self._headers.get("content-length", "0")))
            return
        while n_bytes := int(await _line(reader), 16):
            yield await reader.readexactly(n_bytes)
            await reader.readexactly(2)  # the end of the line
        await _line(reader)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """A line without its end.

    Raises:
        EOFError: the connection broke off before it.
    """
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection broke off")
    return line.strip()
