"""The CPU twin of `ptx`: the same names, so that a kernel factory given this module yields a kernel that runs here.

`execute` runs a `Launch` lane by lane on `machine.Machine` with all of its checks. Approximate instructions are exact
here, `mma` adds its sixteen products one after the other in fp32 (so an order that differs shows in the bits).

Source: PTX ISA 9.0, fragment layouts of mma.m16n8k16 and ldmatrix; the rest derived here.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from eagle3core.kernels import emulator_group
from eagle3core.kernels.card import Launch
from eagle3core.kernels.emulator_numbers import (  # noqa: F401  part of the instruction set
    bits_of_f32,
    exp2,
    f32,
    f32_of_bits,
    fused,
    high_bf16,
    high_f16,
    i32,
    log2,
    low_bf16,
    low_f16,
    maximum,
    minimum,
    pack_bf16,
    pack_f16,
    popcount,
    product,
    products,
    reciprocal,
    rsqrt,
    wide_bf16,
    wide_f16,
)
from eagle3core.kernels.machine import IN_FLIGHT, Arrivals, EmulationError, Lane, Machine, Region, pack, unpack

_machine: Machine | None = None


def execute(launches: Iterable[Launch], isa: Any = None) -> None:
    """Run launches on CPU tensors, one after the other; `isa` replaces this module, e.g. to plant a fault.

    Raises:
        EmulationError: on any access, race, divergence or deadlock that a GPU would not forgive.
    """
    global _machine
    for launch in launches:
        variant = launch.variant
        kernel = variant.make(isa or sys.modules[__name__], **variant.constants)
        arguments, regions = _operands(launch)
        _machine = Machine(kernel, arguments, regions, variant.threads, variant.shared_bytes, variant.dependent)
        try:
            _machine.run(launch.grid)
        finally:
            _machine = None


def _operands(launch: Launch) -> tuple[list[Any], list[Region]]:
    arguments: list[Any] = []
    regions: list[Region] = []
    for parameter, value in zip(launch.variant.parameters, launch.values, strict=True):
        if parameter.kind == "f32":
            arguments.append(f32(value))
        elif not parameter.is_address:
            arguments.append(int(value))  # type: ignore[arg-type]
        elif value is None:
            arguments.append(0)
        else:
            start = value.data_ptr()  # type: ignore[union-attr]
            end = start + value.nbytes  # type: ignore[union-attr]
            arguments.append(start)
            regions.append(
                Region(parameter.name, start, end, parameter.role == "const", parameter.role in ("out", "inout"))
            )
    return arguments, regions


def _now() -> Machine:
    if _machine is None:
        raise EmulationError("an emulated instruction was called outside emulator.execute")
    return _machine


def _lane() -> Lane:
    return _now().current


i64 = int


def inlined(function: Callable[..., Any]) -> Any:
    """Nothing to do: a Python function is called."""
    return function


# ---- thread indices, arrays, barriers: what kernels use of numba.cuda


class _Index:
    def __init__(self, read: Callable[[], tuple[int, int, int]]) -> None:
        self._read = read

    x = property(lambda self: self._read()[0])
    y = property(lambda self: self._read()[1])
    z = property(lambda self: self._read()[2])


class _SharedArray:
    def __init__(self, offset: int, code: str) -> None:
        self.offset, self.code = offset, code

    def __getitem__(self, index: int) -> Any:
        return unpack(self.code, _read(self.offset + 4 * index, 4))[0]

    def __setitem__(self, index: int, value: Any) -> None:
        _write(self.offset + 4 * index, pack(self.code, [value]))


class _Shared:
    @staticmethod
    def array(n: int, dtype: Any, alignment: int = 4) -> _SharedArray:
        code = "f" if dtype is f32 else "i"
        if n == 0:
            return _SharedArray(0, code)  # dynamic shared memory comes first
        frame = sys._getframe(1)
        return _SharedArray(_lane().block.shared.array((frame.f_code, frame.f_lasti), 4 * n), code)


class _Local:
    @staticmethod
    def array(n: int, dtype: Any) -> list[Any]:
        return [None] * n  # arithmetic on an element that was never written raises


class cuda:
    """Stand-in for the parts of `numba.cuda` that kernels use."""

    threadIdx = _Index(lambda: (_lane().index, 0, 0))
    blockIdx = _Index(lambda: _lane().block.index)
    gridDim = _Index(lambda: _now().grid)
    blockDim = _Index(lambda: (_now().n_threads, 1, 1))
    shared = _Shared
    local = _Local

    @staticmethod
    def syncthreads() -> None:
        _lane().wait("block")

    @staticmethod
    def syncwarp() -> None:
        _lane().wait("warp", _meet, ())


Warp = Sequence[Lane]


def _meet(operands: Sequence[Any], warp: Warp) -> list[None]:
    warp[0].block.synchronise(warp)
    return [None] * 32


def _collective(act: Callable[[Sequence[Any], Warp], Sequence[Any]]) -> Callable[..., Any]:
    """An instruction of the whole warp: `act` maps 32 operand tuples to 32 results."""
    return lambda *operands: _lane().wait("warp", act, operands)


# ---- tensor cores


mma_bf16 = _collective(products(wide_bf16))
mma_f16 = _collective(products(wide_f16))


def _ldmatrix(transpose: bool) -> Callable[..., Any]:
    def act(operands: Sequence[Any], warp: Warp) -> list[Any]:
        rows = [
            np.frombuffer(lane.block.shared.read(lane, o[0], 16), np.uint16)
            for lane, o in zip(warp, operands, strict=True)
        ]
        blocks = np.stack(rows).reshape(4, 8, 8).astype(np.uint32)
        if transpose:
            blocks = blocks.transpose(0, 2, 1)
        pairs = blocks[:, :, 0::2] | (blocks[:, :, 1::2] << np.uint32(16))  # [4, 8, 4]
        return [tuple(int(v) for v in pairs[:, lane >> 2, lane & 3].astype(np.int32)) for lane in range(32)]

    return _collective(act)


ldmatrix_x4 = _ldmatrix(False)
ldmatrix_x4_trans = _ldmatrix(True)


# ---- tensor cores of a warpgroup


def group_mma(kind: str, n: int) -> Callable[..., None]:
    act = emulator_group.products(kind, n)
    return lambda *operands: _lane().wait("group", act, operands)


def group_settle(n: int) -> Callable[..., None]:
    return lambda sums: emulator_group.settle(_lane(), sums, n // 2)


def group_fence() -> None:
    _lane().is_fenced = True


def group_commit() -> None:
    emulator_group.commit(_lane())


# ---- asynchronous copies: the data arrives when the lane waits for it, never earlier


def copy16_fill(target: int, source: int, n_bytes: int) -> None:
    lane = _lane()
    if n_bytes not in (0, 16):
        raise EmulationError(f"copy of {n_bytes} bytes; 0 or 16 are allowed")
    if n_bytes:
        _now().region(source, 16, writes=False)
    lane.block.shared.claim(lane, target, 16, IN_FLIGHT)
    lane.open_group.append((target, source, n_bytes))


def copy16(target: int, source: int) -> None:
    copy16_fill(target, source, 16)


copy16_cached, copy16_cached_fill = copy16, copy16_fill


def copy_commit() -> None:
    lane = _lane()
    lane.groups.append(lane.open_group)
    lane.open_group = []


def _copy_wait(n: int) -> None:
    lane = _lane()
    while len(lane.groups) > n:
        for target, source, n_bytes in lane.groups.pop(0):
            lane.block.shared.land(lane, target, _now().load(source, 16) if n_bytes else bytes(16))


COPY_WAIT = tuple((lambda n=n: _copy_wait(n)) for n in range(16))


# ---- bulk copies; the copy engine is one lane more, whose writes the barrier's waiters see


def mbarrier_init(address: int, count: int) -> None:
    lane = _lane()
    lane.block.mbarriers[address] = Arrivals(count, count, seen=[0] * len(lane.seen))


def _mbarrier(address: int) -> Arrivals:
    found = _lane().block.mbarriers.get(address)
    if found is None:
        raise EmulationError(f"no mbarrier at shared address {address}")
    return found


def mbarrier_expect(address: int, n_bytes: int) -> None:
    _mbarrier(address).pending_bytes += n_bytes
    mbarrier_arrive(address)


def mbarrier_arrive(address: int) -> None:
    lane, barrier = _lane(), _mbarrier(address)
    lane.block.clock += 1
    published = list(lane.seen)
    published[lane.index] = lane.block.clock
    barrier.seen = [max(pair) for pair in zip(barrier.seen, published, strict=True)]
    barrier.missing -= 1
    barrier.settle()


def mbarrier_wait(address: int, parity: int) -> None:
    lane, barrier = _lane(), _mbarrier(address)
    if barrier.phase == parity:
        lane.wait("until", address, lambda: barrier.phase != parity)
    lane.seen = [max(pair) for pair in zip(barrier.seen, lane.seen, strict=True)]


def bulk_copy(target: int, source: int, n_bytes: int, address: int) -> None:
    lane, barrier, machine = _lane(), _mbarrier(address), _now()
    if n_bytes % 16 or target % 16 or source % 16:
        raise EmulationError(f"bulk copy of {n_bytes} bytes from {source:#x} to {target}: not aligned to 16")
    engine = len(lane.seen) - 1
    data = b"".join(machine.load(source + i, 16) for i in range(0, n_bytes, 16))
    for i in range(0, n_bytes, 16):
        lane.block.shared.write(lane, target + i, data[i : i + 16], lane.stamp()._replace(lane=engine))
    lane.block.clock += 1
    barrier.seen[engine] = lane.block.clock
    barrier.pending_bytes -= n_bytes
    barrier.settle()


def _one_bulk_copy(operands: Sequence[Any], warp: Warp) -> list[None]:
    if len(set(operands)) > 1:
        raise EmulationError("the lanes of a warp ask for different bulk copies")
    bulk_copy(*operands[0])
    return [None] * 32


warp_bulk_copy = _collective(_one_bulk_copy)


def mbarrier_fence_init() -> None: ...


def fence_async_shared() -> None:
    lane = _lane()
    lane.block.clock += 1
    lane.fenced_at = lane.block.clock


# ---- memory


def _read(address: int, n_bytes: int) -> bytes:
    lane = _lane()
    return lane.block.shared.read(lane, address, n_bytes)


def _write(address: int, data: bytes) -> None:
    lane = _lane()
    lane.block.shared.write(lane, address, data)


def _loader(code: str, n: int, width: int, *, shared: bool = False) -> Callable[[int], Any]:
    def load(address: int) -> Any:
        data = _read(address, n * width) if shared else _now().load(address, n * width)
        values = unpack(code, data)
        return values[0] if n == 1 else values

    return load


def _storer(code: str, *, shared: bool = False) -> Callable[..., None]:
    def store(address: int, *values: Any) -> None:
        (_write if shared else _now().store)(address, pack(code, values))

    return store


load_u16 = _loader("H", 1, 2)
load_u32, load_u64, load_u32x4 = _loader("i", 1, 4), _loader("q", 1, 8), _loader("i", 4, 4)
load_u32x4_const = load_u32x4_stream = load_u32x4
load_f32, load_f32x2, load_f32x4 = _loader("f", 1, 4), _loader("f", 2, 4), _loader("f", 4, 4)
load_f32_l2, load_f32x4_l2 = load_f32, load_f32x4
store_u16, store_u64 = _storer("H"), _storer("q")
store_u32 = store_u32x2 = store_u32x4 = _storer("i")
store_f32 = store_f32x2 = store_f32x4 = _storer("f")
shared_load_u32, shared_load_u32x4 = _loader("i", 1, 4, shared=True), _loader("i", 4, 4, shared=True)
shared_load_f32, shared_load_f32x4 = _loader("f", 1, 4, shared=True), _loader("f", 4, 4, shared=True)
shared_store_u32 = shared_store_u32x4 = _storer("i", shared=True)
shared_store_f32 = shared_store_f32x2 = shared_store_f32x4 = _storer("f", shared=True)


def shared_address(array: _SharedArray) -> int:
    return array.offset


# ---- warp-wide exchange


def _exchange_xor(operands: Sequence[Any], warp: Warp) -> list[Any]:
    return [operands[lane ^ o[1]][0] for lane, o in enumerate(operands)]


def _exchange_index(operands: Sequence[Any], warp: Warp) -> list[Any]:
    return [operands[o[1] & 31][0] for o in operands]


def _largest(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [max(o[0] for o in operands)] * 32


def _smallest(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [min(o[0] for o in operands)] * 32


def _vote_any(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [int(any(o[0] for o in operands))] * 32


def _vote_ballot(operands: Sequence[Any], warp: Warp) -> list[int]:
    return [i32(sum((o[0] != 0) << lane for lane, o in enumerate(operands)))] * 32


shuffle_xor_f32 = shuffle_xor_i32 = _collective(_exchange_xor)
shuffle_i32 = _collective(_exchange_index)
warp_max_i32 = _collective(_largest)
warp_min_i32 = _collective(_smallest)
any_lane = _collective(_vote_any)
ballot = _collective(_vote_ballot)


# ---- order between blocks and kernels


def named_barrier(name: int, count: int) -> None:
    _lane().wait("named", (name, count))


def named_arrive(name: int, count: int) -> None:
    lane = _lane()
    lane.block.arrive((name, count), lane)


def fence_gpu() -> None: ...


def atomic_add_i32(address: int, value: int) -> int:
    before: int = load_u32(address)
    store_u32(address, before + value)
    return before


def wait_count(address: int, value: int) -> None:
    _now().load(address, 4)  # may we read it?
    _lane().wait("count", address, lambda: ctypes.c_int32.from_address(address).value >= value)


def wait_previous() -> None:
    _lane().has_waited = True


def let_next_start() -> None: ...


MMA = {"bf16": mma_bf16, "f16": mma_f16}
PACK = {"bf16": pack_bf16, "f16": pack_f16}
LOW = {"bf16": low_bf16, "f16": low_f16}
HIGH = {"bf16": high_bf16, "f16": high_f16}
