"""Held-out prompts: stretches of 48 to 160 tokens of documents never trained on, cut at line ends, spread evenly.

In Python text they are filed by where they start: a module's first line, a class, a function, a docstring.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.errors import ExperimentError
from lab.training.corpus import Document

N_PROMPTS = 64
MIN_TOKENS, MAX_TOKENS = 48, 160
CATEGORIES = ("module", "class", "function", "docstring", "text")
_MIN_PROMPTS = 8
_TEXT_LINES = 4  # a start every so many lines, where there is no syntax to go by


@dataclass(frozen=True)
class Prompt:
    """A prompt's text and its category."""

    text: str
    category: str


def held_out_prompts(
    documents: Sequence[Document], tokenizer: Any, n_prompts: int = N_PROMPTS, seed: int = 0
) -> list[Prompt]:
    """`n_prompts` prompts, the categories as even as the text allows; the same input gives the same prompts.

    Args:
        documents: held-out ones.
        tokenizer: counts tokens.
        n_prompts: how many; a short text gives fewer, but at least 8.
        seed: of the lengths drawn.

    Raises:
        ExperimentError: the documents hold too few places to start.
    """
    random = np.random.default_rng(seed)
    found: dict[str, list[Prompt]] = {category: [] for category in CATEGORIES}
    for document in documents:
        lines = document.text.splitlines()
        for line, category in _starts(document):
            wanted = int(random.integers(MIN_TOKENS, MAX_TOKENS + 1))
            text = _cut(lines, line, wanted, tokenizer)
            if text is not None:
                found[category].append(Prompt(text, category))
    chosen = _spread({category: prompts for category, prompts in found.items() if prompts}, n_prompts)
    if len(chosen) < min(n_prompts, _MIN_PROMPTS):
        raise ExperimentError(
            f"the held-out text gives {len(chosen)} prompts of {MIN_TOKENS} to {MAX_TOKENS} tokens",
            f"at least {_MIN_PROMPTS}",
            "give more text to --corpus",
        )
    return chosen


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """One JSON object a line: text and category."""
    lines = (json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    path.write_text("".join(lines), encoding="utf-8")


def _starts(document: Document) -> Iterator[tuple[int, str]]:
    """Index of a line and the category of what starts there."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):  # not Python, or only a part of a file: any line will do
        yield from ((line, "text") for line in range(0, document.text.count("\n"), _TEXT_LINES))
        return
    yield 0, "module"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.lineno - 1, "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno - 1, "function"
            if ast.get_docstring(node):
                yield node.body[0].lineno - 1, "docstring"


def _cut(lines: Sequence[str], start: int, wanted: int, tokenizer: Any) -> str | None:
    """Lines from `start` on, about `wanted` tokens of them, without the last line break; None if they do not fit."""
    counts = [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(lines[start : start + MAX_TOKENS])]
    for n_lines in range(1, len(counts)):  # at least one line of the document remains to be predicted
        if sum(counts[:n_lines]) + n_lines < wanted:
            continue
        text = "\n".join(lines[start : start + n_lines])
        fits = MIN_TOKENS <= len(tokenizer.encode(text).ids) <= MAX_TOKENS
        return text if fits and text.strip() and lines[start + n_lines - 1].strip() else None
    return None


def _spread(found: dict[str, list[Prompt]], n_prompts: int) -> list[Prompt]:
    """Equal shares of the categories where there are enough, each share spread evenly over its documents."""
    chosen: list[Prompt] = []
    left = dict(sorted(found.items(), key=lambda item: len(item[1])))
    while left:
        category, prompts = next(iter(left.items()))
        share = min(len(prompts), (n_prompts - len(chosen)) // len(left))
        chosen += [prompts[int((i + 0.5) * len(prompts) / share)] for i in range(share)]
        del left[category]
    return chosen
