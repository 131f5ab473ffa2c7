"""Result blocks on their way from the device to the host, read one step behind (docs/requirements.md R-90).

Each block is one asynchronous copy to pinned memory and one event. The copy goes to the driver directly, since a
tensor's `copy_` costs the host several times as much; events stay torch's, whose calls a profiler sees.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import BackendUnavailable, InvariantViolated

IN_FLIGHT = 2  # results between the device and the host: the newest step's, and the one being read


class ResultQueue:
    """At most `IN_FLIGHT` blocks under way, first in, first out.

    Args:
        n_slots, width: most rows of a block, and int32 numbers of a row.
        device: where blocks come from; on the CPU a copy is there at once.
    """

    def __init__(self, n_slots: int, width: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._width = width
        self._pinned = [torch.zeros(n_slots, width, dtype=torch.int32, pin_memory=is_cuda) for _ in range(IN_FLIGHT)]
        self._views: list[Any] = [block.numpy() for block in self._pinned]
        self._mover: _DriverCopies | None = _DriverCopies(self._pinned) if is_cuda else None
        self._turn = 0
        self._sent: deque[tuple[bool, int, int]] = deque()  # is_admission, turn, rows

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, source: Tensor, n_rows: int, *, is_admission: bool) -> None:
        """Start the copy of the first `n_rows` rows of `source: [>= n_rows, width]` int32, contiguous.

        Raises:
            InvariantViolated: as many are under way as there is room for.
        """
        if len(self._sent) == IN_FLIGHT:
            raise InvariantViolated(
                f"{IN_FLIGHT} results are under way already", "one step behind", "collect after every step"
            )
        if self._mover is not None:
            self._mover.start(self._turn, source.data_ptr(), n_rows * self._width * 4)
        else:
            self._pinned[self._turn][:n_rows].copy_(source[:n_rows])
        self._sent.append((is_admission, self._turn, n_rows))
        self._turn = (self._turn + 1) % IN_FLIGHT

    def receive(self) -> tuple[bool, list[list[int]]]:
        """Wait for the oldest block: whether it is an admission's, and its rows."""
        is_admission, turn, n_rows = self._sent.popleft()
        if self._mover is not None:
            self._mover.wait(turn)
        rows: list[list[int]] = self._views[turn][:n_rows].tolist()
        return is_admission, rows


class _DriverCopies:
    """Copies to fixed pinned blocks, by the CUDA driver, and the events behind them."""

    def __init__(self, blocks: list[Tensor]) -> None:
        from cuda.bindings import driver  # type: ignore[import-untyped]

        self._copy, self._success = driver.cuMemcpyDtoHAsync, driver.CUresult.CUDA_SUCCESS
        self._targets = [block.data_ptr() for block in blocks]
        self._events = [torch.cuda.Event() for _ in blocks]  # type: ignore[no-untyped-call]

    def start(self, turn: int, source: int, n_bytes: int) -> None:
        """Enqueue a copy and the event that follows it on torch's current stream.

        Raises:
            BackendUnavailable: the driver refused; after an earlier kernel's error it refuses everything.
        """
        stream = torch.cuda.current_stream()
        (status,) = self._copy(self._targets[turn], source, n_bytes, stream.cuda_stream)
        if status != self._success:
            raise BackendUnavailable(
                f"the CUDA driver answers {status.name} when results are copied",
                "CUDA_SUCCESS; an error here is often an earlier kernel's",
                "run again under compute-sanitizer to find the kernel",
            )
        self._events[turn].record(stream)

    def wait(self, turn: int) -> None:
        """Block until the copy of `turn` has arrived."""
        self._events[turn].synchronize()
