"""The processes of a `pool`: the first imports what jobs need, forks the others, and tells of those that die.

Run as a file, with nothing but Python's own modules until the pool has said where modules lie. Results are lines on
what was standard output; whatever a job prints goes to standard error.
"""

import gc
import importlib
import json
import mmap
import os
import pickle
import select
import signal
import struct
import sys
from typing import Any

_INDEX = struct.Struct("i")
_LOOKS_S = 0.02  # between looks at what has ended
_MOST_WORDS = 2000  # of a failure, so that a line is written in one piece (PIPE_BUF is 4096)


def main() -> None:
    """Read the work from standard input, do it, end."""
    paths, n_processes, imports, work = pickle.load(sys.stdin.buffer)
    sys.path[:] = paths
    out = os.dup(1)
    os.dup2(2, 1)
    for name in imports:
        importlib.import_module(name)
    function, jobs = pickle.loads(work)
    gc.freeze()  # the processes share what there is, as long as nobody writes to it
    _Processes(function, jobs, out).run(n_processes)


class _Processes:
    """Forked processes that take jobs from one pipe.

    Attributes:
        at: what each process is at, in memory that all share: index + 1 of a job, or 0.
    """

    def __init__(self, function: Any, jobs: list[tuple[Any, ...]], out: int) -> None:
        self.function, self.jobs, self.out = function, jobs, out
        self.waiting, indices = os.pipe()
        os.write(indices, b"".join(_INDEX.pack(i) for i in range(len(jobs))))
        os.close(indices)  # so that whoever reads the last job finds an end after it

    def run(self, n_processes: int) -> None:
        """Until every job has a result; or, with everything, until the pool is gone, and its end of our input."""
        self.at = mmap.mmap(-1, _INDEX.size * n_processes)
        slots = {self.fork(slot): slot for slot in range(n_processes)}
        while slots:
            if select.select([0], [], [], _LOOKS_S)[0] and not os.read(0, 1):
                os.killpg(0, signal.SIGKILL)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                continue
            slot = slots.pop(pid)
            at = self.at_of(slot)
            if at:
                how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
                self.tell(at - 1, 0.0, f"the process that was at it ended with {how}")
                self.put(slot, 0)
                slots[self.fork(slot)] = slot

    def fork(self, slot: int) -> int:
        """Another process, at work."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self.work(slot)
                code = 0
            finally:
                os._exit(code)
        return pid

    def work(self, slot: int) -> None:
        """Jobs, one after the other, while there are any."""
        while data := os.read(self.waiting, _INDEX.size):
            (index,) = _INDEX.unpack(data)
            self.put(slot, index + 1)
            began, failure = _processor_s(), None
            try:
                self.function(*self.jobs[index])
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            self.tell(index, _processor_s() - began, failure)
            self.put(slot, 0)

    def put(self, slot: int, value: int) -> None:
        """What the process of a slot is at."""
        _INDEX.pack_into(self.at, slot * _INDEX.size, value)

    def at_of(self, slot: int) -> int:
        """What the process of a slot is, or was, at."""
        value: int = _INDEX.unpack_from(self.at, slot * _INDEX.size)[0]
        return value

    def tell(self, index: int, seconds: float, failure: str | None) -> None:
        """A line for the pool, in one piece though others write too."""
        words = None if failure is None else failure[:_MOST_WORDS].encode("ascii", "replace").decode()
        os.write(self.out, json.dumps([index, seconds, words]).encode() + b"\n")


def _processor_s() -> float:
    """Processor time of this process and of those that it waited for, seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
