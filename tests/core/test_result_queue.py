"""Results on their way to the host: in order, at most two, none overwritten before it was read."""

from __future__ import annotations

import pytest
import torch

from eagle3core.decode.result_queue import IN_FLIGHT, ResultQueue
from eagle3core.errors import InvariantViolated

pytestmark = pytest.mark.reference
WIDTH, SLOTS = 5, 3


@pytest.fixture
def queue() -> ResultQueue:
    return ResultQueue(SLOTS, WIDTH, torch.device("cpu"))


def block(first: int) -> torch.Tensor:
    return (torch.arange(SLOTS * WIDTH, dtype=torch.int32) + first).reshape(SLOTS, WIDTH)


def test_a_block_arrives_as_it_was_when_it_was_sent(queue: ResultQueue) -> None:
    source = block(0)
    queue.send(source, SLOTS, is_admission=True)
    source.fill_(-7)  # the next step writes its results over these
    assert queue.receive() == (True, block(0).tolist())


def test_only_the_rows_asked_for_are_read(queue: ResultQueue) -> None:
    queue.send(block(0), SLOTS, is_admission=False)
    queue.send(block(100), 1, is_admission=False)
    queue.receive()
    assert queue.receive() == (False, block(100)[:1].tolist())


def test_blocks_arrive_in_the_order_they_were_sent_over_many_turns(queue: ResultQueue) -> None:
    queue.send(block(0), SLOTS, is_admission=False)
    for step in range(1, 7):
        queue.send(block(10 * step), SLOTS, is_admission=False)
        assert len(queue) == IN_FLIGHT
        assert queue.receive()[1] == block(10 * (step - 1)).tolist()


def test_a_third_block_is_refused_and_the_two_under_way_are_kept(queue: ResultQueue) -> None:
    for first in (0, 100):
        queue.send(block(first), SLOTS, is_admission=False)
    with pytest.raises(InvariantViolated, match="under way already"):
        queue.send(block(200), SLOTS, is_admission=False)
    assert [queue.receive()[1], queue.receive()[1]] == [block(0).tolist(), block(100).tolist()]
