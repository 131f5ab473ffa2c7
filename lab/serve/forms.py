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
from typing import Any

from eagle3core import Response, TokenLogprob

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
    def delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """What is new of an answer; `is_first`: none of it has come before."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenLogprob], n_letters: int) -> dict[str, Any]:
        """Log-probabilities of tokens, whose text follows `n_letters` of the tokens before."""

    def piece(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenLogprob],
        n_letters: int,
        *,
        is_first: bool,
        reason: str | None,
    ) -> bytes:
        """The event of a piece of the answer to prompt number `index`; reason: why it ended, with the last one."""
        told = self.logprobs(tokens, n_letters) if tokens else None
        finish = None if reason is None else REASONS[reason]
        choice = {"index": index, **self.delta(text, is_first=is_first), "logprobs": told, "finish_reason": finish}
        return self._event([choice], {"usage": None})

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

    def delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The text that is new."""
        return {"text": text}

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

    def delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """What is new of it; the role comes with the first piece, and the last is empty."""
        role = {"role": "assistant"} if is_first else {}
        content = {"content": text} if text or is_first else {}
        return {"delta": {**role, **content}}

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
