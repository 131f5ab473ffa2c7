"""Values of a row: as JSON has them, as Python has them, and as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

from lab.errors import ExperimentError, NotComparable

# JSON has no word for these three; pydantic writes them as strings, and reading turns them back into floats.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def number_of(value: object) -> float | None:
    """The value as a float, if it is a number; a truth value is none."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def restored(value: object) -> object:
    """The value, or list of values, with what is not finite as floats again."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def shortened(value: object) -> str:
    """Any stored value in at most a line, however long or deep it is, for the text of a refusal."""
    brief = Repr()
    brief.maxlevel, brief.maxstring, brief.maxother, brief.maxlong = 3, 60, 60, 40
    text = brief.repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def slugged(text: str) -> str:
    """`text` as a file and id name: lower-case letters, digits, `_`, `.` and `-`."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-.") or "unnamed"


def percent(ratio: float | None) -> str:
    """A ratio as a signed change: 1.034 is `+3.4%`; nothing for None."""
    return "" if ratio is None else f"{(ratio - 1) * 100:+.1f}%"


def refuse_newer(what: str, stored: Mapping[str, Any], known: int, form: str = "schema") -> None:
    """Stored content of this schema or an older one is read.

    Raises:
        NotComparable: a newer version of the lab wrote it.
    """
    version = stored.get("schema_version")
    if isinstance(version, int) and version > known:
        raise NotComparable(
            f"{what} has {form} {version}",
            f"schema {known} or older",
            "read it with the version of eagle3lab that wrote it, or a newer one",
        )


def plain_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them, by name.

    Raises:
        ExperimentError: as `plain`.
    """
    return {key: plain(key, value) for key, value in given.items()}


def plain(key: str, value: Any) -> Any:
    """`value` as JSON has it; NumPy and torch scalars and arrays are unwrapped.

    Raises:
        ExperimentError: it is nothing that a row can hold.
    """
    if hasattr(value, "tolist") and not isinstance(value, (str, bytes)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(key, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ExperimentError(
        f"value {key!r} is a {type(value).__name__}",
        "a number, text, truth value, None, or a list of these (NumPy and torch values are unwrapped)",
        "write its parts as separate values, or its text",
    )
