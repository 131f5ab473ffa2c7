"""The server as a process of its own: `eagle3lab serve` on a free port, asked what it holds, ended by a signal."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lab.errors import RunFailed
from lab.probes.proofs.serving.connection import Connection

END_S = 60.0  # the server gives its clients ten
_AT = re.compile(r"http://127\.0\.0\.1:(\d+)/v1")


class Server:
    """A running server.

    Args:
        log: what it writes to its second output.

    Attributes:
        port: where it listens.
    """

    def __init__(self, process: Process, port: int, log: Path) -> None:
        self._process, self.port, self._log = process, port, log

    @classmethod
    async def start(cls, words: Sequence[str], log: Path, start_s: float) -> Server:
        """Start the command, and wait until it says where it is.

        Raises:
            RunFailed: it ended, or did not say so in time.
        """
        with log.open("wb") as told:
            command = (sys.executable, "-m", "lab", "serve", *words)
            process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=told)
        assert process.stdout is not None, "it was asked for"
        line = b""
        with suppress(TimeoutError):
            line = await asyncio.wait_for(process.stdout.readline(), start_s)
        found = _AT.search(line.decode(errors="replace"))
        if found is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise RunFailed(
                f"the server did not start in {start_s:.0f} s; it said: {last}", "a server that listens",
                "run eagle3lab serve by hand, or build its kernels first",
            )  # fmt: skip
        return cls(process, int(found[1]), log)

    async def metrics(self) -> dict[str, float]:
        """What it says of itself, by name and label.

        Raises:
            OSError, EOFError: nobody answers.
        """
        connection = Connection(self.port)
        try:
            await connection.ask("/metrics", method="GET")
            text = (await connection.whole()).decode()
        finally:
            connection.leave()
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("eagle3_"): float(value) for name, value in rows}

    async def stop(self) -> tuple[int | None, str]:
        """End it by a signal: its exit code, or None if it had to be killed, and what it wrote to its log."""
        code = None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        return code, self._log.read_text(errors="replace")
