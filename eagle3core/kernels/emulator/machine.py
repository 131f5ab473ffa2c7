"""The emulator's machine: one launch, block after block, and the global memory it may touch.

Every global access lies inside an operand, is aligned, is written only if the operand is an output, and does not come
before `wait_previous` unless the operand is constant.

Source: derived here; the memory rules are those of the PTX ISA's consistency model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from eagle3core.kernels.emulator.block import Block, Lane, run_together
from eagle3core.kernels.emulator.machine_memory import EmulationError as EmulationError
from eagle3core.kernels.emulator.machine_memory import Region as Region

_REGISTERS, _LANE_REGISTERS = 65536, 255  # of a processor; that a lane can name


class Machine:
    """Runs one launch, block after block; one that waits for others is resumed after them.

    Args:
        kernel: the kernel made for the emulator.
        arguments: addresses and numbers in parameter order.
        regions: the operands.
        n_threads: of a block, a multiple of 32.
        shared_bytes: dynamic shared memory of a block.
        is_dependent: the kernel must call `wait_previous` before it touches anything but constants.
        cluster: blocks that run side by side.
        blocks_per_sm: that the compiler leaves registers for: the more, the fewer has a lane at the launch.
    """

    def __init__(
        self,
        kernel: Callable[..., None],
        arguments: Sequence[Any],
        regions: Sequence[Region],
        n_threads: int,
        shared_bytes: int,
        is_dependent: bool,
        cluster: tuple[int, int, int] = (1, 1, 1),
        blocks_per_sm: int = 1,
    ) -> None:
        self.kernel, self.arguments, self.regions = kernel, arguments, regions
        self.n_threads, self.shared_bytes, self.is_dependent = n_threads, shared_bytes, is_dependent
        self.grid, self.cluster = (1, 1, 1), cluster
        # A multiple of 8, and the most that the compiler can launch with: fewer where no warpgroup asks for as many.
        self.lane_registers = min(_LANE_REGISTERS, _REGISTERS // (blocks_per_sm * n_threads)) // 8 * 8
        self.current: Lane
        # The operands no other shares bytes with, by address: most accesses are to the one found last.
        self._own = [r for r in regions if not any(r is not o and o.start < r.end and r.start < o.end for o in regions)]
        self._last = self._own[0] if self._own else None

    def lane_body(self) -> None:
        # Each greenlet has its own context, hence its own numpy error state.
        with np.errstate(all="ignore"):
            self.kernel(*self.arguments)

    def run(self, grid: tuple[int, int, int]) -> None:
        self.grid = grid
        if any(n % of for n, of in zip(grid, self.cluster, strict=True)):
            raise EmulationError(f"a grid of {grid} in clusters of {self.cluster}")
        parked: list[list[Block]] = []
        for blocks in self._clusters(grid):
            if not run_together(blocks):
                parked.append(blocks)
            elif parked:
                parked = [others for others in parked if not run_together(others)]
        while parked:
            left = [blocks for blocks in parked if not run_together(blocks)]
            if len(left) == len(parked):
                raise EmulationError(f"deadlock: {len(left)} blocks wait for a count that nobody reaches")
            parked = left

    def _clusters(self, grid: tuple[int, int, int]) -> Iterator[list[Block]]:
        """Blocks of each cluster, in the order of the grid; ranks count x first."""
        (a, b, c), (x, y, z) = self.cluster, grid
        for first in product(range(0, z, c), range(0, y, b), range(0, x, a)):
            steps = product(range(c), range(b), range(a))
            blocks = [Block(self, (first[2] + s[2], first[1] + s[1], first[0] + s[0])) for s in steps]
            for block in blocks:
                block.cluster = blocks
            yield blocks

    def region(self, address: int, n_bytes: int, *, writes: bool) -> Region:
        """The operand that holds these bytes, after all checks."""
        if address % n_bytes:
            raise EmulationError(f"global address {address:#x} is not aligned to {n_bytes} bytes")
        region = self._last
        if region is None or not (region.start <= address and address + n_bytes <= region.end):
            region = self._holding(address, n_bytes, writes=writes)
        if writes and not region.is_writable:
            raise EmulationError(f"{region.name} is written, but it is not an output")
        if region.is_counter:
            if self.current.lets_next_start:
                raise EmulationError(f"{region.name} is counted at after let_next_start")
        elif self.is_dependent and not self.current.has_waited and (writes or not region.is_early):
            raise EmulationError(f"{region.name} is touched before wait_previous")
        return region

    def _holding(self, address: int, n_bytes: int, *, writes: bool) -> Region:
        holding = [r for r in self.regions if r.start <= address and address + n_bytes <= r.end]
        if not holding:
            near = min(self.regions, key=lambda r: min(abs(address - r.start), abs(address - r.end)))
            raise EmulationError(
                f"global access of {n_bytes} bytes is out of bounds: {address - near.start} bytes into {near.name}, "
                f"which has {near.end - near.start}"
            )
        # One tensor may stand behind two parameters, e.g. read as `in` and updated as `inout`.
        region = max(holding, key=lambda r: r.is_writable if writes else r.is_early)
        if region in self._own:
            self._last = region
        return region

    def load(self, address: int, n_bytes: int) -> bytes:
        self.region(address, n_bytes, writes=False)
        return ctypes.string_at(address, n_bytes)

    def store(self, address: int, data: bytes) -> None:
        self.region(address, len(data), writes=True)
        ctypes.memmove(address, data, len(data))
