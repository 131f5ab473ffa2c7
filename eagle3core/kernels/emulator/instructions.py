"""The CPU twin of `ptx`: the same names, so that a kernel factory given this module yields a kernel that runs here.

`execute` runs a `Launch` lane by lane on `machine.Machine` with all of its checks. Approximate instructions are exact
here, `mma` adds its sixteen products one after the other in fp32 (so an order that differs shows in the bits).

Source: PTX ISA 9.0, fragment layouts of mma.m16n8k16 and ldmatrix; the rest derived here.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import Any

from eagle3core.kernels.card import Launch
from eagle3core.kernels.emulator import cluster as cluster
from eagle3core.kernels.emulator import group as emulator_group
from eagle3core.kernels.emulator.copies import (  # noqa: F401  part of the instruction set
    ARRIVING_LANES,
    COPY_WAIT,
    bulk_copy,
    copies_arrive,
    copy16,
    copy16_cached,
    copy16_cached_fill,
    copy16_fill,
    copy_commit,
    fence_async_shared,
    looks_in_vain,
    mbarrier_arrive,
    mbarrier_arrive_below,
    mbarrier_expect,
    mbarrier_fence_init,
    mbarrier_init,
    mbarrier_is_over,
    mbarrier_poll,
    mbarrier_wait,
    tensor_copy,
    tensor_map_acquire,
    warp_bulk_copy,
    warp_bulk_fill,
)
from eagle3core.kernels.emulator.cuda import SharedArray, cuda  # noqa: F401
from eagle3core.kernels.emulator.machine import Machine, Region
from eagle3core.kernels.emulator.memory import (  # noqa: F401  part of the instruction set
    address_after,
    load_f32,
    load_f32_l2,
    load_f32x2,
    load_f32x4,
    load_f32x4_l2,
    load_u16,
    load_u32,
    load_u32x2,
    load_u32x4,
    load_u32x4_const,
    load_u32x4_l2,
    load_u32x4_stream,
    load_u64,
    shared_load_f32,
    shared_load_f32x4,
    shared_load_u32,
    shared_load_u32x2,
    shared_load_u32x4,
    shared_store_f32,
    shared_store_f32x2,
    shared_store_f32x4,
    shared_store_u32,
    shared_store_u32x4,
    store_f32,
    store_f32x2,
    store_f32x4,
    store_u8,
    store_u16,
    store_u32,
    store_u32_below,
    store_u32_twice_below,
    store_u32x2,
    store_u32x2_below,
    store_u32x4,
    store_u64,
)
from eagle3core.kernels.emulator.now import lane, now, run
from eagle3core.kernels.emulator.numbers import (  # noqa: F401  part of the instruction set
    F16_OF_E4M3,
    F16_OF_E4M3_APART,
    WIDEN_E2M1_BF16,
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
    powers_bf16,
    product,
    quotient,
    reciprocal,
    rsqrt,
    widen_e4m3_bf16,
    widen_e4m3_f16,
)
from eagle3core.kernels.emulator.warp import (  # noqa: F401  part of the instruction set
    any_lane,
    ballot,
    lane_number,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_bf16,
    mma_f16,
    shuffle_i32,
    shuffle_xor_f32,
    shuffle_xor_i32,
    transpose,
    warp_max_i32,
    warp_min_i32,
)


def execute(launches: Iterable[Launch], isa: Any = None) -> None:
    """Run launches on CPU tensors, one after the other; `isa` replaces this module, e.g. to plant a fault.

    Raises:
        EmulationError: on any access, race, divergence or deadlock that a GPU would not forgive.
    """
    for launch in launches:
        variant = launch.variant
        kernel = variant.make(isa or sys.modules[__name__], **variant.constants)
        arguments, regions = _operands(launch)
        machine = Machine(
            kernel, arguments, regions, variant.threads, variant.shared_bytes, variant.dependent, variant.cluster,
            variant.blocks_per_sm,
        )  # fmt: skip
        run(machine, launch.grid)


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
            role = parameter.role
            regions.append(
                Region(
                    parameter.name, start, end, role in ("const", "counter"), role in ("out", "inout", "counter"),
                    role == "counter",
                )
            )  # fmt: skip
    return arguments, regions


i64 = int


def inlined(function: Callable[..., Any], *, early: bool = False) -> Any:
    """Nothing to do: a Python function is called."""
    return function


# ---- tensor cores of a warpgroup


def group_mma(
    kind: str, n: int, fresh: bool = False, transposed: bool = False, asks: bool = False
) -> Callable[..., None]:
    act = emulator_group.products(kind, n, fresh, transposed, asks)
    return lambda *operands: lane().wait("group", act, operands)


def group_any(name: int, flag: int) -> Any:
    return lane().wait("group", emulator_group.any_flag, (name, flag))


def fewer_registers(n: int) -> Callable[[], None]:
    return lambda: lane().wait("group", emulator_group.give_registers, n)


def more_registers(n: int) -> Callable[[], None]:
    return lambda: emulator_group.take_registers(lane(), n)


def group_settle(n: int, under_way: int = 0) -> Callable[..., None]:
    return lambda sums: emulator_group.settle(lane(), sums, n // 2, under_way)


def group_forget(n: int) -> Callable[..., None]:
    return lambda sums: emulator_group.forget(sums, n // 2)


def _group_wait(n: int) -> Callable[[], None]:
    return lambda: emulator_group.wait(lane(), n)


GROUP_WAIT = tuple(_group_wait(n) for n in range(4))


def group_fence() -> None:
    lane().is_fenced = True


def group_commit() -> None:
    emulator_group.commit(lane())


def shared_address(array: SharedArray) -> int:
    return array.offset


# ---- order between blocks and kernels


def named_barrier(name: int, count: int) -> None:
    lane().wait("named", (name, count))


def named_arrive(name: int, count: int) -> None:
    current = lane()
    current.block.arrive((name, count), current)


def fence_gpu() -> None: ...


def clock() -> int:
    """A time that goes on whenever it is looked at."""
    block = lane().block
    block.n_looks += 1
    return 100 * block.n_looks


def atomic_add_i32(address: int, value: int) -> int:
    before: int = load_u32(address)
    store_u32(address, before + value)
    return before


def atomic_inc_i32(address: int, last: int) -> int:
    before: int = load_u32(address)
    store_u32(address, 0 if before >= last else before + 1)
    return before


def atomic_exchange_i32(address: int, value: int) -> int:
    before: int = load_u32(address)
    if before == value:
        looks_in_vain(lane(), f"the word at {address}")
    store_u32(address, value)
    return before


def processor() -> int:
    """Where a block is nobody may rely on: here three blocks in a row share a processor."""
    return int(lane().block.index[0]) // 3


def count_round(address: int, last: int) -> None:
    before: int = load_u32(address)
    store_u32(address, 0 if before >= last else before + 1)


def wait_count(address: int, value: int) -> None:
    now().load(address, 4)  # may we read it?
    lane().wait("count", address, lambda: ctypes.c_int32.from_address(address).value >= value)


def wait_previous() -> None:
    lane().has_waited = True


def let_next_start() -> None:
    lane().lets_next_start = True


MMA = {"bf16": mma_bf16, "f16": mma_f16}
WIDEN_E4M3 = {"bf16": widen_e4m3_bf16, "f16": widen_e4m3_f16}
PACK = {"bf16": pack_bf16, "f16": pack_f16}
LOW = {"bf16": low_bf16, "f16": low_f16}
HIGH = {"bf16": high_bf16, "f16": high_f16}
