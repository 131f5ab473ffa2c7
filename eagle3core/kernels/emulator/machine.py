"""The emulator's machine: lanes of one block, its shared memory, and the global memory they may touch.

Lanes are greenlets that run until they need another lane. Beyond running the kernel, the machine proves what a GPU
would leave to luck:
- every global access lies inside an operand, is aligned, is written only if the operand is an output, and does not
  come before `wait_previous` unless the operand is constant;
- every shared word is read after it was written, with a barrier between the two lanes (vector clocks per lane), and
  never while an asynchronous copy into it is under way; the same for overwriting what another lane has read;
- a warpgroup that asks for registers finds as many as its block was launched with and others have given back;
- all lanes of a warp meet at the same collective, and nobody waits for ever.

Source: derived here; the memory rules are those of the PTX ISA's consistency model, narrowed to one block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels.emulator.machine_memory import Arrivals as Arrivals
from eagle3core.kernels.emulator.machine_memory import EmulationError as EmulationError
from eagle3core.kernels.emulator.machine_memory import Region as Region
from eagle3core.kernels.emulator.machine_memory import Shared, Stamp

try:
    from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
except ModuleNotFoundError as missing:  # an optional tool: only the emulator needs it
    raise BackendUnavailable(
        "the emulator runs the lanes of a kernel as greenlets, and greenlet is not installed",
        "greenlet 3.2 or later",
        'pip install greenlet, or "eagle3lab[compile]" with all that checks kernels without a GPU',
    ) from missing

WARP = 32
GROUP = 128  # lanes of a warpgroup
_REGISTERS, _LANE_REGISTERS = 65536, 255  # of a processor; that a lane can name


@dataclass(slots=True)
class Lane:
    """One thread and what it waits for."""

    index: int
    block: Block
    body: greenlet
    is_ready: bool = True
    is_done: bool = False
    has_waited: bool = False
    request: tuple[Any, ...] = ()
    answer: Any = None
    groups: list[list[tuple[int, int, int]]] = field(default_factory=list)
    open_group: list[tuple[int, int, int]] = field(default_factory=list)
    is_fenced: bool = False
    fenced_at: int = 0  # its writes before this time may be read by the tensor cores
    fenced_seen: list[int] = field(default_factory=list)  # `seen` at its last fence: its own products may read that
    products: list[list[tuple[int, Stamp]]] = field(default_factory=list)  # shared words that batches under way read
    open_products: list[tuple[int, Stamp]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  # per lane: its writes before this time are visible to us
    peers: dict[int, list[int]] = field(default_factory=dict)  # the same of other blocks of the cluster, by rank
    meetings: int = 0  # of its cluster, so far

    def wait(self, *request: Any) -> Any:
        """Stop here until the machine answers `request`."""
        self.request, self.is_ready = request, False
        self.block.hub.switch()
        return self.answer

    def stamp(self) -> Stamp:
        return Stamp(self.index, self.block.clock)


class Block:
    """One thread block while it runs."""

    def __init__(self, machine: Machine, index: tuple[int, int, int]) -> None:
        self.machine, self.index = machine, index
        self.hub = getcurrent()
        self.cluster = [self]  # all of its blocks, in the order of their ranks
        self.clock, self.n_turns = 1, 0  # of which something could go on
        self.n_looks = 0  # of lanes at the time, or in vain at an mbarrier
        self.shared = Shared(machine.shared_bytes)
        self.mbarriers: dict[int, Arrivals] = {}
        self.acquired: dict[int, list[Stamp]] = {}  # by whom, and when, a tensor map at an address was
        self.arrived: dict[tuple[int, int], list[list[int]]] = {}  # what lanes published that went on at once
        n = machine.n_threads
        self.registers = [machine.lane_registers] * (n // GROUP)  # of a lane of each warpgroup
        self.lanes = [Lane(i, self, greenlet(machine.lane_body), seen=[0] * (n + 1)) for i in range(n)]

    def synchronise(self, group: Sequence[Lane]) -> None:
        """What each of `group` wrote so far becomes visible to all of it."""
        self.clock += 1
        distinct = list({id(lane.seen): lane.seen for lane in group}.values())
        seen = list(distinct[0]) if len(distinct) == 1 else list(map(max, *distinct))
        for lane in group:
            seen[lane.index] = self.clock
        for lane in group:
            lane.seen, lane.is_ready = seen, True

    def arrive(self, barrier: tuple[int, int], lane: Lane) -> None:
        """`lane` counts at a named barrier without waiting there; those who wait see what it wrote so far."""
        self.clock += 1
        published = list(lane.seen)
        published[lane.index] = self.clock
        self.arrived.setdefault(barrier, []).append(published)

    def run(self) -> bool:
        """Until all lanes are done, or some wait for what another block has to count; whether they are done."""
        while not all(lane.is_done for lane in self.lanes):
            progress = self._resume()
            progress |= self._serve_collectives("warp", WARP)
            progress |= self._serve_collectives("group", GROUP)
            progress |= self._serve_barriers()
            self.n_turns += progress
            if not progress:
                if len(self.cluster) > 1 or any(lane.request[0] == "count" for lane in self.lanes if not lane.is_done):
                    return False
                waiting = {(lane.index, lane.request[:2]) for lane in self.lanes if not lane.is_done}
                raise EmulationError(f"deadlock in block {self.index}: {sorted(waiting, key=str)[:8]} ...")
        late = {lane.index for barrier in self.mbarriers.values() for lane, _ in barrier.with_copies}
        for address, barrier in self.mbarriers.items():
            if barrier.pending_bytes:
                kind = "more than" if barrier.pending_bytes < 0 else "fewer of"
                raise EmulationError(
                    f"block {self.index} ends with {abs(barrier.pending_bytes)} bytes {kind} those that the barrier at"
                    f" {address} was told of"
                )
        for lane in self.lanes:
            if self.machine.is_dependent and not lane.has_waited:
                raise EmulationError(f"lane {lane.index} ends without wait_previous")
            if any(lane.groups) or lane.open_group or lane.index in late:
                raise EmulationError(f"lane {lane.index} ends with asynchronous copies under way")
            if any(lane.products) or lane.open_products:
                raise EmulationError(f"lane {lane.index} ends with products of its warpgroup under way")
        return True

    def _resume(self) -> bool:
        progress = False
        for lane in self.lanes:
            if lane.is_ready and not lane.is_done:
                self.machine.current = lane
                lane.body.switch()
                lane.is_done = lane.body.dead
                progress = True
        return progress

    def _serve_collectives(self, team: str, size: int) -> bool:
        progress = False
        for start in range(0, len(self.lanes) - size + 1, size):
            warp = self.lanes[start : start + size]
            if any(lane.is_done or lane.is_ready or lane.request[0] != team for lane in warp):
                continue
            kinds = {lane.request[1] for lane in warp}
            if len(kinds) > 1:
                raise EmulationError(f"{team} {start // size} is divided between {sorted(k.__name__ for k in kinds)}")
            self.machine.current = warp[0]
            answers = kinds.pop()([lane.request[2] for lane in warp], warp)
            for lane, answer in zip(warp, answers, strict=True):
                lane.answer, lane.is_ready = answer, True
            progress = True
        return progress

    def _serve_barriers(self) -> bool:
        live = [lane for lane in self.lanes if not lane.is_done]
        waiting = [lane for lane in live if not lane.is_ready]
        if live and len(waiting) == len(live) and all(lane.request[0] == "block" for lane in live):
            self.synchronise(live)
            return True
        progress = False
        groups: dict[tuple[int, int], list[Lane]] = {}
        for lane in waiting:
            if lane.request[0] == "named":
                groups.setdefault(lane.request[1], []).append(lane)
            elif lane.request[0] in ("until", "count") and lane.request[2]():
                lane.is_ready = progress = True
        for barrier, group in groups.items():
            early = self.arrived.get(barrier, [])
            if len(group) + len(early) > barrier[1]:
                raise EmulationError(f"named barrier {barrier[0]}: more than {barrier[1]} lanes")
            if len(group) + len(early) == barrier[1]:
                self.synchronise(group)
                if early:
                    seen = list(map(max, group[0].seen, *early))
                    for lane in group:
                        lane.seen = seen
                    del self.arrived[barrier]
                progress = True
        return progress


def run_together(blocks: list[Block]) -> bool:
    """Run the blocks of a cluster by turns until all are done, or none can go on; whether they are done."""
    left = [block for block in blocks if not all(lane.is_done for lane in block.lanes)]
    while left:
        before = sum(block.n_turns for block in blocks)
        left = [block for block in left if not block.run()]
        if left and sum(block.n_turns for block in blocks) == before:
            return False
    return True


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
        if self.is_dependent and not self.current.has_waited and (writes or not region.is_early):
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
