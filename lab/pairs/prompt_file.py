"""Prompt files: plain texts, chats and prompt sets as they are published, checked without a tokenizer.

JSON lines, one JSON array, either of them gzipped, or Parquet where pyarrow is installed. What an entry is, its keys
say:

    text or prompt                    tokenised as it is (HumanEval); beside `code` a question (MBPP)
    messages                          a chat, up to the last user message (UltraChat)
    turns                             MT-bench, Spec-Bench, SPEED-Bench: the first, then `later` ones
    conversations or conversation     ShareGPT, SpecForge, WildChat, LMSYS-Chat: the first question
    question, problem                 GSM8K, MATH-500: a question
    instruction (and input)           Alpaca, AlpacaEval: a question
    article                           CNN/DailyMail: "Summarize: " and the article

A later turn of MT-bench follows the model's own answer to the turns before (`prompts.next_turn`). `category` and `id`
are optional everywhere.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError
from lab.pairs.prompt_forms import NO_CATEGORY, Message, Skipped, Written, read_entry, refused_prompt
from lab.rows.stored.files import decoded

__all__ = ["NO_CATEGORY", "Message", "PromptFile", "Written", "read_prompt_file", "refused_prompt"]

# Far beyond any prompt set that is read whole; what is larger is a mistake, or meant to fill the memory.
MOST_BYTES, MOST_LETTERS = 256 << 20, 8 << 20
_PARQUET_ROWS = 256  # made into Python's objects at once


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, in its order.

    Attributes:
        skipped: by reason, the recorded conversations among them that hold no question.
    """

    prompts: tuple[Written, ...]
    skipped: dict[str, int]

    @property
    def skipped_words(self) -> str:
        """What was skipped, for people; empty if nothing was."""
        reasons = ", ".join(f"{n} with {why}" for why, n in sorted(self.skipped.items()))
        return f"{sum(self.skipped.values())} entries skipped: {reasons}" if self.skipped else ""


def read_prompt_file(path: Path, *, limit: int | None = None) -> PromptFile:
    """The prompts of a file.

    Args:
        limit: read at most so many; None reads all.

    Raises:
        ExperimentError: no such file, no prompt in it, or an entry that is no prompt, with its number.
    """
    prompts: list[Written] = []
    skipped: Counter[str] = Counter()
    for place, entry in _entries(path):
        try:
            prompts.append(read_entry(entry, place))
        except Skipped as reason:
            skipped[str(reason)] += 1
        if limit is not None and len(prompts) >= limit:
            break
    found = PromptFile(tuple(prompts), dict(skipped))
    if not prompts:
        raise refused_prompt(path.name, f"holds no prompt{', ' * bool(skipped)}{found.skipped_words}", "add one")
    return found


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Every entry of the file with its place in words."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    text = _read_text(path)
    if text.lstrip().startswith("["):
        listed = _decode(text, path.name)
        yield from ((f"{path.name} item {i}", entry) for i, entry in enumerate(listed, start=1))
        return
    # Not splitlines(): a text may hold U+2028 and the like, which end no line of JSON.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path.name} line {number}"
            if len(line) > MOST_LETTERS:
                raise refused_prompt(place, f"has {len(line)} letters, at most {MOST_LETTERS} are read", "shorten it")
            yield place, _decode(line, place)


def _read_text(path: Path) -> str:
    """The file's text, unpacked if it is gzipped, without a mark of the byte order."""
    try:
        _refuse_large(path, path.stat().st_size)
        if path.suffix != ".gz":
            return path.read_text(encoding="utf-8-sig")
        with gzip.open(path) as file:
            data = file.read(MOST_BYTES + 1)  # a small file may unpack to any size
        _refuse_large(path, len(data))
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as reason:
        raise ExperimentError(
            f"prompt file {path.name} cannot be read: {reason}", "a UTF-8 file of JSON lines", "check the path"
        ) from reason


def _refuse_large(path: Path, n_bytes: int) -> None:
    if n_bytes > MOST_BYTES:
        raise ExperimentError(
            f"prompt file {path.name} has {n_bytes} bytes", f"at most {MOST_BYTES}", "give fewer prompts"
        )


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError as reason:
        raise ExperimentError(
            f"prompt file {path.name} is Parquet, and pyarrow is not installed",
            "JSON lines, or Parquet where pyarrow is installed",
            "pip install 'eagle3lab[parquet]', or write the set as JSON lines",
        ) from reason
    try:
        _refuse_large(path, path.stat().st_size)
        number, file = 0, parquet.ParquetFile(path)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        _refuse_large(path, sum(group.total_byte_size for group in groups))  # a small file may unpack to any size
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for entry in batch.to_pylist():
                number += 1
                # A column is there for every row; what is null is absent.
                yield f"{path.name} row {number}", {key: value for key, value in entry.items() if value is not None}
    except (
        OSError,
        ArrowException,
        ValueError,
        OverflowError,
    ) as reason:  # texts that are no UTF-8, times out of range
        raise ExperimentError(
            f"prompt file {path.name} cannot be read: {reason}", "a Parquet file", "check the path"
        ) from reason


def _decode(text: str, place: str) -> Any:
    try:
        return decoded(text)
    except ValueError as reason:
        raise refused_prompt(place, f"is no JSON: {reason}", "correct or remove it") from reason
