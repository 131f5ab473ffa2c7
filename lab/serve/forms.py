"""What a client gets: OpenAI's JSON for a whole answer, and for every piece of a streamed one.

Promise: pure functions of texts and counts, so that the form can be tested without a server.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from eagle3core import Response

DONE = b"data: [DONE]\n\n"
# An answer that an end token ended and one that a stop text ended are one to OpenAI's clients.
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Form(ABC):
    """How one request is answered.

    Args:
        model: the name that is served. includes_usage: a stream ends with its tokens.
    """

    prefix: str
    whole_object: str
    piece_object: str

    def __init__(self, model: str, *, includes_usage: bool = False) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.includes_usage = includes_usage

    def whole(self, responses: Sequence[Response]) -> dict[str, Any]:
        """The answer to one request, a choice a prompt."""
        choices = [self.choice(i, response) for i, response in enumerate(responses)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage_of(responses)}

    @abstractmethod
    def choice(self, index: int, response: Response) -> dict[str, Any]:
        """A whole answer to prompt number `index`."""

    @abstractmethod
    def delta(self, index: int, text: str, *, is_first: bool, reason: str | None) -> dict[str, Any]:
        """A piece of it; `is_first`: none of it has come before. reason: why it ended, with the last piece."""

    def piece(self, index: int, text: str, *, is_first: bool, reason: str | None = None) -> bytes:
        """The event of a piece."""
        finish = None if reason is None else REASONS[reason]
        return self._event([self.delta(index, text, is_first=is_first, reason=finish)], {"usage": None})

    def usage(self, responses: Sequence[Response]) -> bytes:
        """The event with the tokens of all pieces."""
        return self._event([], {"usage": usage_of(responses)})

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        counted = usage if self.includes_usage else {}
        return event({**self._head, "object": self.piece_object, "choices": choices, **counted})


class CompletionForm(Form):
    """Of /v1/completions."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, response: Response) -> dict[str, Any]:
        """The text."""
        return _choice(index, REASONS[response.finish_reason], text=response.text)

    def delta(self, index: int, text: str, *, is_first: bool, reason: str | None) -> dict[str, Any]:
        """The text that is new."""
        return _choice(index, reason, text=text)


class ChatForm(Form):
    """Of /v1/chat/completions."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, response: Response) -> dict[str, Any]:
        """The assistant's message."""
        message = {"role": "assistant", "content": response.text}
        return _choice(index, REASONS[response.finish_reason], message=message)

    def delta(self, index: int, text: str, *, is_first: bool, reason: str | None) -> dict[str, Any]:
        """What is new of it; the role comes with the first piece, and the last is empty."""
        role = {"role": "assistant"} if is_first else {}
        content = {"content": text} if text or is_first else {}
        return _choice(index, reason, delta={**role, **content})


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


def _choice(index: int, reason: str | None, **what: Any) -> dict[str, Any]:
    return {"index": index, **what, "logprobs": None, "finish_reason": reason}
