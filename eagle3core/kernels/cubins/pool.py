"""Jobs in processes of their own, of which a user's program notices nothing: none of its modules is imported again.

One process (`worker`) imports what the jobs need and forks the others, so that imports are paid once and their memory
is shared. A job whose process dies is a result like any other; who waits for results learns of all jobs in any case.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_PATIENCE_S = 5.0  # for processes that were told to end


@dataclass(frozen=True)
class Result:
    """What became of a job.

    Attributes:
        index: of the job. seconds: of the processor that it took.
        failure: why it has no result, in words; None where it ended well.
    """

    index: int
    seconds: float
    failure: str | None


class Pool:
    """Processes at work on `function(*arguments)` for each of `jobs`, in their order; they start at once.

    Args:
        function: of a module that can be imported; what it gives is dropped.
        jobs: arguments, which pickle.
        imports: modules to import before the processes part.

    Raises:
        OSError: no process could be started.
        Exception: as pickling raises it, of jobs that cannot be sent.
    """

    def __init__(
        self, function: Callable[..., object], jobs: Sequence[tuple[Any, ...]], n_processes: int,
        imports: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.n_jobs, self.n_processes = len(jobs), min(n_processes, len(jobs))
        work = pickle.dumps((function, list(jobs)))
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  of the processes, for when they fail
        self._first = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._words, start_new_session=True,  # so that Ctrl-C ends them by way of us, all together
        )  # fmt: skip
        assert self._first.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; `results` says why
            pickle.dump((sys.path, self.n_processes, list(imports), work), self._first.stdin)
            self._first.stdin.flush()  # and left open: its end tells the processes that we are gone

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def results(self) -> Iterator[Result]:
        """One result a job, as they end; those of jobs that nobody can run any more come last."""
        assert self._first.stdout is not None
        open_ = set(range(self.n_jobs))
        for line in self._first.stdout:
            index, seconds, failure = json.loads(line)
            open_.discard(index)
            yield Result(index, seconds, failure)
        self._first.wait()
        for index in sorted(open_):
            yield Result(index, 0.0, f"the processes ended without it: {self._last_words()}")

    def close(self) -> None:
        """End the processes, whatever they are at."""
        if self._first.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self._first.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._first.wait()
        for pipe in (self._first.stdin, self._first.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not read
                    pipe.close()
        self._words.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._first.pid, number)

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._first.returncode}"
