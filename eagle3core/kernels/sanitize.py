"""Every card under compute-sanitizer: python3 -m eagle3core.kernels.sanitize --out rows.jsonl

memcheck watches each access to memory, racecheck each pair of accesses to shared memory; both see only our kernels.
First the planted bugs (`sanitize_plants`) take the same path: a tool that misses its plant, or reports the same kernel
without it, has no say, and nothing is called clean. Then every card runs in a process of its own, several at once: its
tiny cases under every setting, each launched once. Kernels are compiled before the tools start.

`--build DIR --arch sm_90a` compiles on any machine; the run finds the kernels through EAGLE3_CUBINS.
Exit codes: 0 all clean, 1 something found or failed, 3 not all could be run.

Source: Compute Sanitizer documentation, release 2025.3; limits derived here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from eagle3core.errors import BackendUnavailable, InvariantViolated
from eagle3core.kernels import bench, launch, registry
from eagle3core.kernels.card import ARCHES, Card, Variant
from eagle3core.kernels.compile import tool
from eagle3core.kernels.sanitize_plants import PLANTS
from eagle3core.kernels.sanitize_report import CLEAN, FAILED, FOUND, INCOMPLETE, Outcome, judged
from eagle3core.kernels.sanitize_run import variants

SANITIZER = "compute-sanitizer"
TOOLS = tuple(PLANTS)
_NAMED = "eagle3core"  # in the mangled name of each of our kernels, and of no other
_ERROR_CODE = 86  # what the tool ends with when it found something; Python's own codes are lower
_PORTS, _PORTS_EACH = 49152, 16  # the tool listens on ten ports from a base; runs beside it need others
_CONNECT_S, _RUN_S = 120, 240.0
_MOST_JOBS = 12  # processes at once; each holds a CUDA context and a core or more
_OPTIONS = {
    "memcheck": ("--padding", "1024"),  # so that the next allocation is no neighbour of the last element
    "racecheck": ("--racecheck-report", "analysis"),
}
# One allocation a tensor, whose bounds the tool then knows; kernels of torch are loaded when used.
_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _options(arguments)
    try:
        return _built(options) if options.build else _sanitized(options)
    except BackendUnavailable as missing:
        print(missing, file=sys.stderr)
        return 3


def _built(options: argparse.Namespace) -> int:
    wanted = variants([*_cards(options), *_planted()], options.arch)
    made = _compiled(wanted, options.arch, Path(options.build), options.jobs)
    print(f"{len(wanted)} kernels wanted, {made} compiled")
    return 0


def _cards(options: argparse.Namespace) -> list[Card]:
    return [registry()[name] for name in options.ops.split(",")]


def _planted() -> list[Card]:
    return [card for pair in PLANTS.values() for card in pair]


def _sanitized(options: argparse.Namespace) -> int:
    """Prepares, tries the tools on the planted bugs, runs the cards, and concludes.

    Raises:
        BackendUnavailable: no GPU, no compute-sanitizer, or one that does not work on this machine.
    """
    cards, path = _cards(options), located()
    _prepare(cards, options.jobs)
    tell = _teller(path, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(options.logs or scratch)
        logs.mkdir(parents=True, exist_ok=True)
        run = Run(path, logs, time.monotonic() + options.limit_s, options.jobs)
        plants = run.all_of([(card, name) for name in TOOLS for card in PLANTS[name]], tell)
        missed = missed_plants(plants)
        print("\n".join(missed) or "both tools find their planted bug and pass the same kernel without it", flush=True)
        found = [] if missed else run.all_of([(card, name) for card in cards for name in TOOLS], tell)
    return _concluded(found, len(cards) * len(TOOLS), missed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eagle3core.kernels.sanitize", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", default="", help="rows are appended to this file")
    parser.add_argument("--ops", default=",".join(registry()), help="cards, separated by commas")
    parser.add_argument("--jobs", type=int, default=min(_MOST_JOBS, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--limit-s", type=float, default=510.0, help="stop whatever runs after this many seconds")
    parser.add_argument("--logs", default="", help="keep the tools' logs in this folder")
    parser.add_argument("--build", default="", help="compile for --arch into this folder and stop; no GPU needed")
    parser.add_argument("--arch", default="sm_90a", choices=ARCHES)
    return parser.parse_args(arguments)


def located() -> str:
    """Path of compute-sanitizer.

    Raises:
        BackendUnavailable: it is not installed.
    """
    try:
        return tool(SANITIZER)
    except BackendUnavailable as missing:
        raise BackendUnavailable(
            f"{SANITIZER} was not found in CUDA_HOME/bin, PATH or /usr/local/cuda/bin",
            "the one of a CUDA 13 toolkit",
            "install the toolkit's package cuda-sanitizer, or set CUDA_HOME to a toolkit that has it",
        ) from missing


def _prepare(cards: Sequence[Card], jobs: int) -> None:
    """Finds or compiles every kernel, so that nothing is compiled under a tool."""
    arch, begun = launch.device_arch(), time.monotonic()
    wanted = variants([*cards, *_planted()], arch)
    missing = [variant for variant in wanted if not _is_at_hand(variant, arch)]
    print(f"{len(wanted)} kernels for {arch}, {len(missing)} of them to be compiled first", flush=True)
    _compiled(missing, arch, launch.cache_folder(), jobs)
    for variant in wanted:
        _, about = launch.cubin(variant, arch)
        if _NAMED not in about["entry"]:
            raise InvariantViolated(
                f"{variant.name} is called {about['entry']} in its cubin, which the tools would skip",
                f"a name that holds {_NAMED!r}", "keep kernel factories in modules of the package",
            )  # fmt: skip
    print(f"kernels at hand after {time.monotonic() - begun:.0f} s", flush=True)


def _is_at_hand(variant: Variant, arch: str) -> bool:
    folders = [*os.environ.get(launch.CUBINS_VARIABLE, "").split(os.pathsep), str(launch.cache_folder())]
    name = f"{variant.name}.{arch}.{launch.digest(variant, arch)}.json"
    return any(Path(folder, name).exists() for folder in folders if folder)


def _compiled(wanted: Sequence[Variant], arch: str, out: Path, jobs: int) -> int:
    """Compiles into `out` what it lacks, in `jobs` processes; how many kernels that were."""
    if not wanted:
        return 0
    # Processes that start anew: one that is forked may not use the GPU its parent has used.
    with ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=get_context("spawn")) as pool:
        return sum(pool.map(partial(launch.build_cubins, arch=arch, out=out), [[variant] for variant in wanted]))


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
        log, result = self.logs / f"{op}.{name}.log", self.logs / f"{op}.{name}.json"
        for stale in (log, result):
            stale.unlink(missing_ok=True)
        begun = time.monotonic()
        limit = min(_RUN_S, self.deadline - begun)
        code = self._ended(self.command(op, name, log, result), log.with_suffix(".out"), limit) if limit > 0 else None
        text = log.read_text(errors="replace") if log.exists() else ""
        wrote = json.loads(result.read_text()) if result.exists() else None
        outcome = judged(op, name, text, code, wrote, time.monotonic() - begun)
        if outcome.verdict == FAILED and wrote is None:
            outcome.reasons.extend(log.with_suffix(".out").read_text(errors="replace").splitlines()[-3:])
        return outcome

    def command(self, op: str, name: str, log: Path, result: Path) -> list[str]:
        """The tool's command line around `sanitize_run`."""
        with self._lock:
            port, self._count = _PORTS + _PORTS_EACH * self._count, self._count + 1
        return [
            self.path, "--tool", name, "--kernel-name", f"kns={_NAMED}", "--target-processes", "application-only",
            "--destroy-on-device-error", "kernel", "--report-api-errors", "no", "--show-backtrace", "device",
            "--error-exitcode", str(_ERROR_CODE), "--launch-timeout", str(_CONNECT_S), "--port", str(port),
            "--log-file", str(log), *_OPTIONS[name],
            sys.executable, "-m", "eagle3core.kernels.sanitize_run", "--card", op, "--result", str(result),
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


def missed_plants(outcomes: Sequence[Outcome]) -> list[str]:
    """Why a tool may not judge, in words: it missed its plant, or took the same kernel without it for faulty.

    Raises:
        BackendUnavailable: a tool gave no verdict at all.
    """
    verdicts = {(outcome.tool, outcome.op): outcome for outcome in outcomes}
    words = []
    for name, (planted, undone) in PLANTS.items():
        with_bug, without = verdicts[name, planted.name], verdicts[name, undone.name]
        for outcome in (with_bug, without):
            if outcome.summary is None:
                raise BackendUnavailable(
                    f"{name} does not work on this machine: {'; '.join(outcome.reasons)}",
                    "a driver and a container that let compute-sanitizer instrument kernels",
                    "see its log with --logs DIR, or run it on another machine",
                )
        if with_bug.verdict != FOUND:
            words.append(f"{name} missed the bug of {planted.name} ({with_bug.verdict}): nothing it says counts")
        if without.verdict != CLEAN:
            words.append(f"{name} is not content with {undone.name} ({without.verdict}): nothing it says counts")
    return words


def _teller(path: str, out: str) -> Callable[[Outcome], None]:
    """Prints an outcome and appends its row to `out`, if a file is named, at once: a run may be stopped at any time."""
    about: dict[str, Any] = bench.environment()
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    about["versions"][SANITIZER] = next((line for line in words if line.startswith("Version")), None)

    def tell(outcome: Outcome) -> None:
        print(outcome.line(), flush=True)
        if out:
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": "sanitizer", **outcome.row(), **about}) + "\n")

    return tell


def _concluded(found: Sequence[Outcome], wanted: int, missed: Sequence[str]) -> int:
    counts = {verdict: sum(o.verdict == verdict for o in found) for verdict in (CLEAN, FOUND, FAILED, INCOMPLETE)}
    kernels = sum(outcome.launches for outcome in found)
    print(f"{counts[CLEAN]} of {wanted} runs clean over {kernels} kernels, {counts[FOUND]} found something, "
          f"{counts[FAILED]} failed, {wanted - len(found) + counts[INCOMPLETE]} incomplete", flush=True)  # fmt: skip
    if missed or counts[FOUND] or counts[FAILED]:
        return 1
    return 0 if counts[CLEAN] == wanted else 3


if __name__ == "__main__":
    sys.exit(main())
