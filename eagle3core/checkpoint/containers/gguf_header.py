"""What a GGUF file says before its tensors, read with every count held against the size of the file.

Nothing is run and no long list is built: an array beyond `MOST_KEPT` elements (a tokenizer's) is passed over.
Source: github.com/ggml-org/ggml, its page of the GGUF format, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3core.errors import CheckpointError, shown

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_KEYS, MOST_TENSORS, MOST_KEPT, MOST_PASSED, MOST_DIMENSIONS = 4096, 4096, 4096, 1 << 20, 4
MOST_TEXT = 1 << 20
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# Bytes of an element by ggml's number of the type; all other types hold blocks of quantised values.
WIDTHS = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}
_QUANTISED = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4",
}  # fmt: skip
_AGAIN = "download the file again, or convert the head again"


@dataclass(frozen=True)
class Entry:
    """A tensor: `shape` as torch has it (the file's reversed), ggml's type, and its bytes' place in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata and tensors of a file; long arrays of the metadata stand as None.

    Raises:
        CheckpointError: no GGUF file of a version read, a truncated or contradictory one, or quantised tensors.
    """
    size = path.stat().st_size
    if size < 24:
        raise _unreadable(path, f"is {size} bytes long", "at least the 24 bytes of a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        magic, version = data[:4], struct.unpack_from("<I", data, 4)[0]
        if magic != MAGIC or version not in VERSIONS:
            raise _unreadable(
                path, f"begins with {magic!r}, version {version}", "GGUF, version 2 or 3, in little-endian order"
            )
        cursor.at = 8
        n_tensors, n_keys = cursor.count(MOST_TENSORS, "tensors"), cursor.count(MOST_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            name = cursor.text()
            if name in metadata:
                raise _unreadable(path, f"names the key {shown(name, 100)} twice", "each key once")
            metadata[name] = cursor.value(cursor.scalar("I"))
        raw = [cursor.tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment % 8 or not 8 <= alignment <= 1 << 20:
            raise _unreadable(path, f"has general.alignment {shown(alignment)}", "a multiple of 8, up to a MiB")
        begin = -(-cursor.at // alignment) * alignment
    return metadata, _placed(path, raw, begin, size)


def _placed(path: Path, raw: list[tuple[str, tuple[int, ...], int, int]], begin: int, size: int) -> dict[str, Entry]:
    """Entries whose bytes lie in the file, none over another."""
    entries: dict[str, Entry] = {}
    spans = []
    for name, shape, kind, offset in raw:
        if kind not in WIDTHS:
            stored = _QUANTISED.get(kind, f"ggml's type {kind}")
            raise CheckpointError(
                f"{path}: tensor {shown(name, 100)} is stored as {stored}",
                "F32, F16 or BF16 (I64 or I32 for d2t): quantised tensors are not built",
                "use the head as it was before it was quantised",
            )
        start, n_bytes = begin + offset, math.prod(shape) * WIDTHS[kind]
        if offset % 8 or start + n_bytes > size:
            raise _unreadable(
                path, f"({size} bytes) puts tensor {shown(name, 100)} at bytes {start} to {start + n_bytes}",
                "bytes inside the file, at a multiple of 8",
            )  # fmt: skip
        if name in entries:
            raise _unreadable(path, f"holds tensor {shown(name, 100)} twice", "each tensor once")
        entries[name] = Entry(shape, kind, start)
        spans.append((start, start + n_bytes, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start < end:
            raise _unreadable(path, f"lays tensor {shown(name, 100)} over another", "tensors that share no bytes")
        end = stop
    return entries


class _Cursor:
    """A place in the file from which values are read in turn."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def scalar(self, code: str) -> Any:
        """The next number."""
        self._require(struct.calcsize(code))
        value = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def count(self, most: int, what: str) -> int:
        """The next count, held against a limit and against what is left of the file."""
        n: int = self.scalar("Q")
        if n > min(most, len(self.data) - self.at):
            raise _unreadable(self.path, f"({len(self.data)} bytes) promises {n} {what}", f"up to {most}, in the file")
        return n

    def text(self) -> str:
        """The next text."""
        n = self.count(MOST_TEXT, "bytes of text")
        raw = self.data[self.at : self.at + n]
        self.at += n
        try:
            return raw.decode()
        except UnicodeDecodeError as reason:
            raise _unreadable(self.path, f"holds a text that cannot be read: {reason}", "texts in UTF-8") from reason

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value of a kind; None for an array that is passed over."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY or depth > 1:
            raise _unreadable(self.path, f"has a value of kind {kind}", "the kinds 0 to 12, arrays at most two deep")
        of, n = self.scalar("I"), self.count(1 << 62, "elements")
        if n > MOST_KEPT and of in SCALARS:
            self._require(n * struct.calcsize(SCALARS[of]))
            self.at += n * struct.calcsize(SCALARS[of])
            return None
        if n > MOST_PASSED or (of == ARRAY and n > MOST_KEPT):
            raise _unreadable(self.path, f"has an array of {n} texts or arrays", f"up to {MOST_PASSED} texts")
        listed = []
        for i in range(n):
            element = self.value(of, depth + 1)
            if i < MOST_KEPT:
                listed.append(element)
        return listed if n <= MOST_KEPT else None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """The next tensor's name, shape in torch's order, type and offset."""
        name, n = self.text(), self.scalar("I")
        if not 1 <= n <= MOST_DIMENSIONS:
            raise _unreadable(self.path, f"gives {shown(name, 100)} {n} dimensions", f"1 to {MOST_DIMENSIONS}")
        dimensions = [self.count(1 << 62, "values of a dimension") for _ in range(n)]
        if not all(dimensions):
            raise _unreadable(self.path, f"gives {shown(name, 100)} the shape {dimensions[::-1]}", "values from 1")
        return name, tuple(reversed(dimensions)), self.scalar("I"), self.scalar("Q")

    def _require(self, n_bytes: int) -> None:
        if self.at + n_bytes > len(self.data):
            raise _unreadable(self.path, f"ends at byte {len(self.data)}, inside its header", "a complete GGUF file")


def _unreadable(path: Path, what: str, allowed: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}", allowed, _AGAIN)
