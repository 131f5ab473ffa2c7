"""How often each of the target's tokens occurs: in files of text, in prompt sets, in what the target answers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
import numpy.typing as npt

from lab.errors import ExperimentError

if TYPE_CHECKING:
    from eagle3core.chat import ChatWriter
    from lab.pairs.prompts import Prompt
    from lab.parity.recording import PairUnderTest

STDIN = "-"
_PIECE_LETTERS = 1 << 16  # of a text that is tokenised at once; cut where a line ends, or in a line that is longer
_BATCH = 8  # requests decoded together


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a target's tokens.

    Attributes:
        counts: `[V]` int64, by target id.
        source: what was counted, in words.
        otherwise: counts that rank what these leave equal, or have not seen; None ranks it by number, or not at all.
    """

    counts: npt.NDArray[np.int64]
    source: str
    otherwise: TokenCounts | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens counted."""
        return int(self.counts.sum())

    @property
    def n_distinct(self) -> int:
        """Ids that occurred, here or `otherwise`."""
        return len(self.by_frequency(range(len(self.counts))))

    def by_frequency(self, among: Collection[int]) -> list[int]:
        """Those of `among` that occurred, here or `otherwise`, the most frequent first, equals by their number."""
        ids = np.array(sorted(among), dtype=np.int64)
        second = np.zeros_like(self.counts) if self.otherwise is None else self.otherwise.counts
        ids = ids[self.counts[ids] + second[ids] > 0]
        return [int(i) for i in ids[np.lexsort((ids, -second[ids], -self.counts[ids]))]]

    def coverage(self, ids: Collection[int]) -> float:
        """The share of what was counted that is one of `ids`, 0..1."""
        return float(self.counts[sorted(ids)].sum() / max(1, self.n_tokens))


def count_ids(sequences: Iterable[Sequence[int]], vocab: int, source: str) -> TokenCounts:
    """Counts of token ids.

    Args:
        vocab: the target's vocabulary. source: what they are of, in words.

    Raises:
        ExperimentError: an id outside the target's vocabulary, or no token at all.
    """
    counts = np.zeros(vocab, dtype=np.int64)
    for ids in sequences:
        if ids and max(ids) >= vocab:
            raise ExperimentError(
                f"the tokenizer gives token {max(ids)}, the target has {vocab}", f"ids of 0 to {vocab - 1}",
                "take the tokenizer that belongs to the target",
            )  # fmt: skip
        counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=vocab)
    if not counts.any():
        raise ExperimentError(f"there is no token to count in {source}", "text of one token or more", "give more text")
    return TokenCounts(counts, source)


def count_files(paths: Sequence[str], chats: ChatWriter, vocab: int) -> TokenCounts:
    """Counts of files of plain text, read a piece at a time; `-` is the standard input.

    Raises:
        ExperimentError: a file that is not there or no UTF-8; as `count_ids`.
    """
    words = ", ".join("standard input" if path == STDIN else Path(path).name for path in paths)
    pieces = (piece for path in paths for piece in _pieces(path))
    return count_ids((chats.text_ids(piece, with_specials=False) for piece in pieces), vocab, words)


def count_prompts(prompts: Sequence[Prompt], vocab: int, source: str) -> TokenCounts:
    """Counts of prompts, chats as the template writes them.

    Raises:
        ExperimentError: as `count_ids`.
    """
    return count_ids((list(prompt.ids) for prompt in prompts), vocab, source)


def count_answers(pair: PairUnderTest, prompts: Sequence[Prompt], n_tokens: int, vocab: int) -> TokenCounts:
    """Counts of what the target itself answers greedily, `n_tokens` tokens a prompt or fewer: what drafts are for.

    Loops are left out: a small model says the same again and again, and any vocabulary would be of those few tokens.

    Raises:
        ExperimentError: as `count_ids`.
    """
    from lab.acceptance.loops import looped_tokens
    from lab.acceptance.turns import plain_answers

    answers = [list(answer.token_ids) for answer in plain_answers(pair, prompts, n_tokens, _BATCH)]
    loops = [looped_tokens(prompt.ids, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    fresh = (
        [token for token, is_looped in zip(answer, loop, strict=True) if not is_looped]
        for answer, loop in zip(answers, loops, strict=True)
    )
    n_looped = sum(map(sum, loops))
    loops_told = f", {n_looped} looped ones left out" if n_looped else ""
    words = f"the target's answers to {len(prompts)} prompts, of at most {n_tokens} tokens{loops_told}"
    return count_ids(fresh, vocab, words)


def _pieces(path: str) -> Iterator[str]:
    if path == STDIN:
        yield from _read(sys.stdin, "standard input")
        return
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            yield from _read(file, Path(path).name)
    except OSError as reason:
        raise ExperimentError(
            f"{Path(path).name} cannot be read: {reason.strerror}", "files of UTF-8 text, or - for the standard input",
            "correct --text",
        ) from reason  # fmt: skip


def _read(file: TextIO, name: str) -> Iterator[str]:
    """Whole lines, as many as make a piece; a line that is longer than one is cut."""
    try:
        while lines := file.readlines(_PIECE_LETTERS):
            text = "".join(lines)
            yield from (text[at : at + _PIECE_LETTERS] for at in range(0, len(text), _PIECE_LETTERS))
    except UnicodeDecodeError as reason:
        raise ExperimentError(
            f"{name} is no UTF-8 text: {reason.reason} at byte {reason.start}", "files of UTF-8 text",
            "convert it, or read prompt sets with --prompts",
        ) from reason  # fmt: skip
