"""Jobs in processes that part from this one: what it holds is theirs without a copy, and each gives back one value.

A job has a process of its own, so that one which is killed costs no other job its value. Knows nothing of lamps.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        work: gives the value, which pickles.
        needs: names of jobs that must have ended before; names of none of the jobs are no hindrance.
    """

    name: str
    work: Callable[[], Any]
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What became of a job. `failure`: why it has no value, in words; empty where it has one."""

    name: str
    value: Any
    failure: str = ""


def outcomes(jobs: Sequence[Job], n_processes: int, may_begin: Callable[[], bool] = lambda: True) -> Iterator[Outcome]:
    """What became of the jobs, as they end; each is begun in its turn, once those that it needs have been handed out.

    So a job sees what the caller has done with the outcomes before it. Those that are running when the caller leaves
    are ended.

    Args:
        jobs: first those to be begun first; no two need each other.
        n_processes: at once, at most.
        may_begin: is asked before each; jobs that may not begin have no outcome.
    """
    waiting, running = list(jobs), dict[Connection, tuple[Job, ForkProcess]]()
    try:
        while True:
            open_ = {job.name for job in (*waiting, *(job for job, _ in running.values()))}
            ready = [job for job in waiting if not job.needs & open_]
            for job in ready[: n_processes - len(running)]:
                if may_begin():
                    waiting.remove(job)
                    receiver, process = _begun(job)
                    running[receiver] = job, process
            if not running:
                return
            ended = wait(list(running))
            for receiver in [each for each in running if each in ended]:
                job, process = running.pop(receiver)
                yield _ended(job, receiver, process)
    finally:
        for receiver, (_, process) in running.items():
            process.kill()  # it has nothing to put in order
            process.join()
            receiver.close()


def _begun(job: Job) -> tuple[Connection, ForkProcess]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = ForkProcess(target=_work, args=(job, sender), name=job.name, daemon=True)
    process.start()
    sender.close()  # the process's own is then the last, and its end is seen here
    return receiver, process


def _work(job: Job, sender: Connection) -> None:
    """In the new process: the job, and its value or why there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    # Behind a fork no GPU can be opened. Torch's optimizers look for one, and break where the first process asked too.
    torch.cuda.is_available = lambda: False
    try:
        message = pickle.dumps((job.work(), ""))  # by value: torch's own way is a file that would end with this process
    except Exception as error:  # whatever it is, the first process tells it
        message = pickle.dumps((None, traceback.format_exception_only(error)[-1].strip().partition("\n")[0]))
    sender.send_bytes(message)


def _end_with_the_first() -> None:
    first = multiprocessing.parent_process()
    assert first is not None, "called in a process that parted"
    first.join()
    os._exit(1)


def _ended(job: Job, receiver: Connection, process: ForkProcess) -> Outcome:
    with receiver:
        try:
            value, failure = pickle.loads(receiver.recv_bytes())
        except (EOFError, OSError):  # it ended before its message did
            value, failure = None, ""
    process.join()
    return Outcome(job.name, value, failure or ("" if process.exitcode == 0 else _death(process.exitcode)))


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    killed = " (so ends one that takes more memory than there is)" if -code == signal.SIGKILL else ""
    return f"its process was ended by signal {-code}, {signal.Signals(-code).name}{killed}"
