"""The emulator's memory: operands in global memory, and shared memory with the history of every word.

Source: derived here; the memory rules are those of the PTX ISA's consistency model, narrowed to one block.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np


class EmulationError(Exception):
    """A kernel did what a GPU would punish, or leave undefined."""


class Region(NamedTuple):
    """Addresses `start..end` of one operand."""

    name: str
    start: int
    end: int
    is_early: bool  # readable before `wait_previous`
    is_writable: bool
    is_counter: bool = False  # all blocks count there, before they let the next kernel start


class Stamp(NamedTuple):
    """Who touched a shared word, and the block's clock then."""

    lane: int
    time: int


IN_FLIGHT = Stamp(-2, 0)


def swizzled(address: int) -> int:
    """Where 16 bytes of a tile of 128-byte rows lie: their column is exchanged by the row, modulo 8."""
    return address ^ (address >> 3 & 0x70)


class Clock(Protocol):
    """A block's time, as its lanes write and meet."""

    clock: int


class Lane(Protocol):
    """Who touches shared memory, and per lane the time before which its writes are visible to this one."""

    index: int
    seen: list[int]

    @property
    def block(self) -> Clock:
        """The block it runs in."""

    def stamp(self) -> Stamp:
        """What its writes of this moment are marked with."""


@dataclass
class Arrivals:
    """An mbarrier: arrivals and bytes still missing in this phase."""

    expected: int
    missing: int
    block: Clock
    pending_bytes: int = 0
    phase: int = 0
    seen: list[int] = field(default_factory=list)
    with_copies: list[tuple[Any, list[tuple[int, int, int]]]] = field(default_factory=list)  # they arrive with these
    peers: dict[int, list[int]] = field(default_factory=dict)  # what lanes of other blocks, by rank, published

    def settle(self) -> None:
        if self.missing == 0 and self.pending_bytes == 0:
            self.phase ^= 1
            self.missing = self.expected


class Shared:
    """Shared memory of one block, with the history of every 4-byte word."""

    def __init__(self, dynamic_bytes: int) -> None:
        self.bytes = bytearray(b"\xcd" * dynamic_bytes)
        self.limits = [(0, dynamic_bytes)]
        self._last = self.limits[0]
        words = (dynamic_bytes + 3) // 4
        self.written: list[Stamp | None] = [None] * words
        self.readers: list[dict[int, int] | None] = [None] * words
        self.arrays: dict[Any, int] = {}

    def array(self, site: Any, n_bytes: int) -> int:
        """Offset of the static array declared at `site`."""
        if site not in self.arrays:
            start = len(self.bytes) + 256 + (-len(self.bytes)) % 128  # a gap that no access may enter
            self.arrays[site] = start
            grown = start + n_bytes - len(self.bytes)
            self.bytes.extend(b"\xcd" * grown)
            self.limits.append((start, start + n_bytes))
            words = (len(self.bytes) + 3) // 4
            self.written.extend([None] * (words - len(self.written)))
            self.readers.extend([None] * (words - len(self.readers)))
        return self.arrays[site]

    def words(self, address: int, n_bytes: int) -> range:
        if address % n_bytes and not (n_bytes > 16 and address % 16 == 0):
            raise EmulationError(f"shared address {address} is not aligned to {n_bytes} bytes")
        past = address + n_bytes
        start, end = self._last  # most accesses lie where the one before lay
        if start <= address and past <= end:
            return range(address >> 2, (past + 3) >> 2)
        for limits in self.limits:
            if limits[0] <= address and past <= limits[1]:
                self._last = limits
                return range(address >> 2, (past + 3) >> 2)
        raise EmulationError(f"shared access of {n_bytes} bytes at {address} is out of bounds {self.limits}")

    def read(self, lane: Lane, address: int, n_bytes: int) -> bytes:
        me, clock, seen = lane.index, lane.block.clock, lane.seen
        all_written, all_readers = self.written, self.readers
        for word in self.words(address, n_bytes):
            stamp = all_written[word]
            if stamp is None:
                raise EmulationError(f"lane {me} reads shared byte {word * 4}, which nobody has written")
            if stamp is IN_FLIGHT:
                raise EmulationError(f"lane {me} reads shared byte {word * 4} while a copy into it is under way")
            writer, time = stamp
            if writer != me and time >= seen[writer]:
                raise EmulationError(f"race: lane {me} reads shared byte {word * 4} of lane {writer}")
            readers = all_readers[word]
            if readers is None:
                all_readers[word] = {me: clock}
            else:
                readers[me] = clock
        return bytes(self.bytes[address : address + n_bytes])

    def write(self, lane: Lane, address: int, data: bytes, stamp: Stamp | None = None) -> None:
        self.claim(lane, address, len(data), stamp or lane.stamp())
        self.bytes[address : address + len(data)] = data

    def claim(self, lane: Lane, address: int, n_bytes: int, stamp: Stamp) -> None:
        """Mark bytes as written by `stamp`, after checking that nobody else may still use what they held."""
        me, seen = lane.index, lane.seen
        all_written, all_readers = self.written, self.readers
        for word in self.words(address, n_bytes):
            before = all_written[word]
            if before is IN_FLIGHT:
                raise EmulationError(f"lane {me} writes shared byte {word * 4} while a copy is under way")
            if before is not None:
                writer, time = before
                if writer != me and time >= seen[writer]:
                    raise EmulationError(f"race: lanes {me} and {writer} both write shared byte {word * 4}")
            readers = all_readers[word]
            if readers is not None:
                for reader, time in readers.items():
                    if reader != me and time >= seen[reader]:
                        raise EmulationError(
                            f"race: lane {me} overwrites shared byte {word * 4} that lane {reader} reads"
                        )
                all_readers[word] = None
            all_written[word] = stamp

    def land(self, lane: Lane, address: int, data: bytes) -> None:
        """An asynchronous copy of this lane arrives."""
        stamp = lane.stamp()
        for word in self.words(address, len(data)):
            self.written[word] = stamp
        self.bytes[address : address + len(data)] = data


_ONE = np.float32(1)  # times a Python float: that float, rounded to fp32, in a third of the time that float32() takes


def reader(code: str, n: int) -> Callable[[bytes], tuple[Any, ...]]:
    """What takes `n` numbers from bytes: `H`, `i`, `q` as Python ints, `f` float32 as numpy scalars."""
    unpack = struct.Struct(f"<{n}{code}").unpack
    if code != "f":
        return unpack

    def floats(data: bytes) -> tuple[Any, ...]:
        values = unpack(data)
        total = sum(values)
        if total != total:  # numpy alone keeps all bits of a NaN
            return tuple(np.frombuffer(data, np.float32))
        return tuple([_ONE * value for value in values])

    return floats


def writer(code: str) -> Callable[[Sequence[Any]], bytes]:
    """What makes bytes of numbers; integers wrap."""
    forms = [struct.Struct(f"<{n}{code}") for n in range(5)]
    width = struct.calcsize(code)

    def integers(values: Sequence[Any]) -> bytes:
        try:
            return forms[len(values)].pack(*values)
        except struct.error:
            return b"".join((int(v) & ((1 << 8 * width) - 1)).to_bytes(width, "little") for v in values)

    def floats(values: Sequence[Any]) -> bytes:
        for value in values:
            if value != value:
                return np.array(values, np.float32).tobytes()
        return forms[len(values)].pack(*values)

    return floats if code == "f" else integers
