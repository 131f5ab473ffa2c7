"""Result blocks on their way from the device to the host, read one step behind (docs/requirements.md R-90).

Each block is one asynchronous copy to pinned memory and one event. Both go to the driver directly, since a tensor's
`copy_` and an event's `record` cost the host several times what they do.
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
    """Copies to fixed pinned blocks and the events behind them, by the CUDA driver."""

    def __init__(self, blocks: list[Tensor]) -> None:
        from cuda.bindings import driver  # type: ignore[import-untyped]

        torch.cuda.current_stream()  # a context must be current before an event is made
        self._driver = driver
        self._targets = [block.data_ptr() for block in blocks]
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._events = [self._checked(driver.cuEventCreate(flags)) for _ in blocks]

    def __del__(self) -> None:
        for event in getattr(self, "_events", []):
            self._driver.cuEventDestroy(event)

    def start(self, turn: int, source: int, n_bytes: int) -> None:
        """Enqueue a copy and the event that follows it on torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self._checked(self._driver.cuMemcpyDtoHAsync(self._targets[turn], source, n_bytes, stream))
        self._checked(self._driver.cuEventRecord(self._events[turn], stream))

    def wait(self, turn: int) -> None:
        """Block until the copy of `turn` has arrived."""
        self._checked(self._driver.cuEventSynchronize(self._events[turn]))

    def _checked(self, returned: tuple[Any, ...]) -> Any:
        status, *values = returned
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendUnavailable(
                f"the CUDA driver answers {status.name} while results are read",
                "CUDA_SUCCESS; an error here is often an earlier kernel's",
                "run again under compute-sanitizer to find the kernel",
            )
        return values[0] if values else None
