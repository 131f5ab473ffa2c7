"""Seats of processors: each run is walked once in every launch, wherever blocks are; neighbours share a processor."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from faulty_emulator import faulty
from rings import seeds
from torch import Tensor

from eagle3core.kernels import proof, registry
from eagle3core.kernels.card import Launch, Variant, parameters
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine_memory import EmulationError
from eagle3core.kernels.experts.seats import MOST_SEATS, make_take_seat, new_seats, seated, seats_for
from eagle3core.kernels.launch import execute

CPU = torch.device("cpu")


def make_sit(isa: Any, *, late: bool = False) -> Any:
    """Every thread leaves the number of its block's run; `late`: the next kernel may start before that is known."""
    i32, i64, take_seat = isa.i32, isa.i64, make_take_seat(isa)

    def sit(seats: Any, taken: Any, processors: Any) -> None:
        tid, base = i32(isa.cuda.threadIdx.x), isa.shared_address(isa.cuda.shared.array(1, i32))
        if late:
            isa.let_next_start()
        run = take_seat(seats, processors, base, tid)
        if tid == 31:
            isa.shared_store_u32(base, i32(-1))  # the word is free again
        isa.let_next_start()
        isa.wait_previous()
        isa.store_u32(taken + (i64(isa.cuda.blockIdx.x) * 32 + tid) * 4, run)

    return sit


def launched(all_seats: Tensor, blocks: int, isa: Any, *, late: bool = False) -> list[int]:
    """The run of each block in one launch."""
    launch, taken = one_launch(all_seats, blocks, late=late)
    emulator.execute([launch], isa)
    return runs_of(taken)


def one_launch(all_seats: Tensor, blocks: int, *, late: bool = False) -> tuple[Launch, Tensor]:
    """The launch, and `[blocks, 32]` int32 where its threads leave their block's run, poisoned."""
    taken = torch.full((blocks, 32), -1, dtype=torch.int32, device=all_seats.device)
    variant = Variant(
        name=f"sit{'_late' if late else ''}", make=make_sit, constants={"late": late},
        parameters=parameters("seats:counter taken:out processors:i32"), threads=32, dependent=True,
    )  # fmt: skip
    seats, processors = seats_for(all_seats, blocks)
    return variant.launch((blocks,), seats=seats, taken=taken, processors=processors), taken


def runs_of(taken: Tensor) -> list[int]:
    """The run of each block, which all its threads know."""
    assert (taken == taken[:, :1]).all()
    return [int(run) for run in taken[:, 0]]


@pytest.mark.emulated
def test_blocks_of_a_processor_walk_neighbouring_runs() -> None:
    seats, places = new_seats(CPU, 3), [2, 0, 0, 1, 2, 1]
    for _ in range(3):
        runs = launched(seats, 6, faulty(processor=iter(places).__next__))
        assert sorted(runs) == list(range(6))
        assert [run // 2 for run in runs] == places


@pytest.mark.emulated
@pytest.mark.parametrize("seed", seeds(6, 16, 324))
def test_every_run_is_walked_once_in_every_launch_wherever_blocks_are(seed: int) -> None:
    draw = Random(seed)
    processors = draw.randint(1, 5)
    seats = new_seats(CPU, processors)
    for _ in range(6):  # launches of other sizes between them
        blocks = processors * draw.randint(1, 4)
        runs = launched(seats, blocks, faulty(processor=lambda: draw.randint(0, 2 * processors)))
        assert Counter(runs) == Counter(range(blocks))


@pytest.mark.emulated
def test_blocks_without_seats_walk_the_run_of_their_number() -> None:
    seats = new_seats(CPU, 4)
    for blocks in (3, 6, 4 * (MOST_SEATS + 1)):
        assert seats_for(seats, blocks) == (None, 0)
        assert launched(seats, blocks, emulator) == list(range(blocks))
    assert not seats.any()


@pytest.mark.emulated
def test_seats_lie_apart_by_the_blocks_of_a_launch() -> None:
    seats = new_seats(CPU, 5)
    assert seated(seats) == 5
    launched(seats, 10, emulator)
    launched(seats, 15, emulator)
    assert [bool(row.any()) for row in seats] == [False, True, True] + [False] * (MOST_SEATS - 3)


def maps_of_experts(blocks: int) -> list[Launch]:
    """Gate and up, then down, of three rows: three experts' tiles each, two at once, for blocks of two processors."""
    card, case = registry()["experts"], {**registry()["experts"].cases[0], "m": 3}
    inputs = card.example(case, proof.generator(0, CPU), CPU)
    return list(card.launches("sm_90a", case, inputs, card.outputs(case, inputs), blocks=blocks, processors=2))[:2]


@pytest.mark.emulated
def test_blocks_of_both_maps_take_seats() -> None:
    for launch, mark in zip(maps_of_experts(blocks=2), (1, 0), strict=True):
        emulator.execute([launch])
        assert launch.operands["processors"] == 2
        assert launch.operands["seats"][3:5].tolist() == [mark] * 2


@pytest.mark.reference
def test_blocks_of_less_than_three_tiles_walk_the_run_of_their_number() -> None:
    for launch in maps_of_experts(blocks=4):
        assert launch.operands["processors"] == 0
        assert launch.operands["seats"] is None


@pytest.mark.emulated
def test_a_block_that_counts_after_the_next_kernel_may_start_is_found() -> None:
    with pytest.raises(EmulationError, match="counted at after let_next_start"):
        launched(new_seats(CPU, 2), 4, emulator, late=True)


@pytest.mark.emulated
def test_without_marks_two_blocks_walk_one_run() -> None:
    isa = faulty(processor=lambda: 0, atomic_exchange_i32=lambda address, value: 1 - value)
    assert launched(new_seats(CPU, 2), 4, isa) == [0, 1, 0, 1]


@pytest.mark.emulated
def test_without_a_count_of_launches_the_second_one_finds_no_seat() -> None:
    isa = faulty(processor=lambda: 0, atomic_inc_i32=lambda address, last: 0)
    seats = new_seats(CPU, 2)
    assert sorted(launched(seats, 4, isa)) == list(range(4))
    with pytest.raises(EmulationError, match=r"deadlock: lane 0 looks at the word at \d+ for ever"):
        launched(seats, 4, isa)


@pytest.mark.gpu
def test_on_a_gpu_launches_that_overlap_walk_every_run_once() -> None:
    seats = new_seats(torch.device("cuda"))
    sizes = [seated(seats) * each for each in (1, 2, 4, 3, 8, 4)] * 50
    made = [one_launch(seats, blocks) for blocks in sizes]
    execute([launch for launch, _ in made])
    for (_, taken), blocks in zip(made, sizes, strict=True):
        assert sorted(runs_of(taken.cpu())) == list(range(blocks))
