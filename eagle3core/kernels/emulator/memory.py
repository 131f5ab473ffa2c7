"""Loads and stores of the emulator, global by address and shared by offset; every access is checked.

Source: PTX ISA 9.0, ld and st.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eagle3core.kernels.emulator.machine_memory import reader, writer
from eagle3core.kernels.emulator.now import lane as current
from eagle3core.kernels.emulator.now import now


def read_shared(address: int, n_bytes: int) -> bytes:
    """Bytes of the running lane's shared memory."""
    lane = current()
    return lane.block.shared.read(lane, address, n_bytes)


def write_shared(address: int, data: bytes) -> None:
    """Put bytes into the running lane's shared memory."""
    lane = current()
    lane.block.shared.write(lane, address, data)


def _loader(code: str, n: int, width: int, *, shared: bool = False) -> Callable[[int], Any]:
    read, n_bytes = reader(code, n), n * width

    def load(address: int) -> Any:
        values = read(read_shared(address, n_bytes) if shared else now().load(address, n_bytes))
        return values[0] if n == 1 else values

    return load


def _storer(code: str, *, shared: bool = False) -> Callable[..., None]:
    write = writer(code)

    def store(address: int, *values: Any) -> None:
        (write_shared if shared else now().store)(address, write(values))

    return store


load_u16 = _loader("H", 1, 2)
load_u32, load_u64 = _loader("i", 1, 4), _loader("q", 1, 8)
load_u32x2, load_u32x4 = _loader("i", 2, 4), _loader("i", 4, 4)
load_u32x4_const = load_u32x4_stream = load_u32x4_l2 = load_u32x4
load_f32, load_f32x2, load_f32x4 = _loader("f", 1, 4), _loader("f", 2, 4), _loader("f", 4, 4)
load_f32_l2, load_f32x4_l2 = load_f32, load_f32x4
store_u8, store_u16, store_u64 = _storer("B"), _storer("H"), _storer("q")
store_u32 = store_u32x2 = store_u32x4 = _storer("i")
store_f32 = store_f32x2 = store_f32x4 = _storer("f")
shared_load_u32x2 = _loader("i", 2, 4, shared=True)
shared_load_u32, shared_load_u32x4 = _loader("i", 1, 4, shared=True), _loader("i", 4, 4, shared=True)
shared_load_f32, shared_load_f32x4 = _loader("f", 1, 4, shared=True), _loader("f", 4, 4, shared=True)
shared_store_u32 = shared_store_u32x4 = _storer("i", shared=True)
shared_store_f32 = shared_store_f32x2 = shared_store_f32x4 = _storer("f", shared=True)


def store_u32_below(address: int, value: int, index: int, end: int) -> None:
    if index < end:
        store_u32(address, value)


def store_u32x2_below(address: int, value: int, next_value: int, index: int, end: int) -> None:
    if index < end:
        store_u32x2(address, value, next_value)


def store_u32_twice_below(address: int, value: int, other: int, other_value: int, index: int, end: int) -> None:
    store_u32_below(address, value, index, end)
    store_u32_below(other, other_value, index, end)


def address_after(address: int, pitch: int, count: int) -> int:
    return address + pitch * count
