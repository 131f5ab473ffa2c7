"""Answers of a target as its chat format means them, from tokens: whole, or in parts as they come.

Marks are told by their ids, so that a text that only looks like one is text. A tokenizer whose template writes none of
them answers in plain text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from eagle3core.batching import TextPieces
from eagle3core.chat.harmony import CHANNEL, END, MARKS, MESSAGE, START, ChatAnswer, HarmonyReader, Part, collected
from eagle3core.request import detokenize
from eagle3core.stop import text_before

log = logging.getLogger("eagle3core")


class ChatAnswers:
    """Reads answers of one target.

    Args:
        tokenizer: of Hugging Face's, or one that only decodes. parses: False leaves all answers plain text.

    Attributes:
        n_plain: answers so far that broke their format, and were given back as plain text from there on.
    """

    def __init__(self, tokenizer: Any, *, parses: bool = True) -> None:
        self.tokenizer, self.n_plain = tokenizer, 0
        self.marks = _marks_of(tokenizer) if parses else {}

    @property
    def has_channels(self) -> bool:
        """Whether answers are messages in channels."""
        return bool(self.marks)

    def read(self, token_ids: Sequence[int], text: str, words: Sequence[str] = ()) -> ChatAnswer:
        """A whole answer.

        Args:
            token_ids: of it, an end token included. text: of it as it is, for a target whose answers are plain text.
            words: stop words of the request.
        """
        if not self.has_channels:
            return ChatAnswer(text)
        parts = self.begin(words)
        return collected(parts.more(token_ids) + parts.rest(), parts.fault)

    def begin(self, words: Sequence[str] = ()) -> AnswerParts:
        """The reader of an answer whose tokens come one after the other."""
        return AnswerParts(self, words)

    def count_fault(self, fault: str) -> None:
        """Count an answer that broke its format, and say why."""
        self.n_plain += 1
        log.warning("an answer breaks the chat format (%s): it is plain text from there on", fault)


class AnswerParts:
    """Parts of one answer with channels, as its tokens come.

    Args:
        answers: whose format it is. words: stop words of the request.
    """

    def __init__(self, answers: ChatAnswers, words: Sequence[str]) -> None:
        self._answers, self._words = answers, words
        self._reader = HarmonyReader()
        self._begin_text()

    @property
    def fault(self) -> str:
        """Why the answer is plain text from some place on; empty where it is not."""
        return self._reader.fault

    def more(self, token_ids: Sequence[int]) -> list[Part]:
        """The parts that further tokens give, as far as they are settled."""
        parts, was_whole = list[Part](), not self.fault
        for token in token_ids:
            mark = self._answers.marks.get(token)
            if mark is None:
                self._token_ids.append(token)
            else:
                parts += self._rest_of_text() + self._reader.mark(mark)
        parts += self._reader.text(self._pieces.more(self._token_ids))
        self._count(was_whole)
        return parts

    def rest(self) -> list[Part]:
        """The last parts, of an answer that has ended."""
        was_whole = not self.fault
        parts = self._rest_of_text() + self._reader.end()
        self._count(was_whole)
        return parts

    def _begin_text(self) -> None:
        self._token_ids: list[int] = []
        self._pieces = TextPieces(lambda ids: detokenize(self._answers.tokenizer, ids), self._words)

    def _rest_of_text(self) -> list[Part]:
        """What is left of the text between two marks."""
        text = text_before(detokenize(self._answers.tokenizer, self._token_ids), self._words)
        parts = self._reader.text(self._pieces.rest(text))
        self._begin_text()
        return parts

    def _count(self, was_whole: bool) -> None:
        if was_whole and self.fault:
            self._answers.count_fault(self.fault)


def _marks_of(tokenizer: Any) -> dict[int, str]:
    """Marks by id; none for a tokenizer whose template writes no channels."""
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, dict) else [template]
    if not any(isinstance(text, str) and CHANNEL in text and MESSAGE in text for text in texts):
        return {}
    vocabulary = tokenizer.get_vocab()
    if not {START, CHANNEL, MESSAGE, END} <= vocabulary.keys():
        return {}
    return {int(vocabulary[mark]): mark for mark in MARKS if mark in vocabulary}
