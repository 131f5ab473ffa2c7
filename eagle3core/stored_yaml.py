"""YAML within limits: here alone are size, depth, anchors, aliases, tags and names given twice judged.

What may be nested is counted before anything is built: the scanner's time grows with the square of the depth, and a
few anchors can stand for gigabytes.
"""

from __future__ import annotations

from typing import Any

from eagle3core.errors import CheckpointError, shown
from eagle3core.stored_json import MOST_DEPTH

MOST_BYTES = 64 << 10  # a tree of 256 nodes needs about 20 KiB, the settings of a head some hundred bytes
_AGAIN = "download or export the file again"


def parse_yaml(data: bytes, source: str) -> Any:
    """The value of UTF-8 YAML, of plain lists, mappings and scalars.

    Args:
        data: the text, of up to `MOST_BYTES`. source: what holds it, as errors show it.

    Raises:
        CheckpointError: too long or too deep, no YAML, an anchor, an alias, a tag, or an outermost name given twice.
    """
    import yaml  # only a file in YAML needs it

    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{source} is longer than {MOST_BYTES >> 10} KiB", "a file up to that size", _AGAIN)
    try:
        text = data.decode()
        _check_events(text, source)
        _check_names(yaml.compose(text, Loader=yaml.SafeLoader), source)
        return yaml.safe_load(text)
    # The builder of values lets out whatever went wrong in it: a date of no calendar, a mapping as a name.
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError, TypeError, AttributeError) as reason:
        why = " ".join(str(reason).split()) or type(reason).__name__
        raise CheckpointError(f"{source} cannot be read as YAML: {why}", "a UTF-8 YAML mapping", _AGAIN) from reason


def _check_events(text: str, source: str) -> None:
    """That nothing is deep, repeated by reference, or of a type given by a tag."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        if depth > MOST_DEPTH:
            raise CheckpointError(f"{source} is nested more than {MOST_DEPTH} deep", "lists within a list", _AGAIN)
        # A few anchors and aliases can stand for gigabytes, and a tag for a type whose text is not checked.
        if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
            raise CheckpointError(
                f"{source} has an anchor, an alias or a tag in line {event.start_mark.line + 1}",
                "plain lists, mappings and numbers",
                _AGAIN,
            )


def _check_names(node: Any, source: str) -> None:
    """That no name of the outermost mapping is given twice; the reader would keep the last."""
    names = [str(key.value) for key, _ in node.value] if node is not None and node.id == "mapping" else []
    for name in names:
        if names.count(name) > 1:
            raise CheckpointError(f"{source} gives {shown(name, 100)} twice", "each name once", _AGAIN)
