"""Prompts as token ids: of a file, of the shipped pair, or random ones for a target without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from lab.errors import ExperimentError
from lab.pairs.prompt_file import NO_CATEGORY, Message, Written, read_prompt_file, refused_prompt

if TYPE_CHECKING:
    from eagle3core.chat import ChatWriter

# One block of 64 to its end, two prefill chunks of 512, one token more than either, the shortest, and some between.
UNEVEN_LENGTHS = (64, 577, 1, 200, 513, 23, 130, 65)
UNEVEN_SEED = 13


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: tokens, the template's included.
        text: the text, or the last user message of a chat.
        category: for reports by category.
        id: the file's own, else the line number.
        chat: the messages it was made of; empty for a text.
        later: further user turns (MT-bench's second), for `next_turn`. turn: which of its user turns it asks, from 1.
    """

    ids: tuple[int, ...]
    text: str
    category: str = NO_CATEGORY
    id: str = ""
    chat: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    turn: int = 1


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a file. `skipped`: by reason, how many of its entries hold no question; in words `skipped_words`."""

    prompts: list[Prompt]
    skipped: dict[str, int]
    skipped_words: str


def load_prompts(
    path: str | Path, tokenizer: Any, *, limit: int | None = None, chat_template: str = ""
) -> list[Prompt]:
    """The prompts of `load_prompt_set`."""
    return load_prompt_set(path, tokenizer, limit=limit, chat_template=chat_template).prompts


def load_prompt_set(
    path: str | Path, tokenizer: Any, *, limit: int | None = None, chat_template: str = ""
) -> PromptSet:
    """Prompts of a file, in its order, and what was skipped.

    Args:
        path: as `prompt_file` describes it.
        tokenizer: a Hugging Face tokenizer of the target.
        limit: read at most so many; None reads all.
        chat_template: Jinja, or a file of it, for a tokenizer that has none (Vicuna's, base models').

    Raises:
        ExperimentError: no such file, no prompt in it, or an entry that is no prompt, with its number; a template
            beside the tokenizer's own.
    """
    found, chats = read_prompt_file(Path(path), limit=limit), _writer(tokenizer, chat_template)
    return PromptSet([_prompt(written, chats) for written in found.prompts], found.skipped, found.skipped_words)


def next_turn(prompt: Prompt, answer: str, tokenizer: Any, *, chat_template: str = "") -> Prompt:
    """The next turn of a prompt that has `later` ones, after the model's own answer to it.

    Raises:
        ExperimentError: there is no later turn, or the template refuses the chat.
    """
    if not prompt.later:
        raise refused_prompt(f"prompt {prompt.id}", "has no further turn", "ask for turns of MT-bench's form")
    question, *later = prompt.later
    chat = [*prompt.chat, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    written = Written(f"prompt {prompt.id}", chat, prompt.category, prompt.id, tuple(later))
    return replace(_prompt(written, _writer(tokenizer, chat_template)), turn=prompt.turn + 1)


def _writer(tokenizer: Any, chat_template: str) -> ChatWriter:
    """What writes chats out, with a template for a tokenizer that has none."""
    from eagle3core.chat import ChatWriter

    if not chat_template:
        return ChatWriter(tokenizer)
    if getattr(tokenizer, "chat_template", None) not in (None, chat_template):
        raise ExperimentError(
            "chat_template is given, and the tokenizer has one of its own",
            "a template for a tokenizer that has none",
            "leave it out, or remove the tokenizer's",
        )
    named = copy(tokenizer)
    named.chat_template = _template_text(chat_template)
    return ChatWriter(named)


def _template_text(given: str) -> str:
    """A template as it is, or the text of the file that is named."""
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as reason:
        raise ExperimentError(
            f"chat_template {given!r} cannot be read: {reason}", "a Jinja template, or a file of one", "check the path"
        ) from reason


def prompts_for(
    target: str | Path, file: str = "", *, limit: int, max_tokens: int, chat_template: str = "", turns: str = "first"
) -> tuple[list[Prompt], str]:
    """Prompts for a notebook, and in words where they come from.

    A prompt longer than `max_tokens` keeps its last tokens, so that a chat still ends where the assistant begins. A
    target without a tokenizer gets seeded random ids.

    Args:
        target: directory whose tokenizer is used.
        file: as `load_prompts` reads it; empty takes the held-out prompts of the shipped pair.
        limit, max_tokens: at most so many, and so long.
        chat_template: as for `load_prompt_set`.
        turns: "first", or "all" where the caller goes on with `lab.acceptance.turns`, so that the words say no less.

    Raises:
        ExperimentError: as `load_prompt_set`, or limits below 1 prompt and 2 tokens.
    """
    from lab.pairs import random_ids  # brings torch, which reading a file does not need

    if limit < 1 or max_tokens < 2:
        raise ExperimentError(f"n_prompts is {limit}, max_prompt_tokens {max_tokens}", "at least 1 and 2", "raise them")
    if not random_ids.has_tokenizer(Path(target)):
        drawn = random_ids.random_prompts(Path(target), limit, max_tokens)
        return prompts_from_ids(drawn.ids, "random ids"), drawn.source
    from eagle3core.pipeline import load_tokenizer

    path = Path(file) if file else _shipped_file()
    read = load_prompt_set(path, load_tokenizer(target), limit=limit, chat_template=chat_template)
    loaded = read.prompts
    n_cut = sum(len(prompt.ids) > max_tokens for prompt in loaded)
    prompts = [replace(prompt, ids=prompt.ids[-max_tokens:]) for prompt in loaded]
    lengths = [len(prompt.ids) for prompt in prompts]
    cut = f", {n_cut} cut to their last {max_tokens}" if n_cut else ""
    skipped = f"; {read.skipped_words}" if read.skipped_words else ""
    first = ", first turns alone" if turns == "first" and any(prompt.later for prompt in prompts) else ""
    words = f"{len(prompts)} prompts of {path.name}{first}, {min(lengths)} to {max(lengths)} tokens{cut}{skipped}"
    return prompts, words


def joined_prompts(target: str | Path, n_prompts: int, n_tokens: int) -> list[list[int]]:
    """`n_prompts` prompts of exactly `n_tokens` tokens of the shipped prompts' text, none of it twice in a prompt.

    Each begins with another text and goes on with those after it, so a context of so many tokens is as varied as real
    text is (docs/requirements.md 1.X-10).

    Raises:
        ExperimentError: the texts together have fewer tokens.
    """
    from eagle3core.pipeline import load_tokenizer

    texts = [list(prompt.ids) for prompt in load_prompts(_shipped_file(), load_tokenizer(target))]
    n_all = sum(map(len, texts))
    if n_tokens > n_all:
        raise ExperimentError(
            f"a prompt of {n_tokens} tokens",
            f"at most {n_all}, the tokens of all texts together",
            "shorten the context",
        )
    return [_joined(texts, i * len(texts) // n_prompts, n_tokens) for i in range(n_prompts)]


def _joined(texts: Sequence[Sequence[int]], start: int, n_tokens: int) -> list[int]:
    """The first tokens of all texts one after the other, from text `start` on; fewer where there are no more."""
    return list(islice(chain.from_iterable([*texts[start:], *texts[:start]]), n_tokens))


def uneven_prompts(
    target: str | Path,
    n_prompts: int = len(UNEVEN_LENGTHS),
    *,
    lengths: Sequence[int] = UNEVEN_LENGTHS,
    file: str | Path = "",
    chat_template: str = "",
) -> list[list[int]]:
    """Prompts of `lengths`, in turn: texts of `file`, or random ids for a target without a tokenizer.

    No `file` takes the prompts of the shipped pair; `chat_template` as for `load_prompt_set`.

    Together they cross what short prompts leave out: a cache block filled to its end, several blocks, more than one
    prefill chunk, and a batch in which no two have the same length.

    Raises:
        ExperimentError: no prompt is asked for.
    """
    from lab.pairs.random_ids import has_tokenizer

    if n_prompts < 1:
        raise ExperimentError(f"n_prompts is {n_prompts}", "at least 1", "raise it")
    wanted = [lengths[i % len(lengths)] for i in range(n_prompts)]
    if has_tokenizer(Path(target)):
        from eagle3core.pipeline import load_tokenizer

        tokenizer, path = load_tokenizer(target), file or _shipped_file()
        texts = [prompt.ids for prompt in load_prompts(path, tokenizer, chat_template=chat_template)]
        return [_joined(texts, i * len(texts) // n_prompts, length) for i, length in enumerate(wanted)]
    vocab = int(json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    drawn = Random(UNEVEN_SEED)
    return [[drawn.randrange(vocab) for _ in range(length)] for length in wanted]


def _shipped_file() -> Path:
    from lab.pairs import shipped_pair

    path = shipped_pair().prompts
    if path is None:
        raise ExperimentError("the shipped pair has no prompts", "a prompt file", "name one with prompts=FILE.jsonl")
    return Path(path)


def prompts_from_ids(ids: Sequence[Sequence[int]], category: str = NO_CATEGORY) -> list[Prompt]:
    """Prompts made of token ids alone, for models without a tokenizer.

    Raises:
        ExperimentError: one of them is empty.
    """
    for i, tokens in enumerate(ids):
        if not tokens:
            raise refused_prompt(f"prompt {i}", "is empty", "give it at least one token")
    return [Prompt(tuple(tokens), "", category, str(i)) for i, tokens in enumerate(ids)]


def _prompt(written: Written, chats: ChatWriter) -> Prompt:
    if isinstance(written.content, str):
        text, ids = written.content, chats.text_ids(written.content)
    else:
        text, ids = written.content[-1]["content"], _templated(written.content, written.place, chats)
    if not ids:
        raise refused_prompt(written.place, "gives no token", "write some text")
    chat = () if isinstance(written.content, str) else tuple(written.content)
    return Prompt(tuple(ids), text, written.category, written.id, chat, written.later)


def _templated(chat: Sequence[Message], place: str, chats: ChatWriter) -> list[int]:
    """Token ids of a chat, ending where the assistant is to begin."""
    from eagle3core.errors import ConfigError

    if not chats.has_template:
        what, remedy = (
            "is a chat, and the tokenizer has no chat template",
            "give plain texts, or a chat_template",
        )
        raise refused_prompt(place, what, remedy)
    try:
        return chats.ids(chat)
    except ConfigError as reason:
        raise refused_prompt(place, f"cannot be written out: {reason.what}", "correct its roles") from reason
