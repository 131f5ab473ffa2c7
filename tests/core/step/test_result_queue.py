"""Results on their way to the host: in order, as many as there are blocks, none overwritten before it is read."""

from __future__ import annotations

import pytest
import torch

from eagle3core.errors import InvariantViolated
from eagle3core.kernels.slots.slot_state import RESULT_BLOCKS
from eagle3core.step.results import ResultQueue

pytestmark = pytest.mark.reference
WIDTH, SLOTS = 5, 3


class Writer:
    """What programs do: one block after the other, from block 1 on."""

    def __init__(self) -> None:
        self.blocks = torch.full((RESULT_BLOCKS, SLOTS, WIDTH), -9, dtype=torch.int32)
        self.turn = 0

    def write(self, first: int) -> torch.Tensor:
        self.turn = (self.turn + 1) % RESULT_BLOCKS
        self.blocks[self.turn] = (torch.arange(SLOTS * WIDTH, dtype=torch.int32) + first).reshape(SLOTS, WIDTH)
        return self.blocks[self.turn].clone()


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def queue(writer: Writer) -> ResultQueue:
    return ResultQueue(writer.blocks, torch.device("cpu"))


def test_a_block_is_read_while_the_next_one_is_written(queue: ResultQueue, writer: Writer) -> None:
    written = writer.write(0)
    queue.send(SLOTS, None)
    writer.write(100)  # the next step is one ahead
    sent, rows = queue.receive()
    assert (sent.step, sent.turn, rows) == (None, 1, written.tolist())


def test_only_the_rows_asked_for_are_read(queue: ResultQueue, writer: Writer) -> None:
    writer.write(0)
    queue.send(SLOTS, 7)
    written = writer.write(100)
    queue.send(1, 8)
    queue.receive()
    sent, rows = queue.receive()
    assert (sent.step, rows) == (8, written[:1].tolist())


def test_blocks_arrive_in_the_order_they_were_written_over_many_turns(queue: ResultQueue, writer: Writer) -> None:
    before = writer.write(0)
    queue.send(SLOTS, 7)
    for step in range(1, 7):
        now = writer.write(10 * step)
        queue.send(SLOTS, 7)
        assert len(queue) == RESULT_BLOCKS
        assert queue.receive()[1] == before.tolist()
        before = now


def test_a_block_too_many_is_refused_and_those_under_way_are_kept(queue: ResultQueue, writer: Writer) -> None:
    written = []
    for first in (0, 100):
        written.append(writer.write(first).tolist())
        queue.send(SLOTS, 7)
    with pytest.raises(InvariantViolated, match="under way already"):
        queue.send(SLOTS, 7)
    assert [queue.receive()[1], queue.receive()[1]] == written
