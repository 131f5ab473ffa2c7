"""The side that asks: a chat is sent to the process that writes it out, and its text comes back, or a refusal."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from eagle3core.errors import ConfigError, shown

Message: TypeAlias = Mapping[str, Any]

MOST_CPU_S = 5
MOST_BYTES = 256 << 20  # beyond what Python and jinja2 take
MOST_WALL_S = 60.0
MOST_TEMPLATE_LETTERS = 1 << 20
# What a template may write: its own part, and each letter of the chat a few times.
OWN_LETTERS, TIMES_THE_CHAT = 1 << 20, 4
_PROGRAM = Path(__file__).with_name("template_process.py")
_LIMITS = f"{MOST_CPU_S} s of processor time, {MOST_BYTES >> 20} MiB of memory"


class ChatWriter:
    """Chats to token ids by a tokenizer and its chat template; its process begins with the first chat.

    Args:
        tokenizer: of Hugging Face's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._process = _Process()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template at all."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    def ids(self, messages: Sequence[Message], settings: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a chat, ending where the assistant is to begin.

        Args:
            settings: further variables for the template, as gpt-oss's `reasoning_effort`; one that it does not know
                changes nothing.

        Raises:
            ConfigError: there is no template, or it refuses this chat, or asks for more than it may.
        """
        return self._encoded(self.text(messages, settings), add_special_tokens=False)

    def text_ids(self, text: str, *, with_specials: bool = True) -> list[int]:
        """Token ids of a text as it is; `with_specials`: with what the tokenizer puts around a text.

        Raises:
            ConfigError: half a letter, or whatever else the tokenizer refuses.
        """
        # A text that is not for the model may be longer than what the model reads; the engine says so of a prompt.
        settings = {} if with_specials else {"add_special_tokens": False, "verbose": False}
        return self._encoded(text, **settings)

    def _encoded(self, text: str, **settings: bool) -> list[int]:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(
                f"half a letter (a lone surrogate) in the text {shown(text, 100)}",
                "whole letters, as UTF-8 has them",
                "correct the text, or read it as UTF-8",
            )
        try:
            return list(self.tokenizer(text, **settings)["input_ids"])
        except BaseException as error:
            # What its files make of a text is the tokenizer's own; the one in Rust panics past Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(
                f"the tokenizer cannot read a text: {type(error).__name__}: {str(error)[:300]}",
                "texts that this tokenizer has tokens for",
                "check tokenizer.json and tokenizer_config.json, or correct the text",
            ) from error

    def text(self, messages: Sequence[Message], settings: Mapping[str, Any] | None = None) -> str:
        """The chat as the template writes it.

        Args:
            settings: as of `ids`.

        Raises:
            ConfigError: as `ids`.
        """
        template = self._template()
        chat = [dict(message) for message in messages]
        own = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": True}
        variables = {**(settings or {}), **own}
        try:
            letters = len(json.dumps(chat, ensure_ascii=False))
            most = OWN_LETTERS + TIMES_THE_CHAT * letters
            request = {
                "template": template,
                "variables": {**variables, **self.tokenizer.special_tokens_map},
                "most_letters": most,
            }
            line = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as reason:
            raise ConfigError(
                f"a chat holds what is no JSON: {reason}", "texts, numbers, lists and mappings of them", "correct it"
            ) from reason
        return self._process.text(line)

    def _template(self) -> str:
        if not self.has_template:
            raise ConfigError(
                "a chat prompt for a tokenizer without a chat template",
                "plain texts with this tokenizer",
                "give a text, or add chat_template to tokenizer_config.json",
            )
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        if not isinstance(template, str) or len(template) > MOST_TEMPLATE_LETTERS:
            what = f"has {len(template)} letters" if isinstance(template, str) else f"is a {type(template).__name__}"
            raise ConfigError(
                f"the tokenizer's chat template {what}",
                f"a text of up to {MOST_TEMPLATE_LETTERS} letters, or several of which one is called default",
                "correct chat_template in tokenizer_config.json, or chat_template.jinja",
            )
        return template


class _Process:
    """The process, begun when it is needed, and begun again after it was ended."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._turn = Lock()

    def text(self, request: bytes) -> str:
        """What comes back for a request.

        Raises:
            ConfigError: an error of the template's, or more time or memory than it may take.
        """
        with self._turn:
            reply = self._reply(request)
        if "text" in reply:
            return str(reply["text"])
        raise ConfigError(
            f"the tokenizer's chat template refuses this chat: {reply['error']}",
            f"roles and turns that the template knows, written within {_LIMITS}",
            "correct the chat, or give the text as the model expects it",
        )

    def _reply(self, request: bytes) -> dict[str, Any]:
        process = self._running or self._begun()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + b"\n")
            process.stdin.flush()
            line = _line(process.stdout.fileno(), MOST_WALL_S)
        except BrokenPipeError:
            line = b""
        if line:
            return dict(json.loads(line))
        code = self._ended(process)
        return {"error": f"it took more than {_LIMITS} (its process ended with {code})"}

    def _begun(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", str(_PROGRAM), str(MOST_CPU_S), str(MOST_BYTES)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=_PROGRAM.parent
        )
        self._running, self._end = process, weakref.finalize(self, _stop, process)
        return process

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        assert self._end is not None
        self._end()
        self._running = None
        return process.returncode


def _line(file: int, most_s: float) -> bytes:
    """A line, or nothing if the writer ends, or takes too long."""
    parts: list[bytes] = []
    deadline = time.monotonic() + most_s
    while not parts or not parts[-1].endswith(b"\n"):
        ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(file, 1 << 20) if ready else b""
        if not part:
            return b""
        parts.append(part)
    return b"".join(parts)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its pipes, whatever it is doing."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what was not written yet has no reader any more
                pipe.close()
    process.wait()
