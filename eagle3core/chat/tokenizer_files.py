"""A tokenizer's files before their reader gets them: what would take the memory of the machine is refused here.

The reader of tokenizer.json keeps a place for every id up to the highest, and ends the whole process where it gets no
memory for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3core.errors import CheckpointError, shown
from eagle3core.stored_json import read_object

MOST_BYTES = 40 << 20  # the largest published are of 33 MiB
MOST_VALUE_BYTES = 256 << 20  # as `stored_json` estimates it: 262,000 tokens with 515,000 merges are 220 MiB
MOST_ID = 10_000_000  # far beyond any vocabulary
MOST_GROWTH = 64  # letters that the rules of a normalizer, one after the other, may make of one
MOST_ADDED = 1000  # tokens that a post-processor puts around a text; published ones put two or three
JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
OTHER_FILES = ("merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja")
_AGAIN = "download the tokenizer again"


def check_tokenizer_files(directory: Path) -> None:
    """That a tokenizer's JSON is within limits, its ids too.

    Raises:
        CheckpointError: names the file, and the token whose id is none.
    """
    for name in JSON_FILES:
        if (directory / name).is_file():
            values = read_object(directory / name, MOST_BYTES, MOST_VALUE_BYTES)
            for token, number in _ids(values):
                _check_id(name, token, number)
            _check_growth(name, values)
            _check_added(name, values.get("post_processor"))
    long = [each.name for each in directory.iterdir() if each.name in OTHER_FILES and each.stat().st_size > MOST_BYTES]
    if long:
        raise CheckpointError(f"{long[0]} is longer than {MOST_BYTES >> 20} MiB", "a file up to that size", _AGAIN)


def _ids(values: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Tokens with their ids, of any of the files: a vocabulary, added tokens, or the settings' table of them."""
    model = values.get("model")
    tables = [values.get("vocab"), model.get("vocab") if isinstance(model, dict) else None]
    found = [pair for table in tables if isinstance(table, dict) for pair in table.items()]
    added, decoder = values.get("added_tokens"), values.get("added_tokens_decoder")
    if isinstance(added, list):
        found += [(each.get("content"), each.get("id", 0)) for each in added if isinstance(each, dict)]
    if isinstance(decoder, dict):
        found += [(each, int(each)) for each in decoder if each.isdecimal()]
    return found


def _check_id(name: str, token: Any, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST_ID:
        raise CheckpointError(
            f"{name}: token {shown(token, 100)} has the id {shown(number, 100)}", f"ids of 0 to {MOST_ID}", _AGAIN
        )


def _check_growth(name: str, values: dict[str, Any]) -> None:
    """That rules which replace text, each working on what the one before made, do not multiply it without end."""
    growth, pending = 1, [values.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while pending and growth <= MOST_GROWTH:
        each = pending.pop()
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        pending += inner
        if isinstance(each, dict):
            texts = [each[key] for key in ("content", "prepend", "replacement") if isinstance(each.get(key), str)]
            growth *= max(1, *map(len, texts), 1)
    if growth > MOST_GROWTH:
        raise CheckpointError(
            f"{name}: rules that replace a letter by {growth} or more", f"at most {MOST_GROWTH}, all together", _AGAIN
        )


def _check_added(name: str, processor: Any) -> None:
    """That templates, each around what the one before made, put no endless row of tokens around a text."""
    most, pending = 0, [processor]
    while pending:
        each = pending.pop()
        pending += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        special = each.get("special_tokens") if isinstance(each, dict) else None
        if isinstance(special, dict):
            ids = [token["ids"] for token in special.values() if isinstance(token, dict) and "ids" in token]
            longest = max((len(one) for one in ids if isinstance(one, list)), default=0)
            pieces = [each[key] for key in ("single", "pair") if isinstance(each.get(key), list)]
            most += longest * max(map(len, pieces), default=0)
    if most > MOST_ADDED:
        raise CheckpointError(
            f"{name}: post_processor puts up to {most} tokens around a text", f"at most {MOST_ADDED}", _AGAIN
        )
