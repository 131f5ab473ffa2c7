"""Answers in gpt-oss's chat format: messages in channels, marked by special tokens, read as they come.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A header names a role, a channel and perhaps whom a call is to; behind `<|message|>` stands the message. Models break
the format now and then: what cannot be read as it is given back as plain text from there on, and nothing is raised.
Promise: however a text is divided, its parts together are the same. Source: OpenAI's page of the harmony format;
docs/requirements.md R-80.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
ROLE, TO = "assistant", "to="
MOST_HEADER = 300  # letters; a header has a role, a channel, a recipient and a type
Kind = Literal["content", "reasoning", "call"]
_KINDS: dict[str, Kind] = {"analysis": "reasoning", "commentary": "content", "final": "content"}
_MARK = re.compile("|".join(map(re.escape, MARKS)))


class Part(NamedTuple):
    """Text of an answer: what the user is told, what the model thought, or the arguments of a call to `recipient`.

    `begins`: it is the first part of its message.
    """

    kind: Kind
    text: str
    recipient: str = ""
    begins: bool = False


@dataclass(frozen=True)
class ChatAnswer:
    """An answer, taken apart.

    Attributes:
        content: what the user is told. reasoning: what the model thought; empty where the format has no such channel.
        calls: (recipient, arguments) of each call of a tool.
        fault: why it was read as plain text, from the fault on; empty where it was not.
    """

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    fault: str = ""


class HarmonyReader:
    """Reads the marks and texts of one answer, which begins behind `<|start|>assistant`.

    Attributes:
        fault: why all that follows is plain text; empty as long as the format holds.
    """

    def __init__(self) -> None:
        self.fault = ""
        self._held: list[str] = []  # of a header, or between messages: its marks, and texts between them
        self._place: Literal["header", "message", "between", "over"] = "header"
        self._current = Part("content", "")
        self._has_message = self._begins = False

    def mark(self, mark: str) -> list[Part]:
        """The parts that a mark lets out: none, unless it breaks the format."""
        if self.fault:
            return []
        if self._place == "header" and mark in (CHANNEL, CONSTRAIN, MESSAGE):
            return self._message() if mark == MESSAGE else self._hold(mark)
        if mark == START and self._place in ("message", "between"):
            self._place, self._held = "header", []
        elif mark in (END, RETURN, CALL) and self._place in ("message", "between"):
            self._place, self._held = "between" if mark == END else "over", []
        else:
            return self._broken(f"{mark} {_WHERE[self._place]}")
        return []

    def text(self, text: str) -> list[Part]:
        """The parts that a text lets out: itself in a message, none in a header."""
        if not text:
            return []
        if self.fault:
            return [Part("content", text)]
        if self._place == "message":
            part = self._current._replace(text=text, begins=self._begins)
            self._begins = False
            return [part]
        if self._place == "header":
            return self._hold(text)
        self._held.append(text)
        return self._broken(f"text {_WHERE[self._place]}") if text.strip() else []

    def end(self) -> list[Part]:
        """The parts that were held when the answer ended; a header that was cut off is left out."""
        if self.fault or self._place != "header" or self._has_message or not any(map(str.strip, self._texts())):
            return []
        return self._broken("no message") if CHANNEL not in self._held else []

    def _hold(self, piece: str) -> list[Part]:
        self._held.append(piece)
        fault = _header_fault(self._held, is_whole=False)
        return self._broken(fault) if fault else []

    def _message(self) -> list[Part]:
        """A message begins, if its header is one."""
        fault = _header_fault(self._held, is_whole=True)
        if fault:
            return self._broken(fault)
        words = "".join(" " if piece in MARKS else piece for piece in self._held).split()
        recipient = next((word.removeprefix(TO) for word in words if word.startswith(TO)), "")
        channel = next((word for word in words if word in _KINDS), "final")
        self._current = Part("call" if recipient else _KINDS[channel], "", recipient)
        self._place, self._held, self._has_message, self._begins = "message", [], True, True
        return []

    def _texts(self) -> list[str]:
        return [piece for piece in self._held if piece not in MARKS]

    def _broken(self, fault: str) -> list[Part]:
        """From here on all is plain text, beginning with what was held."""
        self.fault, text = fault, "".join(self._texts())
        return [Part("content", text)] if text else []


_WHERE = {
    "header": "in a header",
    "message": "in a message",
    "between": "between messages",
    "over": "behind the last message",
}


def _header_fault(held: list[str], *, is_whole: bool) -> str:
    """Why these marks and texts are no header, or not the beginning of one; empty where they are."""
    marks = [piece for piece in held if piece in MARKS]
    if marks not in ([], [CHANNEL], [CONSTRAIN], [CHANNEL, CONSTRAIN]):
        return f"{marks[-1]} {_WHERE['header']}"
    texts = [""]
    for piece in held:
        if piece in MARKS:
            texts.append("")
        else:
            texts[-1] += piece
    if sum(map(len, texts)) > MOST_HEADER:
        return f"a header of more than {MOST_HEADER} letters"
    rules = dict(zip(["", *marks], texts, strict=True))
    for mark, text in rules.items():
        is_open = not is_whole and mark == (marks[-1] if marks else "") and not text[-1:].isspace()
        words = text.split()
        for i, word in enumerate(words):
            if not _is_word(mark, i, word, is_cut=is_open and i == len(words) - 1):
                return f"{word[:40]!r} {_WHERE['header']}"
        if is_whole and mark == CHANNEL and not words:
            return "a channel without a name"
    return ""


def _is_word(mark: str, place: int, word: str, *, is_cut: bool) -> bool:
    """Whether a header may have this word there; `is_cut`: more of it may come."""
    if word.startswith(TO) or (is_cut and TO.startswith(word)):
        return mark != CONSTRAIN
    if mark == "":
        return place == 0 and (word == ROLE or (is_cut and ROLE.startswith(word)))
    if mark == CHANNEL and place == 0:
        return word in _KINDS or (is_cut and any(name.startswith(word) for name in _KINDS))
    return place <= 2  # the type of what follows: behind its mark, or behind channel and recipient


def collected(parts: Iterable[Part], fault: str) -> ChatAnswer:
    """An answer of its parts."""
    texts: dict[Kind, str] = {"content": "", "reasoning": ""}
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.kind != "call":
            texts[part.kind] += part.text
        elif part.begins:
            calls.append((part.recipient, part.text))
        else:
            calls[-1] = (part.recipient, calls[-1][1] + part.text)
    return ChatAnswer(texts["content"], texts["reasoning"], tuple(calls), fault)


def read_harmony(text: str) -> ChatAnswer:
    """An answer whose marks stand in its text."""
    reader, parts, at = HarmonyReader(), list[Part](), 0
    for found in _MARK.finditer(text):
        parts += reader.text(text[at : found.start()]) + reader.mark(found[0])
        at = found.end()
    parts += reader.text(text[at:]) + reader.end()
    return collected(parts, reader.fault)
