"""Runs the kernels' own benchmark on the GPU of this machine, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3core.kernels import registry
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, RunFailed
from lab.probes.kernels.rows import FILE, KERNEL, PROOF
from lab.rows.environment import UNKNOWN
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter, utc_now

LEAST_S = 1.0  # that a benchmark accepts as its limit
ATTENTION_SHARE = 0.3  # of the limit that is kept for attention, which is timed last
# The benchmark's exit codes when rows were written, also where a proof failed or the time was up before all were made.
_WROTE_ROWS = (EXIT_PASSED, EXIT_GATE_FAILED, EXIT_COULD_NOT_RUN)


def measured(folder: Path, ops: Sequence[str], limit_s: float) -> Path:
    """Rows of `ops` (all when empty), fresh from this machine's GPU; no measurement begins after `limit_s` seconds.

    Attention has a benchmark of its own, since its libraries do not all exist for every shape, and a share of the time.

    Raises:
        RunFailed: a benchmark could not run; its last words are in the message.
    """
    out, end = folder / FILE, time.monotonic() + limit_s
    wanted = list(ops) or list(registry())
    others = [op for op in wanted if op != "attention"]
    if others:
        _run(out, "bench", limit_s * (1.0 - ATTENTION_SHARE * ("attention" in wanted)), "--ops", ",".join(others))
    if "attention" in wanted:
        left_s = end - time.monotonic()
        if left_s < LEAST_S:
            _left_out(out, "attention", f"no second of the limit of {limit_s:.0f} s was left for its benchmark")
        else:
            _run(out, "attention_bench", left_s)
    return out


def _left_out(out: Path, op: str, reason: str) -> None:
    maker = RowMaker(f"kernels-{utc_now()}", "kernels", UNKNOWN)
    with RowWriter(out) as writer:
        for kind in (PROOF, KERNEL):
            writer.write(maker.missing(kind, op, reason))


def _run(out: Path, module: str, limit_s: float, *options: str) -> None:
    program = f"lab.probes.kernels.{module}"
    command = [sys.executable, "-m", program, "--out", str(out), "--limit-s", f"{limit_s:.0f}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    # A crash and an error that was told end with these codes too; only they leave a traceback or the program's name.
    said = "Traceback" in done.stderr or f"-m {program}: " in done.stderr
    crashed = said or done.returncode not in _WROTE_ROWS
    if crashed or not out.exists() or not out.stat().st_size:
        words = done.stderr.strip().splitlines()
        raise RunFailed(
            f"the benchmark of the kernels ended with {done.returncode}: {words[-1] if words else 'no message'}",
            "a CUDA device of compute capability 8.0 or later, with numba-cuda and cuda-core",
            "see `eagle3lab doctor`, or leave `measure` off to read stored rows",
        )
