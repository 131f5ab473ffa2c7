"""One engine, its places, and what each HTTP request has under way in it.

A request takes a place for each of its prompts: a slot, or one of a limited number of places to wait. It keeps them
until its streams are closed, which its answer's end, its client's leaving and the server's closing all lead to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from eagle3core import AsyncEngine, AsyncTextStream, ConfigError, GenerationConfig, Pipeline, Response, TokenLogprob
from lab.serve.asked import Asked, ChatAsked, CompletionAsked
from lab.serve.counts import Counts, Now
from lab.serve.refusals import OVERLOADED, Refused, closing


class Job(NamedTuple):
    """A prompt's token ids, and what is asked of the engine after them."""

    ids: list[int]
    generation: GenerationConfig


class Piece(NamedTuple):
    """What is new of the answer to prompt number `place`: text, the tokens that came with it, and their
    log-probabilities, if asked for; with its last piece, the whole."""

    place: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    response: Response | None = None


class Service:
    """An engine that serves, and who is in it.

    Args:
        pipe: engine and tokenizer; closed with this.
        name: of the model, as clients write it.
        most_waiting: requests that may wait for a slot.
    """

    def __init__(self, pipe: Pipeline, name: str, *, most_waiting: int) -> None:
        self.pipe, self.name, self.most_waiting = pipe, name, most_waiting
        self.engine = AsyncEngine(pipe.engine)
        self.counts, self.created = Counts(), int(time.time())
        self.is_closing = False
        self.n_open = 0
        # One thread: readers of tokenizers are not all made for several.
        self._tokenizing = ThreadPoolExecutor(1, "eagle3lab prompts")

    @property
    def config(self) -> Any:
        """The engine's settings."""
        return self.pipe.engine.config

    @property
    def most_open(self) -> int:
        """Places there are."""
        return int(self.config.max_batch_size) + self.most_waiting

    @property
    def n_running(self) -> int:
        """Requests that are read or decoded."""
        book = self.pipe.engine.book
        return len(book.running) + len(book.reading)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a slot, or for the engine to take notice."""
        return max(0, self.n_open - self.n_running)

    @property
    def now(self) -> Now:
        """What the engine is and holds, for whoever watches the server."""
        engine, blocks = self.pipe.engine, self.pipe.engine.book.blocks
        pool, so_far = blocks.pool, blocks.counts
        return Now(
            engine.backend.path, self.config.max_batch_size, self.n_running, self.n_waiting, pool.n_blocks, pool.n_held,
            pool.n_kept, so_far.n_put_back, so_far.n_found_tokens, self.pipe.answers.n_plain,
        )  # fmt: skip

    async def jobs(self, asked: Asked) -> list[Job]:
        """What a body asks of the engine, checked as far as it can be before there is a place.

        Raises:
            Refused, ConfigError: another model, a prompt or setting that the engine would refuse, or more prompts than
                there are places.
        """
        if asked.model not in (None, self.name):
            raise Refused(
                404, f"model is {asked.model!r}", self.name, "name the model that is served, or leave model out",
                param="model", code="model_not_found",
            )  # fmt: skip
        prompts, settings = _prompts_of(asked)
        if len(prompts) > self.most_open:
            raise Refused(
                400, f"{len(prompts)} prompts in one request", f"at most {self.most_open}, the places of this server",
                "send several requests", param="prompt",
            )  # fmt: skip
        ids = [await self._ids_of(prompt, settings) for prompt in prompts]
        jobs = [Job(each, asked.generation(len(each), self.config.session_len)) for each in ids]
        for job in jobs:
            self.pipe.engine.check_request(job.ids, job.generation)
        return jobs

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special ones too."""
        return str(self.pipe.tokenizer.decode([token_id]))

    async def _ids_of(self, prompt: Any, settings: dict[str, Any]) -> list[int]:
        """Token ids of a text, of a chat, whose template reads `settings`, or of what is token ids already."""
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        if self.is_closing:  # and the thread is gone
            raise closing()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, self.pipe.encode, prompt, settings)

    def begin(self, jobs: Sequence[Job]) -> Work:
        """Let jobs take their places.

        Raises:
            Refused: the server closes, or there are too few places left.
        """
        if self.is_closing:
            raise closing()
        if self.n_open + len(jobs) > self.most_open:
            self.counts.refused += len(jobs)
            raise Refused(
                OVERLOADED, f"{self.n_open} requests are under way", f"at most {self.most_open} of them: "
                f"{self.config.max_batch_size} slots, and {self.most_waiting} that wait", "ask again later",
            )  # fmt: skip
        return Work(self, jobs)

    async def close(self) -> None:
        """End every request, which its client is told, and the engine."""
        self.is_closing = True
        await self.engine.close()
        self._tokenizing.shutdown(wait=False)


class Work:
    """What one HTTP request has under way: a stream and a place for each of its jobs, until it is closed."""

    def __init__(self, service: Service, jobs: Sequence[Job]) -> None:
        self.service, self._n = service, len(jobs)
        self.streams: list[AsyncTextStream] = [service.engine.stream_text(*job) for job in jobs]
        service.n_open += self._n

    async def whole(self) -> list[Response]:
        """Every answer.

        Raises:
            ConfigError, DecodeError: of the first that ended without one.
        """
        answers: dict[int, Response] = {}
        async for piece in self.pieces():
            if piece.response is not None:
                answers[piece.place] = piece.response
        return [answers[index] for index in range(self._n)]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all answers, as they come.

        Raises:
            ConfigError, DecodeError: as `whole`.
        """
        if self._n == 1:
            async for piece in _pieces_of(0, self.streams[0]):
                yield piece
            return
        arrived: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        readers = [asyncio.create_task(_read(i, stream, arrived)) for i, stream in enumerate(self.streams)]
        try:
            n_left = self._n
            while n_left:
                news = await arrived.get()
                if isinstance(news, BaseException):
                    raise news
                n_left -= news.response is not None
                yield news
        finally:
            for reader in readers:
                reader.cancel()

    async def close(self) -> None:
        """Give the places back; what has not ended is cancelled, and no other request is touched."""
        streams, self.streams = self.streams, []
        for stream in streams:
            try:
                self.service.counts.add(stream.response)
            except ConfigError:  # it has not ended
                self.service.counts.ended["cancelled"] += 1
            await stream.aclose()
            self.service.n_open -= 1


async def _pieces_of(index: int, stream: AsyncTextStream) -> AsyncIterator[Piece]:
    n_told = 0
    async for text in stream:
        n_taken = len(stream.token_ids)
        yield Piece(index, text, stream.token_ids[n_told:n_taken], stream.tokens.logprobs[n_told:n_taken])
        n_told = n_taken
    response = stream.response
    yield Piece(index, "", response.token_ids[n_told:], stream.tokens.logprobs[n_told:], response)


async def _read(index: int, stream: AsyncTextStream, arrived: asyncio.Queue[Piece | BaseException]) -> None:
    try:
        async for piece in _pieces_of(index, stream):
            arrived.put_nowait(piece)
    except Exception as error:
        arrived.put_nowait(error)


def _prompts_of(asked: Asked) -> tuple[list[Any], dict[str, Any]]:
    """What is to be answered, and what a chat's template is told beside it."""
    if isinstance(asked, CompletionAsked):
        return list(asked.prompts), {}
    assert isinstance(asked, ChatAsked), "a body is a completion's or a chat's"
    return [asked.chat], asked.template_settings
