"""One case in a child process: forked from a parent in which everything slow is ready, limited, watched, and judged.

The child ends itself when its door takes too long or asks for too much; the parent reads what came of it from a pipe,
or from the signal that ended it. Linux only: the limits are the operating system's.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from lab.errors import RunFailed
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.outcomes import Outcome, as_json, of_error, of_return, of_signal
from lab.probes.fuzz.watch import CANARY, Watch, listing

MOST_BYTES = 200_000_000  # of memory beyond what the parent had, and beyond the size of the input
_MOST_ADDRESSES = 1 << 30  # beyond memory: mapped files, libraries that are opened late, stacks of threads
_MOST_WALL_S = 60  # for a door that sleeps
_MOST_FILE_BYTES = 256 << 20
_REPORT_BYTES = 1 << 16


@dataclass(frozen=True)
class Case:
    """A group's case: seed and number give its random numbers."""

    group: Group
    seed: int
    number: int

    @property
    def random(self) -> Random:
        """Its random numbers, from the start."""
        return Random(f"{self.seed}/{self.group.name}/{self.number}")


def outcome_of(case: Case, prepared: Any, folder: Path) -> Outcome:
    """What came of a case; `folder` is made for it (`in`, `out`, `tmp`, `here`) and left for the caller to remove.

    Raises:
        RunFailed: the group could not make its input.
    """
    for name in ("in", "out", "tmp", "here"):
        (folder / name).mkdir(parents=True)
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _be_the_child(case, prepared, folder, write)
    os.close(write)
    report = _report(read, child)
    _, status = os.waitpid(child, 0)
    text = (folder / "stderr").read_text(errors="replace")[:20_000] if (folder / "stderr").exists() else ""
    if (folder / CANARY).exists():
        return Outcome("code", "canary", "", text)
    if os.WIFSIGNALED(status):
        return of_signal(signal.Signals(os.WTERMSIG(status)).name, text)
    if not report:
        return Outcome("traceback", f"exit {os.waitstatus_to_exitcode(status)} without a word", "", text)
    told = json.loads(report)
    if "broken" in told:
        raise RunFailed(
            f"group {case.group.name} could not make case {case.number} of seed {case.seed}: {told['broken']}",
            "a group whose `make` writes any case",
            "correct the group",
        )
    return Outcome(**told)


def _report(read: int, child: int) -> bytes:
    """What a child writes until it ends; one that does not end is ended."""
    parts = []
    while True:
        ready, _, _ = select.select([read], [], [], _MOST_WALL_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        part = os.read(read, _REPORT_BYTES)
        if not part:
            break
        parts.append(part)
    os.close(read)
    return b"".join(parts)


def _be_the_child(case: Case, prepared: Any, folder: Path, write: int) -> None:
    """Makes the input, opens it, reports, and ends the process whatever happens."""
    try:
        gc.freeze()
        _turn_output_to(folder / "stderr")
        told = _told(case, prepared, folder)
        os.write(write, json.dumps(told).encode())
    except BaseException:  # of the fuzzing itself: the parent shows it
        os.write(write, json.dumps({"broken": traceback.format_exc()[-2000:]}).encode())
    finally:
        os._exit(0)


def _told(case: Case, prepared: Any, folder: Path) -> dict[str, Any]:
    case.group.make(prepared, case.random, folder / "in")
    allowed = (folder / "out", folder / "tmp")
    before = listing(folder, allowed)
    watch = Watch(allowed, folder)
    os.chdir(folder / "here")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    most_bytes = _size(folder / "in") + MOST_BYTES + (case.group.more_mib << 20)
    seconds, resident = _cpu_s(), _memory()["VmRSS"]
    _limit(most_bytes, case.group.most_cpu_s)
    watch.begin()
    try:
        outcome = of_return(case.group, case.group.open(prepared, folder / "in"))
    except BaseException as error:
        outcome = of_error(case.group, error)
    outcome = replace(outcome, cpu_s=_cpu_s() - seconds, more_bytes=max(0, _memory()["VmHWM"] - resident))
    if outcome.cpu_s > case.group.most_cpu_s and not outcome.is_finding:
        outcome = replace(outcome, word="time", error="with its processes")
    if outcome.more_bytes > most_bytes and not outcome.is_finding:
        outcome = replace(outcome, word="memory", error="present at once")
    return as_json(_watched(outcome, watch, before, folder))


def _watched(outcome: Outcome, watch: Watch, before: dict[str, tuple[int, int]], folder: Path) -> Outcome:
    """An outcome, or what the case did beside it that none may."""
    if watch.programs:
        return Outcome("code", watch.programs[0].split("(")[0], outcome.frame, watch.programs[0])
    changed = set(before.items()) ^ set(listing(folder, (folder / "out", folder / "tmp")).items())
    wrote = watch.outside + sorted(path for path, _ in changed if path != str(folder / "stderr"))
    if wrote:
        return Outcome("outside", wrote[0].split(" ")[0], outcome.frame, wrote[0])
    return outcome


def _turn_output_to(path: Path) -> None:
    """Both streams go to a file; so do the frames of a child that takes too long or crashes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGPROF, file, all_threads=False, chain=True)


def _limit(most_bytes: int, most_cpu_s: float) -> None:
    """From here on: so much memory more, so much time more, and no huge files."""
    now = _memory()
    most = now["VmData"] + most_bytes  # memory of this process alone; what is mapped from a file is none
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    most = now["VmSize"] + most_bytes + _MOST_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, most_cpu_s)
    sys.dont_write_bytecode = True  # what is imported late would be cut at the limit, and stay so for all processes
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _memory() -> dict[str, int]:
    """This process's memory in bytes, by the kernel's names: of all kinds, its own, present, and most ever present."""
    lines = Path("/proc/self/status").read_text().splitlines()
    parts = (line.replace(":", " ").split() for line in lines if line.endswith(" kB"))
    return {name: int(value) << 10 for name, value, _ in parts}


def _cpu_s() -> float:
    """Of a processor, by this process and by those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _size(folder: Path) -> int:
    return sum(size for size, _ in listing(folder, ()).values())


def remove(folder: Path) -> None:
    """A case's folder, whatever its rights are now."""
    shutil.rmtree(folder, ignore_errors=True)
