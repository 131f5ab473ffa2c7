"""Products of a warpgroup in the emulator: four warps, one operand in shared memory, sums that are not yours at once.

From the product to the wait that covers it, the sums cannot be read (arithmetic on them raises) and nobody may write
the shared operand, which counts as being read until then.

What its lanes give up of their registers, or wait for, is counted: a block has those of its launch and no others.

What nobody has written is no number in either format, where a product reads it: columns of the result that are not used
may come of such places.

Source: PTX ISA 9.0, asynchronous warpgroup-level matrix instructions, matrix descriptor without swizzle and with that
of 128 bytes, setmaxnreg.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from eagle3core.kernels.emulator.block import GROUP, WARP, Lane
from eagle3core.kernels.emulator.machine_memory import EmulationError, swizzled
from eagle3core.kernels.emulator.numbers import f32, halves, wide_bf16, wide_f16

_WIDEN = {"bf16": wide_bf16, "f16": wide_f16}
_ROW, _COL = np.arange(WARP) >> 2, np.arange(WARP) & 3
_NO_NUMBERS = b"\xff" * 16


class UnderWay:
    """A sum that the tensor cores still own: it has a value for them and no arithmetic for the kernel.

    `batch`: of products, the lane's, that is to give it; None: no product does.
    """

    def __init__(self, value: Any, batch: list[Any] | None) -> None:
        self.value, self.batch = value, batch


@cache
def products(
    kind: str, n: int, fresh: bool = False, transposed: bool = False, asks: bool = False
) -> Callable[[Sequence[Any], Sequence[Lane]], list[None]]:
    """What wgmma.m64n`n`k16 does with (sums, a0, a1, a2, a3, descriptor) of 128 lanes; options as in `isa.group`."""
    widen = _WIDEN[kind]

    def group_product(operands: Sequence[Any], lanes: Sequence[Lane]) -> list[None]:
        if not all(lane.is_fenced for lane in lanes):
            raise EmulationError("a warpgroup multiplies without group_fence after its registers changed")
        if len({o[5:] for o in operands}) > 1:
            raise EmulationError("the lanes of a warpgroup name different shared operands, or begin sums apart")
        if transposed:
            right = widen(_shared_columns(operands[0][-1], n, lanes))
        else:
            right = widen(_shared_operand(operands[0][-1], n, lanes)).T  # [16, n]
        begins = operands[0][5] == 0 if asks else fresh
        for start in range(0, len(lanes), WARP):
            batches = [lane.open_products for lane in lanes[start : start + WARP]]
            _warp_product(operands[start : start + WARP], right, widen, begins, batches)
        return [None] * len(lanes)

    return group_product


def _warp_product(
    operands: Sequence[Any], right: Any, widen: Callable[[Any], Any], fresh: bool, batches: Sequence[list[Any]]
) -> None:
    a = widen(halves([o[1:5] for o in operands]))  # [32, 4, 2]
    n = right.shape[1]
    c = (
        np.zeros((WARP, n // 2), f32)
        if fresh
        else np.array([[v.value if isinstance(v, UnderWay) else v for v in o[0][: n // 2]] for o in operands], f32)
    )
    left, total = np.zeros((16, 16), f32), np.zeros((16, n), f32)
    columns = 8 * np.arange(n // 8)[None, :] + 2 * _COL[:, None]  # [32, n / 8]
    for half in range(2):
        at = 2 * _COL + half
        left[_ROW, at], left[_ROW + 8, at] = a[:, 0, half], a[:, 1, half]
        left[_ROW, at + 8], left[_ROW + 8, at + 8] = a[:, 2, half], a[:, 3, half]
        total[_ROW[:, None], columns + half] = c[:, half::4]
        total[_ROW[:, None] + 8, columns + half] = c[:, half + 2 :: 4]
    with np.errstate(all="ignore"):
        for k in range(16):
            total = total + left[:, k, None] * right[None, k]
    for lane, o in enumerate(operands):
        for i in range(n // 2):
            row, column = _ROW[lane] + 8 * (i >> 1 & 1), columns[lane, i >> 2] + (i & 1)
            o[0][i] = UnderWay(total[row, column], batches[lane])


def _shared_operand(descriptor: int, n: int, lanes: Sequence[Lane]) -> Any:
    """uint16 `[n, 16]`; the first lane of every warp reads it, from now until its wait."""
    start, k_step, n_step = _steps_of(descriptor)
    rows = []
    for row in range(n):
        if _is_swizzled(descriptor):  # 8 rows of 128 bytes together, of which 16 k are 32 bytes
            first = start + (row >> 3) * n_step + (row & 7) * 128
            pieces = [swizzled(first), swizzled(first + 16)]
        else:
            pieces = [start + (row >> 3) * n_step + core * k_step + (row & 7) * 16 for core in range(2)]
        rows.append(_read_pieces(pieces, lanes))
    return np.stack(rows)


def _shared_columns(descriptor: int, n: int, lanes: Sequence[Lane]) -> Any:
    """uint16 `[16, n]` of a transposed operand; otherwise as `_shared_operand`."""
    start, k_step, n_step = _steps_of(descriptor)
    rows = []
    for k in range(16):
        if _is_swizzled(descriptor):  # 8 k of 64 columns together; the first step leads on to further columns
            first = start + (k >> 3) * n_step + (k & 7) * 128
            pieces = [swizzled(first + (core >> 3) * k_step + (core & 7) * 16) for core in range(n // 8)]
        else:
            pieces = [start + core * n_step + (k >> 3) * k_step + (k & 7) * 16 for core in range(n // 8)]
        rows.append(_read_pieces(pieces, lanes))
    return np.stack(rows)


def _steps_of(descriptor: int) -> tuple[int, int, int]:
    """Where the operand starts, and how far apart its pieces of 8 x 16 bytes are along k and along n."""
    if descriptor >> 46 not in (0, 1 << 16):
        raise EmulationError(f"descriptor {descriptor:#x} asks for a swizzle, or a shift, which is not emulated")
    start, k_step, n_step = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    return start, k_step, n_step


def _is_swizzled(descriptor: int) -> bool:
    """Whether it is the swizzle of 128 bytes, the other one that is emulated."""
    return descriptor >> 62 == 1


def _read_pieces(pieces: Sequence[int], lanes: Sequence[Lane]) -> Any:
    """uint16 of 16-byte pieces; the first lane of every warp reads them, from now until its wait."""
    for lane in lanes[::WARP]:
        shared = lane.block.shared
        data = b"".join(_read(lane, at) for at in pieces)
        for at in pieces:
            _check_fenced(lane, at)
            lane.open_products += [(word, shared.written[word]) for word in range(at >> 2, (at >> 2) + 4)]  # type: ignore[misc]
    return np.frombuffer(data, np.uint16)


def _read(lane: Lane, at: int) -> bytes:
    shared = lane.block.shared
    if all(shared.written[word] is None for word in shared.words(at, 16)):
        return _NO_NUMBERS
    return shared.read(lane, at, 16)


def any_flag(operands: Sequence[Any], lanes: Sequence[Lane]) -> list[int]:
    """What `group_any` gives to (name, flag) of 128 lanes."""
    if len({name for name, _ in operands}) > 1:
        raise EmulationError("the lanes of a warpgroup wait at different barriers for a flag")
    return [int(any(flag for _, flag in operands))] * len(lanes)


def _check_fenced(lane: Lane, at: int) -> None:
    """Bulk copies complete for everyone; what a lane stores or copies, the tensor cores see after a fence only.

    It is that lane's own, or one of the lane that multiplies, after it came to see the store."""
    for word in range(at >> 2, (at >> 2) + 4):
        stamp = lane.block.shared.written[word]
        writers = lane.block.lanes
        if stamp is None or stamp.lane >= len(writers) or stamp.time < writers[stamp.lane].fenced_at:
            continue
        if not lane.fenced_seen or stamp.time >= lane.fenced_seen[stamp.lane]:
            raise EmulationError(f"a product reads shared byte {word * 4} without fence_async_shared after its store")


def give_registers(counts: Sequence[int], lanes: Sequence[Lane]) -> list[None]:
    """The warpgroup keeps as many registers a lane; who asks for more may have the others."""
    registers, own = lanes[0].block.registers, lanes[0].index // GROUP
    if counts[0] > registers[own]:
        raise EmulationError(f"a warpgroup whose lanes have {registers[own]} registers gives all but {counts[0]}")
    registers[own] = counts[0]
    return agree_on_registers(counts, lanes)


def take_registers(lane: Lane, n: int) -> None:
    """Waits until the lanes of the warpgroup can have `n` registers each."""
    lane.wait("group", agree_on_registers, n)
    block, own = lane.block, lane.index // GROUP

    def has_taken() -> bool:
        others = sum(block.registers) - block.registers[own]
        if others + n <= block.machine.lane_registers * len(block.registers):
            block.registers[own] = max(n, block.registers[own])
        return block.registers[own] >= n

    if not has_taken():
        lane.wait("until", "registers", has_taken)


def agree_on_registers(counts: Sequence[int], lanes: Sequence[Lane]) -> list[None]:
    """All lanes of a warpgroup name the same count, one that the instruction can hold."""
    if len(set(counts)) > 1 or counts[0] % 8 or not 24 <= counts[0] <= 256:
        raise EmulationError(f"the lanes of a warpgroup ask for {sorted(set(counts))} registers each")
    return [None] * len(lanes)


def commit(lane: Lane) -> None:
    """Closes the lane's batch of products; registers that change afterwards need a fence."""
    lane.products.append(lane.open_products)
    lane.open_products, lane.is_fenced = [], False


def wait(lane: Lane, n: int) -> None:
    """Until at most the `n` newest batches are under way; what the others read must still be what it was."""
    shared = lane.block.shared
    while len(lane.products) > n:
        for word, stamp in lane.products.pop(0):
            if shared.written[word] != stamp:
                raise EmulationError(f"shared byte {word * 4} was overwritten while a product under way reads it")
            if stamp is not None:
                shared.read(lane, word * 4, 4)


def forget(sums: list[Any], n_sums: int) -> None:
    """The sums are no numbers: a product that goes on from them gives none, and arithmetic on them raises."""
    sums[:n_sums] = [UnderWay(f32(np.nan), None) for _ in range(n_sums)]


def settle(lane: Lane, sums: list[Any], n_sums: int, n_under_way: int) -> None:
    """Waits for all products but those of the newest batches; the sums, which are none of theirs, become numbers."""
    wait(lane, n_under_way)
    for i in range(n_sums):
        v = sums[i]
        if isinstance(v, UnderWay):
            if any(v.batch is batch for batch in lane.products):
                raise EmulationError("sums are used that a batch under way is to write")
            sums[i] = v.value
