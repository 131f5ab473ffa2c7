"""Result blocks on their way from the device to the host, read one step behind (docs/requirements.md R-90).

The device writes them straight to the host's pinned memory, blocks in turn: a copy between two steps would keep the GPU
waiting for several microseconds. An event behind each says when it is there.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from eagle3core.errors import InvariantViolated


class ResultQueue:
    """Blocks under way, first in, first out; as many as there are.

    Args:
        blocks: `[n, S, W]` int32, in the host's memory; the first program that runs after this writes block 1, the next
            one block 2, and so on, beginning again at 0.
        device: what writes them; on the CPU they are there at once.
    """

    def __init__(self, blocks: Tensor, device: torch.device) -> None:
        self._blocks = list(blocks)
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event() for _ in blocks] if is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._sent: deque[tuple[bool, int, int]] = deque()  # is_admission, turn, rows

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, n_rows: int, *, is_admission: bool) -> None:
        """Note that the program just enqueued writes `n_rows` rows of the next block.

        Raises:
            InvariantViolated: all blocks are under way already, so that it overwrites one that nobody has read.
        """
        if len(self._sent) == len(self._blocks):
            raise InvariantViolated(
                f"{len(self._blocks)} results are under way already", "one step behind", "collect after every step"
            )
        self._turn = (self._turn + 1) % len(self._blocks)
        if self._events:
            self._events[self._turn].record()
        self._sent.append((is_admission, self._turn, n_rows))

    def receive(self) -> tuple[bool, list[list[int]]]:
        """Wait for the oldest block: whether it is an admission's, and its rows."""
        is_admission, turn, n_rows = self._sent.popleft()
        if self._events:
            self._events[turn].synchronize()
        rows: list[list[int]] = self._blocks[turn][:n_rows].tolist()
        return is_admission, rows

    def forget(self) -> None:
        """Drop what is under way and begin as a new queue does; the device has to begin at block 0 as well."""
        self._sent.clear()
        self._turn = 0
