"""When a request ends, decided token by token so that speculation cannot change it (docs/requirements.md R-75)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from eagle3core.config import GenerationConfig

FinishReason = Literal["eos", "stop", "length", "error", "cancelled"]
Detokenize = Callable[[list[int]], str]


class StopCriteria:
    """Reads a request's tokens one after the other and says when it is finished.

    Args:
        generation: the request's limits.
        eos_token_ids: the model's own end tokens.
        room: tokens the session still holds after the prompt.
        detokenize: ids to text; needed for stop words only.

    Attributes:
        limit: tokens the request may get.
    """

    def __init__(
        self,
        generation: GenerationConfig,
        eos_token_ids: tuple[int, ...],
        room: int,
        detokenize: Detokenize | None,
    ) -> None:
        self._eos = () if generation.ignore_eos else eos_token_ids
        self._stop_ids = generation.stop_token_ids
        self._stop_words = generation.stop_words
        self.limit = min(generation.max_new_tokens, room)
        self._detokenize = detokenize

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end the request by themselves."""
        return tuple(dict.fromkeys((*self._eos, *self._stop_ids)))

    def check(self, tokens: list[int]) -> FinishReason | None:
        """Why the request ends with the last of `tokens` (generated so far), or None to go on."""
        if tokens[-1] in self._eos:
            return "eos"
        if tokens[-1] in self._stop_ids or self._ends_in_stop_word(tokens):
            return "stop"
        return "length" if len(tokens) >= self.limit else None

    @property
    def words(self) -> tuple[str, ...]:
        """Strings that end the request."""
        return self._stop_words

    def cut(self, text: str) -> str:
        """`text` up to the first stop word."""
        return text_before(text, self._stop_words)

    def _ends_in_stop_word(self, tokens: list[int]) -> bool:
        if not self._stop_words or self._detokenize is None:
            return False
        longest = max(map(len, self._stop_words))
        n = 4 * longest + 4  # enough where every token adds a byte: a character has at most four
        while True:
            tail = tokens[-n:]
            text = self._detokenize(tail)
            if any(word in text for word in self._stop_words):
                return True
            # Special tokens add nothing, so a word may begin further back than it looks. Before its last token the tail
            # has to hold a whole word, and up to three pieces of a character that it begins in the middle of.
            if n >= len(tokens) or len(self._detokenize(tail[:-1])) > longest + 3:
                return False
            n *= 2


def text_before(text: str, words: Sequence[str]) -> str:
    """`text` up to the first of these words."""
    found = [at for at in (text.find(word) for word in words) if at >= 0]
    return text[: min(found)] if found else text
