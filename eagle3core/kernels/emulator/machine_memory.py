"""The emulator's memory: operands in global memory, and shared memory with the history of every word.

Source: derived here; the memory rules are those of the PTX ISA's consistency model, narrowed to one block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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


class Stamp(NamedTuple):
    """Who touched a shared word, and the block's clock then."""

    lane: int
    time: int


IN_FLIGHT = Stamp(-2, 0)


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


class Shared:
    """Shared memory of one block, with the history of every 4-byte word."""

    def __init__(self, dynamic_bytes: int) -> None:
        self.bytes = bytearray(b"\xcd" * dynamic_bytes)
        self.limits = [(0, dynamic_bytes)]
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
        for start, end in self.limits:
            if start <= address and past <= end:
                return range(address >> 2, (past + 3) >> 2)
        raise EmulationError(f"shared access of {n_bytes} bytes at {address} is out of bounds {self.limits}")

    def read(self, lane: Lane, address: int, n_bytes: int) -> bytes:
        me, clock, seen = lane.index, lane.block.clock, lane.seen
        for word in self.words(address, n_bytes):
            stamp = self.written[word]
            if stamp is None:
                raise EmulationError(f"lane {me} reads shared byte {word * 4}, which nobody has written")
            if stamp is IN_FLIGHT:
                raise EmulationError(f"lane {me} reads shared byte {word * 4} while a copy into it is under way")
            writer, time = stamp
            if writer != me and time >= seen[writer]:
                raise EmulationError(f"race: lane {me} reads shared byte {word * 4} of lane {writer}")
            readers = self.readers[word]
            if readers is None:
                self.readers[word] = {me: clock}
            else:
                readers[me] = clock
        return bytes(self.bytes[address : address + n_bytes])

    def write(self, lane: Lane, address: int, data: bytes, stamp: Stamp | None = None) -> None:
        self.claim(lane, address, len(data), stamp or lane.stamp())
        self.bytes[address : address + len(data)] = data

    def claim(self, lane: Lane, address: int, n_bytes: int, stamp: Stamp) -> None:
        """Mark bytes as written by `stamp`, after checking that nobody else may still use what they held."""
        me, seen = lane.index, lane.seen
        for word in self.words(address, n_bytes):
            before = self.written[word]
            if before is IN_FLIGHT:
                raise EmulationError(f"lane {me} writes shared byte {word * 4} while a copy is under way")
            if before is not None and before.lane != me and before.time >= seen[before.lane]:
                raise EmulationError(f"race: lanes {me} and {before.lane} both write shared byte {word * 4}")
            readers = self.readers[word]
            if readers is not None:
                for reader, time in readers.items():
                    if reader != me and time >= seen[reader]:
                        raise EmulationError(
                            f"race: lane {me} overwrites shared byte {word * 4} that lane {reader} reads"
                        )
                self.readers[word] = None
            self.written[word] = stamp

    def land(self, lane: Lane, address: int, data: bytes) -> None:
        """An asynchronous copy of this lane arrives."""
        stamp = lane.stamp()
        for word in self.words(address, len(data)):
            self.written[word] = stamp
        self.bytes[address : address + len(data)] = data


def unpack(code: str, data: bytes) -> tuple[Any, ...]:
    """Numbers from bytes: `i` int32 as Python ints, `f` float32 as numpy scalars."""
    if code == "f":
        return tuple(np.frombuffer(data, np.float32))
    return struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)


def pack(code: str, values: Sequence[Any]) -> bytes:
    """Bytes from numbers; integers wrap."""
    if code == "f":
        return np.array(values, np.float32).tobytes()
    width = struct.calcsize(code)
    return b"".join((int(v) & ((1 << 8 * width) - 1)).to_bytes(width, "little") for v in values)
