"""Result blocks on their way from the device to the host, read one step behind (docs/requirements.md R-90).

The device writes them straight to the host's pinned memory, blocks in turn: a copy between two steps would keep the GPU
waiting for several microseconds. An event behind each says when it is there.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import InvariantViolated


class Sent(NamedTuple):
    """A block under way: what filled it (an admission, or the step of that number), its turn and rows, and whether
    log-probabilities lie beside it."""

    step: int | None
    turn: int
    n_rows: int
    logprobs: bool = False


class ResultQueue:
    """Blocks under way, first in, first out; as many as there are.

    Args:
        blocks: `[n, S, W]` int32, for kernels in the host's memory; the first program that runs after this writes block
            1, the next one block 2, and so on, beginning again at 0.
        device: what writes them, on its current stream, whichever GPU is current; on the CPU they are there at once.
    """

    def __init__(self, blocks: Tensor, device: torch.device) -> None:
        self._blocks, self._device = list(blocks), device
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event() for _ in blocks] if is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._sent: deque[Sent] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, n_rows: int, step: int | None, *, logprobs: bool = False) -> None:
        """Note that the program just enqueued, an admission or a step, writes `n_rows` rows of the next block.

        Raises:
            InvariantViolated: all blocks are under way already, so that it overwrites one that nobody has read.
        """
        if len(self._sent) == len(self._blocks):
            raise InvariantViolated(
                f"{len(self._blocks)} results are under way already", "one step behind", "collect after every step"
            )
        self._turn = (self._turn + 1) % len(self._blocks)
        if self._events:
            self._events[self._turn].record(torch.cuda.current_stream(self._device))
        self._sent.append(Sent(step, self._turn, n_rows, logprobs))

    def receive(self) -> tuple[Sent, list[list[int]]]:
        """Wait for the oldest block: what it was sent as, and its rows."""
        sent = self._sent.popleft()
        if self._events:
            self._events[sent.turn].synchronize()
        rows: list[list[int]] = self._blocks[sent.turn][: sent.n_rows].tolist()
        return sent, rows

    def forget(self) -> None:
        """Drop what is under way and begin as a new queue does; the device has to begin at block 0 as well."""
        self._sent.clear()
        self._turn = 0
