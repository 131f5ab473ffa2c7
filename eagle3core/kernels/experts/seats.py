"""Which run of tiles a block walks: a seat of the processor that it is on.

Blocks that start early go where room comes free first, and not in turn, so which of them share a processor is not known
beforehand; were runs given out by the number of a block, some processors would have a fifth more tiles than the mean
(docs/log.md). So a processor has as many seats as blocks that it holds, their runs are neighbours, and a block takes
the next seat of its own. Where a processor has more blocks than seats, as under a tool that holds others back, a block
takes the next free seat of any: each run is walked once, wherever blocks are.

Who takes a seat marks it, every other launch with 1 and those between with 0, so nothing is ever cleared; that all
marks of a launch are made before the next one begins is what `card.Parameter` says of a counter. Source: derived here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.gemm.tiling import MULTIPROCESSORS

MOST_SEATS = 8  # of a processor


def new_seats(device: torch.device, processors: int | None = None) -> Tensor:
    """`[MOST_SEATS, 1 + P + P MOST_SEATS]` int32, zero: for launches of 1, 2, .. blocks on each of P processors.

    Blocks that began; blocks that began on each processor; marks. Launches that share it follow each other in a stream.

    Args:
        processors: in place of those of the device.
    """
    n = processors or processors_of(device)
    return torch.zeros(MOST_SEATS, 1 + n * (1 + MOST_SEATS), dtype=torch.int32, device=device)


def seated(seats: Tensor) -> int:
    """The processors that they were made for."""
    return (seats.shape[1] - 1) // (1 + MOST_SEATS)


def seats_for(seats: Tensor, blocks: int) -> tuple[Tensor | None, int]:
    """Those of launches of so many blocks, and the processors; (None, 0) where a processor has no such whole number."""
    processors = seated(seats)
    each, rest = divmod(blocks, processors)
    return (seats[each - 1], processors) if 0 < each <= MOST_SEATS and rest == 0 else (None, 0)


def make_take_seat(isa: Any) -> Any:
    """Inlined `take_seat(seats, processors, at, tid)`: the number of the run that a block walks, for all its threads.

    Without `processors` it is the block's own number. `at`: a shared word, free again afterwards. All threads meet.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64

    def take_seat(seats: Any, processors: Any, at: Any, tid: Any) -> Any:
        blocks, number = i32(cuda.gridDim.x), i32(cuda.blockIdx.x)
        if processors > 0:
            if tid == 0:
                each, own = isa.quotient(blocks, processors), isa.processor()
                own = i32(own - isa.quotient(own, processors) * processors)
                began = isa.atomic_inc_i32(seats, i32(2 * blocks - 1))
                seat = i32(own * each + isa.atomic_inc_i32(seats + 4 + i64(own) * 4, i32(each - 1)))
                marks, mark = seats + 4 + i64(processors) * 4, i32(began < blocks)
                while isa.atomic_exchange_i32(marks + i64(seat) * 4, mark) == mark:
                    seat = i32(seat + 1)
                    if seat == blocks:
                        seat = i32(0)
                isa.shared_store_u32(at, seat)
            cuda.syncthreads()
            number = isa.shared_load_u32(at)
            cuda.syncthreads()
        return number

    return isa.inlined(take_seat)


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a device; those that kernels were tuned on where it is none."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
