"""Blocks of a cluster in the emulator: they meet, arrive at each other's mbarriers, and copy into each other's memory.

A block's history of shared memory knows its own lanes. What a lane of another block has come to see of them, by the
mbarriers at which they arrived, is kept beside what it sees of its own (`Lane.peers`).

Source: PTX ISA 9.0, barrier.cluster, mapa, mbarrier.arrive, cp.async.bulk with multicast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle3core.kernels.emulator.block import Block, Lane
from eagle3core.kernels.emulator.copies import arrive_at, bulk_copy, copy_pieces, mbarrier_of, pieces_of_box
from eagle3core.kernels.emulator.machine_memory import EmulationError, Stamp
from eagle3core.kernels.emulator.now import Warp, collective, now
from eagle3core.kernels.emulator.now import lane as current


class _Stranger:
    """The engine of bulk copies, as a block sees it that is written by another's lane."""

    def __init__(self, block: Block, seen: list[int]) -> None:
        self.block, self.seen, self.index = block, seen, len(seen) - 1

    def stamp(self) -> Stamp:
        return Stamp(self.index, self.block.clock)


def rank() -> int:
    return current().block.cluster.index(current().block)


def arrive() -> None:
    current().meetings += 1


def wait() -> None:
    lane = current()

    def have_met() -> bool:
        lanes = (other for block in lane.block.cluster for other in block.lanes)
        return all(other.is_done or other.meetings >= lane.meetings for other in lanes)

    if not have_met():
        lane.wait("until", "cluster", have_met)


def _block_of(index: int) -> Block:
    block = current().block.cluster[index]
    if all(lane.is_done for lane in block.lanes):
        raise EmulationError(f"block {index} of a cluster is reached after its end")
    return block


def mbarrier_arrive(address: int, index: int) -> None:
    arrive_at(current(), mbarrier_of(_block_of(index), address))


def _copy(operands: Sequence[Any], warp: Warp) -> list[None]:
    if len(set(operands)) > 1:
        raise EmulationError("the lanes of a warp ask for different bulk copies")
    target, source, n_bytes, address, blocks = operands[0]
    pieces = [(target + i, source + i) for i in range(0, n_bytes, 16)]
    _copy_into_all(warp[0], blocks, pieces, address, lambda: bulk_copy(target, source, n_bytes, address))
    return [None] * 32


def tensor_copy(target: int, tensor_map: int, column: int, row: int, address: int, blocks: int) -> None:
    pieces = pieces_of_box(target, tensor_map, column, row)
    _copy_into_all(current(), blocks, pieces, address, lambda: copy_pieces(pieces, address))


def _copy_into_all(
    lane: Lane, blocks: int, pieces: Sequence[tuple[int, int]], address: int, into_own: Callable[[], None]
) -> None:
    if blocks <= 0 or blocks >> len(lane.block.cluster):
        raise EmulationError(f"a copy into blocks {blocks:#b} of a cluster of {len(lane.block.cluster)}")
    for index, block in enumerate(lane.block.cluster):
        if not blocks >> index & 1:
            continue
        if block is lane.block:
            into_own()
        else:
            _copy_into(_block_of(index), lane.peers.get(index), pieces, address)


def _copy_into(block: Block, seen: list[int] | None, pieces: Sequence[tuple[int, int]], address: int) -> None:
    barrier, engine = mbarrier_of(block, address), len(block.lanes)
    writer = _Stranger(block, seen or [0] * (engine + 1))
    for target, source in pieces:
        block.shared.write(writer, target, now().load(source, 16), writer.stamp())
    block.clock += 1
    barrier.seen[engine] = block.clock
    barrier.pending_bytes -= 16 * len(pieces)
    barrier.settle()


warp_bulk_copy = collective(_copy)
