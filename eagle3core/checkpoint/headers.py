"""What a safetensors file holds, from its header: checked as a whole before a tensor of it is read.

Source: the format as github.com/huggingface/safetensors, README, "Format", has it: 8 bytes of length, a JSON header,
then the tensors, whose bytes follow each other without a gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from eagle3core.errors import CheckpointError, shown
from eagle3core.stored_json import MOST_BYTES, parse_object

# Bits of an element; those of half a byte and less are not built, and refused with their name when they are read.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
MOST_DIMENSIONS = 8
_AGAIN = "download or export the checkpoint again"


@dataclass(frozen=True)
class Entry:
    """A tensor as a file describes it: `dtype` as safetensors spells it."""

    shape: tuple[int, ...]
    dtype: str


def tensor_entries(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name, whose header and byte size are right.

    Raises:
        CheckpointError: no readable header, an entry that does not describe its bytes, overlaps, gaps, or a file of
            another size than its header says.
    """
    header, n_data, size = _read(path)
    header.pop("__metadata__", None)
    spans = sorted((*_span(path, name, entry), name) for name, entry in header.items())
    end = 0
    for start, stop, name in spans:
        if start != end:
            what = "overlaps another" if start < end else f"leaves a gap of {start - end} bytes before it"
            raise _unreadable(path, f"tensor {name} {what}", "tensors whose bytes follow each other")
        end = stop
    if end != n_data:
        expected = size - n_data + end
        raise CheckpointError(
            f"{path} is {size} bytes long{', truncated' if size < expected else ''}",
            f"{expected} bytes, as its header says",
            _AGAIN,
        )
    return {name: Entry(tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}


def _read(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, how many bytes follow it, and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MOST_BYTES):
            raise _unreadable(
                path,
                f"({size} bytes) has no readable safetensors header: a length of {length}",
                f"a complete safetensors file, its header up to {MOST_BYTES >> 20} MiB",
            )
        head = file.read(length)
    try:
        return parse_object(head, "the header"), size - 8 - length, size
    except CheckpointError as reason:
        raise _unreadable(
            path, f"({size} bytes) has no readable safetensors header: {reason.what}", "a complete safetensors file"
        ) from reason


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """First byte of a tensor and the one after its last, counted from the end of the header."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS:
        raise _unreadable(path, f"tensor {name} has shape {shown(shape)}", f"up to {MOST_DIMENSIONS} integers from 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _unreadable(path, f"tensor {name} has data_offsets {shown(offsets)}", "two integers from 0, ascending")
    if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in BITS:
        raise _unreadable(path, f"tensor {name} has dtype {shown(entry.get('dtype'))}", f"one of {', '.join(BITS)}")
    n_bits = math.prod(shape) * BITS[entry["dtype"]]
    if n_bits != 8 * (offsets[1] - offsets[0]):
        raise _unreadable(
            path,
            f"tensor {name} of shape {shape} and dtype {entry['dtype']} has {offsets[1] - offsets[0]} bytes",
            f"{shown(-(-n_bits // 8))} bytes, as shape and dtype say",
        )
    return offsets[0], offsets[1]


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _unreadable(path: Path, what: str, allowed: str) -> CheckpointError:
    colon = "" if what.startswith("(") else ":"
    return CheckpointError(f"{path}{colon} {what}", allowed, _AGAIN)
