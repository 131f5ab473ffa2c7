"""The lists of frequencies that a notebook holds against each other, and why one is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle3core.chat import ChatWriter
from lab.pairs.prompts import Prompt
from lab.parity.recording import PairUnderTest
from lab.training.corpus import read_stdlib
from lab.vocabulary.choose import Candidates
from lab.vocabulary.counts import TokenCounts, count_answers, count_files, count_ids

ANSWERS, TEXT = "its own answers", "a text"


@dataclass(frozen=True)
class Sources:
    """Attributes:
    lists: counts by name. missing: names of lists that could not be made, each with the reason.
    """

    lists: dict[str, TokenCounts]
    missing: dict[str, str]


def read_sources(
    pair: PairUnderTest, candidates: Candidates, others: Sequence[Prompt], *, n_tokens: int, text: str, max_letters: int
) -> Sources:
    """Counts of a text, and of the target's own answers to prompts, which the text's rank where they say nothing.

    Args:
        others: prompts whose answers are counted, of at most `n_tokens` tokens; none of those that are measured.
        text: a file; empty takes the standard library's source, of which `max_letters` letters are counted.

    Raises:
        ExperimentError: a file that cannot be read.
    """
    lists, missing = dict[str, TokenCounts](), dict[str, str]()
    if candidates.chats is None:
        missing[TEXT] = "the target has no tokenizer to read a text with"
    elif text:
        lists[TEXT] = count_files([text], candidates.chats, candidates.vocab)
    else:
        lists[TEXT] = _count_stdlib(candidates.chats, candidates.vocab, max_letters)
    if others:
        answers = count_answers(pair, others, n_tokens, candidates.vocab)
        lists[ANSWERS] = replace(answers, otherwise=lists.get(TEXT))
    else:
        missing[ANSWERS] = "there are no prompts beside those that are measured"
    return Sources(lists, missing)


def _count_stdlib(chats: ChatWriter, vocab: int, max_letters: int) -> TokenCounts:
    """Counts of the standard library's source, modules that the shipped pair's prompts come from left out."""
    corpus, left, texts = read_stdlib(), max_letters, []
    for document in corpus.split("training"):
        texts.append(document.text[:left])
        left -= len(texts[-1])
        if not left:
            break
    words = f"{len(texts)} modules of Python {corpus.python}'s standard library"
    return count_ids((chats.text_ids(text, with_specials=False) for text in texts), vocab, words)
