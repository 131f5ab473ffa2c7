"""Programs under a sanitizer, a process each, several at once. Source: Compute Sanitizer documentation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from eagle3core.kernels import Card
from lab.probes.sanitizer.report import FAILED, Outcome, judged

NAMED = "_3clocals_3e"  # "<locals>" as Numba mangles it: in the name of each kernel made by a factory, and no other
_ERROR_CODE = 86  # what the tool ends with when it found something; Python's own codes are lower
_PORTS, _PORTS_EACH = 49152, 16  # the tool listens on ten ports from a base; runs beside it need others
_CONNECT_S, _RUN_S = 120, 240.0
_OPTIONS = {
    "memcheck": ("--padding", "1024"),  # so that the next allocation is no neighbour of the last element
    "racecheck": ("--racecheck-report", "analysis"),
}
# One allocation a tensor, whose bounds the tool then knows; kernels of torch are loaded when used.
_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}


@dataclass
class Run:
    """Processes under the tools: where their logs go, until when, and how many at once."""

    path: str
    logs: Path
    deadline: float
    jobs: int
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: int = 0

    def all_of(self, wanted: Sequence[tuple[Card, str]], tell: Callable[[Outcome], None]) -> list[Outcome]:
        """Outcomes of (card, tool) pairs in their order; each is told when it is known."""
        pool = ThreadPoolExecutor(self.jobs)
        futures = [pool.submit(self.one, card.name, name) for card, name in wanted]
        try:
            for future in as_completed(futures):
                tell(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()
        return [future.result() for future in futures]

    def one(self, op: str, name: str) -> Outcome:
        """One card in a process of its own under one tool."""
        return self.watch(op, name, ["lab.probes.sanitizer.run", "--card", op, "--tool", name])

    def watch(self, op: str, name: str, program: Sequence[str]) -> Outcome:
        """A module with its arguments, named `op`, under one tool; it writes its counts to what `--result` names."""
        log, result = self.logs / f"{op}.{name}.log", self.logs / f"{op}.{name}.json"
        for stale in (log, result):
            stale.unlink(missing_ok=True)
        begun = time.monotonic()
        limit = min(_RUN_S, self.deadline - begun)
        command = [*self.command(name, log), "-m", *program, "--result", str(result)]
        code = self._ended(command, log.with_suffix(".out"), limit) if limit > 0 else None
        text = log.read_text(errors="replace") if log.exists() else ""
        wrote = json.loads(result.read_text()) if result.exists() else None
        outcome = judged(op, name, text, code, wrote, time.monotonic() - begun)
        if outcome.verdict == FAILED and wrote is None:
            outcome.reasons.extend(log.with_suffix(".out").read_text(errors="replace").splitlines()[-3:])
        return outcome

    def command(self, name: str, log: Path) -> list[str]:
        """The tool's command line up to the Python program under it."""
        with self._lock:
            port, self._count = _PORTS + _PORTS_EACH * self._count, self._count + 1
        return [
            self.path, "--tool", name, "--kernel-name", f"kns={NAMED}", "--target-processes", "application-only",
            "--destroy-on-device-error", "kernel", "--report-api-errors", "no", "--show-backtrace", "device",
            "--error-exitcode", str(_ERROR_CODE), "--launch-timeout", str(_CONNECT_S), "--port", str(port),
            "--log-file", str(log), *_OPTIONS[name],
            sys.executable,
        ]  # fmt: skip

    def _ended(self, command: Sequence[str], out: Path, limit_s: float) -> int | None:
        """The command's exit code; None if it had to be stopped. What it prints goes to `out`."""
        with out.open("wb") as sink:
            environment = {**os.environ, **_ENVIRONMENT}
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        with self._lock:
            self._running.add(process)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            return None
        finally:
            with self._lock:
                self._running.discard(process)

    def _stop(self) -> None:
        with self._lock:
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the tool and the program under it: they share a process group of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
