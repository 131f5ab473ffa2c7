"""JSON out of a checkpoint, within limits: here alone are size, values, depth, digits and names given twice judged.

Everything that a checkpoint stores as JSON (configs, an index, the header of a safetensors file) is read here, once.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from eagle3core.errors import CheckpointError, shown

MOST_BYTES = 32 << 20  # the longest published, indexes of experts, have half of it
# What values may take as Python's objects, so that no file takes 200 MB beyond its own size. The estimate, from above:
# so much for a name with its value in an object, and for anything else that a comma or an opening bracket introduces
# (measured with CPython 3.11: 245 and 75 bytes at most).
MOST_VALUE_BYTES = 64 << 20
_NAMED_BYTES, _LISTED_BYTES = 256, 80
MOST_DEPTH = 64
MOST_DIGITS = 40  # of an integer; beyond any count or id
_AGAIN = "download or export the checkpoint again"


def read_object(path: Path, most_bytes: int = MOST_BYTES, most_value_bytes: int = MOST_VALUE_BYTES) -> dict[str, Any]:
    """The object in a JSON file; limits as of `parse_object`.

    Raises:
        CheckpointError: the file cannot be read, is too long, or holds no object within the limits.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as reason:
        raise CheckpointError(f"{path} cannot be read: {reason}", "a file that can be read", _AGAIN) from reason
    return parse_object(data, str(path), most_bytes, most_value_bytes)


def parse_object(
    data: bytes, source: str, most_bytes: int = MOST_BYTES, most_value_bytes: int = MOST_VALUE_BYTES
) -> dict[str, Any]:
    """The object in UTF-8 JSON.

    Args:
        data: the text. source: what holds it, as errors show it.
        most_bytes: how long it may be. most_value_bytes: how much memory its values may take.

    Raises:
        CheckpointError: too long, too many values or too deep, no JSON, a name twice in one object, or no object.
    """
    if len(data) > most_bytes:
        raise CheckpointError(f"{source} is longer than {most_bytes >> 20} MiB", "JSON up to that size", _AGAIN)
    n_named, n_listed = data.count(b":"), sum(map(data.count, (b",", b"[", b"{")))
    n_bytes = _NAMED_BYTES * n_named + _LISTED_BYTES * n_listed
    if n_bytes > most_value_bytes:
        raise CheckpointError(
            f"{source} holds about {n_named + n_listed} values, which take up to {n_bytes >> 20} MiB",
            f"values of up to {most_value_bytes >> 20} MiB",
            _AGAIN,
        )
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object, parse_int=_integer)
    except (ValueError, RecursionError) as reason:
        raise CheckpointError(
            f"{source} cannot be read as JSON: {reason}", "a UTF-8 JSON object", "download the file again"
        ) from reason
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} holds a {type(value).__name__}", "a JSON object", "download the file again")
    if _is_deep(value):
        raise CheckpointError(
            f"{source} is nested more than {MOST_DEPTH} deep", f"objects and lists up to {MOST_DEPTH} deep", _AGAIN
        )
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {shown(twice, 100)} stands twice in one object")
    return values


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    """Whether anything lies deeper than allowed; level by level, so that no depth is too deep to be found."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
