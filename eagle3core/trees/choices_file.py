"""A file of choices, within limits: JSON by the reader of stored JSON, YAML without aliases, anchors and tags.

A tree of 256 nodes needs about 20 KiB in either. docs/requirements.md R-31; 1.X-20.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3core.errors import CheckpointError, ConfigError, shown
from eagle3core.stored_json import parse_object
from eagle3core.stored_yaml import MOST_BYTES, parse_yaml

SUFFIXES = (".yaml", ".yml", ".json")
FORMATS = ("paths", "adjacency")
_CORRECT = "correct the file"


def read_file(path: Path) -> dict[str, Any] | None:
    """What a file of choices holds: `choices`, and `format` if it says so; None where there is no such file.

    Raises:
        ConfigError: it cannot be read, is longer than 64 KiB, holds no mapping with `choices`, or more than that.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as reason:
        raise ConfigError(
            f"{path} cannot be read: {reason}", "a file that can be read", "name another file"
        ) from reason
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path} is longer than {MOST_BYTES >> 10} KiB", "a file up to that size", _CORRECT)
    try:
        is_json = path.suffix == ".json"
        content = parse_object(data, str(path), MOST_BYTES) if is_json else parse_yaml(data, str(path))
    except CheckpointError as error:  # its remedy is to download again
        raise ConfigError(error.what, error.allowed, _CORRECT) from error
    if not isinstance(content, dict) or "choices" not in content or not content.keys() <= {"choices", "format"}:
        names = f"the keys {shown(list(content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise ConfigError(f"{path} holds {names}", "`choices`, and `format` beside it", _CORRECT)
    if content.get("format", FORMATS[0]) not in FORMATS:
        raise ConfigError(f"{path}: format is {shown(content['format'])}", f"one of {FORMATS}", "name one, or none")
    return content
