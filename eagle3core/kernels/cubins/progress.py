"""One line on a terminal that says how far a piece of work is and how long it will take; elsewhere nothing."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_CLEAR = "\r\x1b[K"  # from the line's begin to its end


class ProgressLine:
    """Work of known parts, as `with ProgressLine("compiling kernels", weights, 8) as line: ... line.done(weight)`.

    Args:
        weights: what each part takes, in seconds of one worker, about, in the order in which they begin.
        n_workers: how many are at them.
    """

    def __init__(self, what: str, weights: list[float], n_workers: int, stream: TextIO | None = None) -> None:
        self._what, self._n, self._total, self._n_workers = what, len(weights), sum(weights), n_workers
        self._open = list(weights)
        self._stream = stream or sys.stderr
        self._is_shown = self._stream.isatty()
        self._n_done, self._done, self._began = 0, 0.0, time.monotonic()

    def __enter__(self) -> ProgressLine:
        self._show()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_shown:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def done(self, weight: float) -> None:
        """A part is over."""
        self._n_done, self._done = self._n_done + 1, self._done + weight
        self._open.remove(weight)
        self._show()

    @property
    def seconds_left(self) -> float:
        """As long as what is done took for its weight, what workers are at counted half; before anything is done, as
        long as the weights say."""
        if not self._done:
            return self._total / self._n_workers
        done = self._done + sum(self._open[: self._n_workers]) / 2
        return (time.monotonic() - self._began) * (self._total - done) / done

    def _show(self) -> None:
        if self._is_shown:
            text = f"{self._what}: {self._n_done} of {self._n}, about {max(self.seconds_left, 1):.0f} s left"
            self._stream.write(_CLEAR + text)
            self._stream.flush()
