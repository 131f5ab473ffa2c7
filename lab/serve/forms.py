"""What a client gets: OpenAI's JSON for a whole answer, and for every piece of a streamed one.

Promise: pure functions of texts and counts, so that the form can be tested without a server.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from eagle3core import Response, TokenLogprob

if TYPE_CHECKING:
    from eagle3core.chat import ChatAnswers, Part
    from lab.serve.service import Piece

DONE = b"data: [DONE]\n\n"
# An answer that an end token ended and one that a stop text ended are one to OpenAI's clients.
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Form(ABC):
    """How one request is answered.

    Args:
        model: the name that is served. token_text: of one token by itself. includes_usage: a stream ends with what it
            took.
    """

    prefix: str
    whole_object: str
    piece_object: str

    def __init__(self, model: str, token_text: Callable[[int], str], *, includes_usage: bool = False) -> None:
        self.token_text = token_text
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.includes_usage = includes_usage

    def whole(self, responses: Sequence[Response]) -> dict[str, Any]:
        """The answer to one request, a choice a prompt."""
        choices = [
            {"index": i, **self.choice(response), "finish_reason": REASONS[response.finish_reason],
             "logprobs": None if response.logprobs is None else self.logprobs(response.logprobs, 0)}
            for i, response in enumerate(responses)
        ]  # fmt: skip
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage_of(responses)}

    @abstractmethod
    def choice(self, response: Response) -> dict[str, Any]:
        """What is a whole answer's own."""

    @abstractmethod
    def delta(self, piece: Piece, *, is_first: bool) -> list[dict[str, Any]]:
        """What is new of an answer, a choice an event; `is_first`: none of it has come before."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenLogprob], n_letters: int) -> dict[str, Any]:
        """Log-probabilities of tokens, whose text follows `n_letters` of the tokens before."""

    def piece(self, piece: Piece, n_letters: int, *, is_first: bool) -> bytes:
        """The events of a piece: log-probabilities with the first of them, why the answer ended with the last.

        Args:
            n_letters: of the tokens before. is_first: none of the answer has come before.
        """
        told = self.logprobs(piece.logprobs, n_letters) if piece.logprobs else None
        finish = None if piece.response is None else REASONS[piece.response.finish_reason]
        choices = [
            {"index": piece.place, **delta, "logprobs": None, "finish_reason": None}
            for delta in self.delta(piece, is_first=is_first)
        ]
        choices[0]["logprobs"], choices[-1]["finish_reason"] = told, finish
        return b"".join(self._event([choice], {"usage": None}) for choice in choices)

    def letters_of(self, tokens: Sequence[TokenLogprob]) -> int:
        """Letters of tokens, each by itself."""
        return sum(len(self.token_text(token.token_id)) for token in tokens)

    def usage(self, responses: Sequence[Response]) -> bytes:
        """The event with the tokens of all pieces."""
        return self._event([], {"usage": usage_of(responses)})

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        counted = usage if self.includes_usage else {}
        return event({**self._head, "object": self.piece_object, "choices": choices, **counted})


class CompletionForm(Form):
    """Of /v1/completions."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def choice(self, response: Response) -> dict[str, Any]:
        """The text."""
        return {"text": response.text}

    def delta(self, piece: Piece, *, is_first: bool) -> list[dict[str, Any]]:
        """The text that is new."""
        return [{"text": piece.text}]

    def logprobs(self, tokens: Sequence[TokenLogprob], n_letters: int) -> dict[str, Any]:
        """Lists of equal length, an entry a token; likeliest tokens by their text."""
        texts = [self.token_text(token.token_id) for token in tokens]
        starts = accumulate(map(len, texts[:-1]), initial=n_letters)
        top = [{self.token_text(i): value for i, value in reversed(token.top)} for token in tokens]
        values = [token.logprob for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": list(starts)}


class ChatForm(Form):
    """Of /v1/chat/completions."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, response: Response) -> dict[str, Any]:
        """The assistant's message."""
        return {"message": {"role": "assistant", "content": response.text}}

    def delta(self, piece: Piece, *, is_first: bool) -> list[dict[str, Any]]:
        """What is new of it; the role comes with the first piece, and the last is empty."""
        first, *others = self.changes(piece)
        if is_first:
            first = {"role": "assistant", "content": "", **first}
        return [{"delta": change} for change in (first, *others)]

    def changes(self, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to the message, at least one change, which may be none."""
        return [{"content": piece.text} if piece.text else {}]

    def logprobs(self, tokens: Sequence[TokenLogprob], n_letters: int) -> dict[str, Any]:
        """An entry a token, with its likeliest ones in it."""
        entries = [
            {**self._entry(token.token_id, token.logprob), "top_logprobs": [self._entry(*one) for one in token.top]}
            for token in tokens
        ]
        return {"content": entries}

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        text = self.token_text(token_id)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


class ChannelForm(ChatForm):
    """Of /v1/chat/completions for a target whose answers are messages in channels: what it thought has a field of its
    own, as vLLM's servers give it, and so have calls of tools.

    Args:
        answers: reads them. words: stop words of the request. Others: as of `Form`.
    """

    def __init__(
        self, model: str, token_text: Callable[[int], str], answers: ChatAnswers, words: Sequence[str], **given: bool
    ) -> None:
        super().__init__(model, token_text, **given)
        self._answers, self._words = answers, words
        self._parts = answers.begin(words)  # of the one answer that a chat has
        self._n_calls = 0

    def choice(self, response: Response) -> dict[str, Any]:
        """The assistant's message."""
        answer = self._answers.read(response.token_ids, response.text, self._words)
        message: dict[str, Any] = {
            "role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning
        }  # fmt: skip
        if answer.calls:
            message["tool_calls"] = [_call(i, *call) for i, call in enumerate(answer.calls)]
        return {"message": message}

    def changes(self, piece: Piece) -> list[dict[str, Any]]:
        """What is new, a delta for each part of a channel."""
        parts = self._parts.more(piece.token_ids)
        parts += self._parts.rest() if piece.response is not None else []
        return [self._change(part) for part in parts] or [{}]

    def _change(self, part: Part) -> dict[str, Any]:
        if part.kind != "call":
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        self._n_calls += part.begins
        index = self._n_calls - 1
        if part.begins:
            return {"tool_calls": [{"index": index, **_call(index, part.recipient, part.text)}]}
        return {"tool_calls": [{"index": index, "function": {"arguments": part.text}}]}


def _call(index: int, recipient: str, arguments: str) -> dict[str, Any]:
    name = recipient.removeprefix("functions.")
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_of(responses: Sequence[Response]) -> dict[str, int]:
    """Tokens of prompts and answers."""
    n_prompt = sum(response.n_prompt_tokens for response in responses)
    n_new = sum(len(response.token_ids) for response in responses)
    return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}


def models(name: str, session_len: int, created: int) -> dict[str, Any]:
    """The list of models, which has one entry."""
    model = {"id": name, "object": "model", "created": created, "owned_by": "eagle3lab", "max_model_len": session_len}
    return {"object": "list", "data": [model]}
