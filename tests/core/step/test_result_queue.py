"""Results on their way to the host: in order, as many as there are blocks, none overwritten before it is read."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from eagle3core.errors import InvariantViolated
from eagle3core.kernels.slots.slot_state import RESULT_BLOCKS
from eagle3core.step.results import ResultQueue, Staging

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


def test_what_is_staged_is_kept_until_the_work_of_its_turn_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, seen = Staging(8, torch.device("cpu")), list[str]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: None)
    staging._over = [
        SimpleNamespace(
            synchronize=lambda turn=turn: seen.append(f"waits for {turn}"),
            record=lambda stream, turn=turn: seen.append(f"end of {turn}"),
        )
        for turn in "ab"
    ]
    told = torch.zeros(3, 2, dtype=torch.int32)
    for i in range(3):
        with staging.turn():
            for numbers in (array("i", [i, 7]), array("i", [i, 8])):
                staging.copy(told[i], numbers)
            seen.append("work")
    assert told.tolist() == [[0, 8], [1, 8], [2, 8]]
    assert [numbers[:4].tolist() for numbers in staging._hosts] == [[1, 7, 1, 8], [2, 7, 2, 8]]
    turn_of_b, turn_of_a = (["waits for b", "work", "end of b"], ["waits for a", "work", "end of a"])
    assert seen == [*turn_of_b, *turn_of_a, *turn_of_b]
    with pytest.raises(RuntimeError, match="on purpose"), staging.turn():
        raise RuntimeError("on purpose")
    assert seen[-2:] == ["waits for a", "end of a"], "copies may be under way"
