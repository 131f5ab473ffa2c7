"""Copies that run beside the lanes, in the emulator: of a lane, which waits for its own, and bulk ones with barriers.

What a lane copies arrives when it waits for it, never earlier. The engine of bulk copies is one lane more, whose writes
those see who wait for the barrier. Source: PTX ISA 9.0, cp.async, cp.async.bulk, cp.async.bulk.tensor and mbarrier.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from eagle3core.kernels.emulator.block import Block, Lane
from eagle3core.kernels.emulator.machine_memory import IN_FLIGHT, Arrivals, EmulationError, swizzled
from eagle3core.kernels.emulator.now import Warp, collective, now
from eagle3core.kernels.emulator.now import lane as current
from eagle3core.kernels.tensor_map import BOX_BYTES, STANDIN

MOST_LOOKS = 100_000  # in vain, of a block that does not wait


def copy16_fill(target: int, source: int, n_bytes: int) -> None:
    lane = current()
    if n_bytes not in (0, 16):
        raise EmulationError(f"copy of {n_bytes} bytes; 0 or 16 are allowed")
    if n_bytes:
        now().region(source, 16, writes=False)
    lane.block.shared.claim(lane, target, 16, IN_FLIGHT)
    lane.open_group.append((target, source, n_bytes))


def copy16(target: int, source: int) -> None:
    copy16_fill(target, source, 16)


copy16_cached, copy16_cached_fill = copy16, copy16_fill


def copy_commit() -> None:
    lane = current()
    lane.groups.append(lane.open_group)
    lane.open_group = []


def _land(lane: Lane, copies: list[tuple[int, int, int]]) -> None:
    for target, source, n_bytes in copies:
        lane.block.shared.land(lane, target, now().load(source, 16) if n_bytes else bytes(16))


def _copy_wait(n: int) -> None:
    lane = current()
    while len(lane.groups) > n:
        _land(lane, lane.groups.pop(0))
    for barrier in lane.block.mbarriers.values():
        _complete(barrier, of=lane)


COPY_WAIT = tuple((lambda n=n: _copy_wait(n)) for n in range(16))


# ---- bulk copies and their barriers

ARRIVING_LANES = 1


def mbarrier_init(address: int, count: int) -> None:
    lane = current()
    lane.block.shared.words(address, 8)  # aligned, and within the block's memory
    lane.block.mbarriers[address] = Arrivals(count, count, lane.block, seen=[0] * len(lane.seen))


def mbarrier_of(block: Block, address: int) -> Arrivals:
    """The mbarrier of a block at an address of its shared memory."""
    found = block.mbarriers.get(address)
    if found is None:
        raise EmulationError(f"no mbarrier at shared address {address}")
    return found


def _mbarrier(address: int) -> Arrivals:
    return mbarrier_of(current().block, address)


def mbarrier_expect(address: int, n_bytes: int) -> None:
    _mbarrier(address).pending_bytes += n_bytes
    mbarrier_arrive(address)


def mbarrier_arrive(address: int) -> None:
    arrive_at(current(), _mbarrier(address))


def mbarrier_arrive_below(address: int, index: int, end: int) -> None:
    if index < end:
        mbarrier_arrive(address)


def arrive_at(lane: Lane, barrier: Arrivals) -> None:
    """`lane` counts at a barrier, of its own block or of another of its cluster; who waits there sees what it saw."""
    lane.block.clock += 1
    published = list(lane.seen)
    published[lane.index] = lane.block.clock
    if barrier.block is lane.block:
        barrier.seen = _newest(barrier.seen, published)
    else:
        of = lane.block.cluster.index(lane.block)
        barrier.peers[of] = _newest(barrier.peers.get(of, published), published)
    barrier.missing -= 1
    barrier.settle()


def copies_arrive(address: int) -> None:
    """The arrival comes with the copies: as late as they can, when somebody waits for it or for them."""
    lane = current()
    copies = [copy for group in (*lane.groups, lane.open_group) for copy in group]
    lane.groups, lane.open_group = [[] for _ in lane.groups], []
    _mbarrier(address).with_copies.append((lane, copies))


def _complete(barrier: Arrivals, of: Lane | None = None) -> None:
    """Copies that the barrier counts are there: all of them, or one lane's."""
    due = [(lane, copies) for lane, copies in barrier.with_copies if of is None or lane is of]
    barrier.with_copies = [(lane, copies) for lane, copies in barrier.with_copies if not (of is None or lane is of)]
    for lane, copies in due:
        _land(lane, copies)
        arrive_at(lane, barrier)


def _newest(seen: Sequence[int], others: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(seen, others, strict=True)]


def mbarrier_wait(address: int, parity: int) -> None:
    lane, barrier = current(), _mbarrier(address)

    def is_over() -> bool:
        _complete(barrier)
        return barrier.phase != parity

    if not is_over():
        lane.wait("until", address, is_over)
    lane.seen = _newest(barrier.seen, lane.seen)
    for of, seen in barrier.peers.items():
        lane.peers[of] = _newest(lane.peers.get(of, seen), seen)


mbarrier_poll = mbarrier_wait


def looks_in_vain(lane: Lane, what: str) -> None:
    """One more look at something that has not changed, of a block that does not wait.

    Raises:
        EmulationError: it has looked more than `MOST_LOOKS` times.
    """
    lane.block.n_looks += 1
    if lane.block.n_looks > MOST_LOOKS:
        raise EmulationError(f"deadlock: lane {lane.index} looks at {what} for ever")


def mbarrier_is_over(address: int, parity: int) -> int:
    lane, barrier = current(), _mbarrier(address)
    _complete(barrier)
    if barrier.phase == parity:
        looks_in_vain(lane, f"the barrier at {address}")
        lane.wait("until", address, lambda: True)  # the others go on meanwhile
        return 0
    lane.seen = _newest(barrier.seen, lane.seen)
    return 1


def bulk_copy(target: int, source: int, n_bytes: int, address: int) -> None:
    if n_bytes % 16 or target % 16 or source % 16:
        raise EmulationError(f"bulk copy of {n_bytes} bytes from {source:#x} to {target}: not aligned to 16")
    copy_pieces([(target + i, source + i) for i in range(0, n_bytes, 16)], address)


def copy_pieces(pieces: Sequence[tuple[int, int]], address: int) -> None:
    """The engine copies 16 bytes each, to a place in shared memory from one in global memory, and counts them."""
    lane, barrier, machine = current(), _mbarrier(address), now()
    engine = len(lane.seen) - 1
    data = [machine.load(source, 16) for _, source in pieces]
    for (target, _), piece in zip(pieces, data, strict=True):
        lane.block.shared.write(lane, target, piece, lane.stamp()._replace(lane=engine))
    lane.block.clock += 1
    barrier.seen[engine] = lane.block.clock
    barrier.pending_bytes -= 16 * len(pieces)
    barrier.settle()


def tensor_map_acquire(tensor_map: int) -> None:
    current().block.acquired.setdefault(tensor_map, []).append(current().stamp())


def tensor_copy(target: int, tensor_map: int, column: int, row: int, address: int) -> None:
    """The box of a matrix that begins at an element and a row, by the stand-in of its map; 16-bit elements."""
    copy_pieces(pieces_of_box(target, tensor_map, column, row), address)


def pieces_of_box(target: int, tensor_map: int, column: int, row: int) -> list[tuple[int, int]]:
    """(place in shared memory, address) of each 16 bytes that a `tensor_copy` brings."""
    lane = current()
    acquired = lane.block.acquired.get(tensor_map, [])
    if not any(by.lane == lane.index or by.time < lane.seen[by.lane] for by in acquired):
        raise EmulationError(f"lane {lane.index} copies by a tensor map that nobody it has met acquired")
    words = (now().load(tensor_map + 8 * i, 8) for i in range(len(STANDIN)))
    about = dict(zip(STANDIN, (struct.unpack("<q", word)[0] for word in words), strict=True))
    if tensor_map % 64 or target % 128:
        raise EmulationError(f"tensor copy by a map at {tensor_map:#x} to {target}: not aligned to 64 and 128")
    if row < 0 or row + about["box_rows"] > about["rows"] or not 0 <= 2 * column <= about["row_bytes"] - BOX_BYTES:
        raise EmulationError(f"a box at row {row}, element {column} is not within the {about['rows']} rows of a matrix")
    source = about["address"] + row * about["row_bytes"] + 2 * column
    places = [(r, c) for r in range(about["box_rows"]) for c in range(0, BOX_BYTES, 16)]
    return [(swizzled(target + r * BOX_BYTES + c), source + r * about["row_bytes"] + c) for r, c in places]


def _one_bulk_copy(operands: Sequence[Any], warp: Warp) -> list[None]:
    if len(set(operands)) > 1:
        raise EmulationError("the lanes of a warp ask for different bulk copies")
    bulk_copy(*operands[0])
    return [None] * 32


def _one_bulk_fill(operands: Sequence[Any], warp: Warp) -> list[None]:
    if len({each[-1] for each in operands}) > 1:
        raise EmulationError("the lanes of a warp announce different numbers of bytes")
    mbarrier_expect(*operands[0][-2:])
    return _one_bulk_copy([each[:-1] for each in operands], warp)


warp_bulk_copy = collective(_one_bulk_copy)
warp_bulk_fill = collective(_one_bulk_fill)


def mbarrier_fence_init() -> None: ...


def fence_async_shared() -> None:
    lane = current()
    lane.block.clock += 1
    lane.fenced_at, lane.fenced_seen = lane.block.clock, list(lane.seen)
