"""One block of the emulator's machine: its lanes, what they wait for, and its shared memory.

Lanes are greenlets that run until they need another lane. Beyond running them, a block proves what a GPU would leave to
luck:
- every shared word is read after it was written, with a barrier between the two lanes (vector clocks per lane), and
  never while an asynchronous copy into it is under way; the same for overwriting what another lane has read;
- a warpgroup that asks for registers finds as many as its block was launched with and others have given back;
- all lanes of a warp meet at the same collective, and nobody waits for ever.

Source: derived here; the memory rules are those of the PTX ISA's consistency model, narrowed to one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels.emulator.machine_memory import Arrivals, EmulationError, Shared, Stamp

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


@dataclass(slots=True)
class Lane:
    """One thread and what it waits for."""

    index: int
    block: Block
    body: greenlet
    is_ready: bool = True
    is_done: bool = False
    has_waited: bool = False
    lets_next_start: bool = False
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


class Launched(Protocol):
    """What a block asks of the launch that it is one of: `machine.Machine`."""

    n_threads: int
    shared_bytes: int
    lane_registers: int
    is_dependent: bool
    current: Lane

    def lane_body(self) -> None:
        """Runs the kernel as the lane that is current."""


class Block:
    """One thread block while it runs."""

    def __init__(self, machine: Launched, index: tuple[int, int, int]) -> None:
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
