"""Clients that ask, read and compare until the time is up, each in a loop of its own; what they saw is added up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

from lab.probes.proofs.serving.connection import Connection
from lab.probes.proofs.serving.plan import ServingPlan
from lab.probes.proofs.serving.questions import BAD, Bad, Question

MOST_EVENTS = 6  # that a client reads before it leaves
MOST_ERRORS = 1000  # from which on nobody asks further: the server is gone
BROKEN = (OSError, EOFError, ValueError, LookupError)  # of these TimeoutError is the first, and bad JSON the third


@dataclass
class Tally:
    """What all clients saw.

    Attributes:
        n_answers, n_tokens: whole answers, and their tokens. first_s: from a question to its first text, of each.
        n_left: streams that were left. n_refused: requests that were refused as they should be.
        errors: requests that got no whole answer. differing: answers, or parts of them, that are not the offline ones.
        not_refused: bad requests that got something else than a refusal in three parts. Each in words.
    """

    n_answers: int = 0
    n_tokens: int = 0
    n_left: int = 0
    n_refused: int = 0
    first_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    not_refused: list[str] = field(default_factory=list)


async def ask_until_over(plan: ServingPlan, port: int, questions: Sequence[Question]) -> Tally:
    """What the clients saw, once every one of them has read its last answer."""
    tally, until = Tally(), time.perf_counter() + plan.seconds
    await asyncio.gather(*(Client(i, plan, port, tally).ask_until(until, questions) for i in range(plan.clients)))
    return tally


class Client:
    """One that asks questions by chance, a new one when the last is answered."""

    def __init__(self, number: int, plan: ServingPlan, port: int, tally: Tally) -> None:
        self.number, self.plan, self.tally = number, plan, tally
        self._connection, self._random = Connection(port), Random(number)

    async def ask_until(self, until: float, questions: Sequence[Question]) -> None:
        """Ask; what goes wrong is an error, and the client goes on."""
        turn = self.number  # so that not all clients leave at once
        try:
            while time.perf_counter() < until and len(self.tally.errors) < MOST_ERRORS:
                question, turn = self._random.choice(questions), turn + 1
                await self._try_turn(turn, question)
        finally:
            self._connection.leave()

    async def _try_turn(self, turn: int, question: Question) -> None:
        try:
            async with asyncio.timeout(self.plan.patience_s):
                await self._take_turn(turn, question)
        except BROKEN as error:
            self.tally.errors.append(f"{type(error).__name__}: {error}")
            self._connection.leave()

    async def _take_turn(self, turn: int, question: Question) -> None:
        odd, which = turn % self.plan.odd_every, turn // self.plan.odd_every
        if odd == 1:
            await self._leave(question, self._random.randrange(MOST_EVENTS + 1))
        elif odd == 1 + self.plan.odd_every // 2:
            await self._misuse(BAD[(self.number + which) % len(BAD)])
        else:
            await self._read(question)

    async def _read(self, question: Question) -> None:
        """The whole answer, compared."""
        begun, texts, reasons, n_tokens = time.perf_counter(), list[str](), list[str](), -1
        async for event in self._events(question):
            if event.get("usage"):
                n_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if not texts:
                    self.tally.first_s.append(time.perf_counter() - begun)
                texts.append(_text(choice))
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        got, wanted = ("".join(texts), reasons, n_tokens), (question.text, [question.reason], question.n_tokens)
        self.tally.n_answers += 1
        self.tally.n_tokens += n_tokens
        if got != wanted:
            where = difference(got[0], question.text)
            self.tally.differing.append(f"{question.path}: {where}; {got[1:]} for {wanted[1:]}")

    async def _leave(self, question: Question, n_events: int) -> None:
        """The first events, compared; then the connection is closed."""
        text, n_read = "", 0
        await self._ask(question)
        async with aclosing(self._connection.events()) as events:
            async for event in events:
                if n_read == n_events or not event["choices"]:
                    break
                text, n_read = text + _text(event["choices"][0]), n_read + 1
        self._connection.leave()
        self.tally.n_left += 1
        if not question.text.startswith(text):
            self.tally.differing.append(f"{question.path}, left: {difference(text, question.text)}")

    async def _misuse(self, bad: Bad) -> None:
        """A request that has to be refused, in three parts."""
        raw = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
        await self._connection.ask(bad.path, raw, method=bad.method, kind=bad.kind)
        told = await self._connection.whole()
        if self._connection.status == bad.status and _has_three_parts(told):
            self.tally.n_refused += 1
        else:
            self.tally.not_refused.append(f"{raw[:60]!r} got {self._connection.status} {told[:200]!r}")

    async def _ask(self, question: Question) -> None:
        await self._connection.ask(question.path, json.dumps(question.body).encode())
        if self._connection.status != 200:
            raise ValueError(f"status {self._connection.status}: {(await self._connection.whole())[:200]!r}")

    async def _events(self, question: Question) -> AsyncIterator[dict[str, Any]]:
        await self._ask(question)
        async for event in self._connection.events():
            if "error" in event:
                raise ValueError(f"in the stream: {event['error']['message']}")
            yield event


def _text(choice: dict[str, Any]) -> str:
    """What is new of an answer in a completion's or a chat's event."""
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def difference(got: str, wanted: str) -> str:
    """Where a text parts from the one it should be, in words."""
    i = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return f"from letter {i} on {got[i : i + 20]!r} for {wanted[i : i + 20]!r}"


def _has_three_parts(told: bytes) -> bool:
    error = json.loads(told)["error"]
    return all(isinstance(error[part], str) and error[part] for part in ("what", "allowed", "do"))
