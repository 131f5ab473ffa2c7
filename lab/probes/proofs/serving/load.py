"""One run: answers first, then the server, its clients, and what it holds once they have all left."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lab.errors import ExperimentError, RunFailed
from lab.probes.proofs.serving.clients import Tally, ask_until_over
from lab.probes.proofs.serving.plan import ServingPlan
from lab.probes.proofs.serving.questions import Question, asked_offline
from lab.probes.proofs.serving.server import Server
from lab.serve.command import check_installed

LEAVING_S = 10.0  # for the server to notice who has left
HELD = "cache_blocks_held"


@dataclass(frozen=True)
class Load:
    """What came of a run.

    Attributes:
        tally: of the clients. seconds: from the first question to the last answer.
        most_held: blocks that requests were seen to hold. left: the server's own figures after all had left.
        code, log: of the server's process at its end.
    """

    tally: Tally
    seconds: float
    most_held: int
    left: dict[str, float]
    code: int | None
    log: str

    def figure(self, name: str) -> int:
        """One of the server's own figures; 0 for what never happened."""
        return int(self.left.get(name, 0))


def run_load(plan: ServingPlan) -> Load:
    """The run.

    Raises:
        ExperimentError: what serving needs is not installed. RunFailed: the server did not start.
    """
    try:
        check_installed()
    except RunFailed as error:
        raise ExperimentError(error.what, error.allowed, error.remedy) from error
    questions = asked_offline(plan)
    with TemporaryDirectory() as folder:
        return asyncio.run(_served(plan, questions, Path(folder) / "server.log"))


async def _served(plan: ServingPlan, questions: list[Question], log: Path) -> Load:
    server = await Server.start(plan.words(), log, plan.start_s)
    held: list[int] = []
    code, text = None, ""
    try:
        watching = asyncio.create_task(_watch(server, held))
        begun = time.perf_counter()
        tally = await ask_until_over(plan, server.port, questions)
        seconds = time.perf_counter() - begun
        watching.cancel()
        left = await _left(server)
    finally:
        code, text = await server.stop()
    return Load(tally, seconds, max(held, default=0), left, code, text)


async def _watch(server: Server, held: list[int]) -> None:
    """Note now and then how many blocks are held: a count that is always 0 proves nothing at the end."""
    while True:
        with suppress(OSError, EOFError):  # a server that is gone is seen by the clients
            held.append(int((await server.metrics())[HELD]))
        await asyncio.sleep(0.5)


async def _left(server: Server) -> dict[str, float]:
    """The server's figures once nobody is in it and it holds nothing, or what they are when that takes too long.

    None at all where the server is gone: that its clients have seen.
    """
    until = time.perf_counter() + LEAVING_S
    while True:
        try:
            figures = await server.metrics()
        except (OSError, EOFError):
            return {}
        if not any(figures[name] for name in ("requests_running", "requests_waiting", HELD)):
            return figures
        if time.perf_counter() > until:
            return figures
        await asyncio.sleep(0.05)
