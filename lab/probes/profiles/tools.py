"""Nsight Systems and Nsight Compute as they are called here, and what to say where they are not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab.errors import RunFailed
from lab.probes.profiles.ncu import METRICS
from lab.probes.proofs.gpu_trace import WINDOW

DOMAIN = "eagle3core"  # of the engine's ranges
SQLITE, RAW = "nsys.sqlite", "ncu.csv"
NO_COUNTERS = "ERR_NVGPUCTRPERM"  # the driver's word for counters that this user may not read


def why_none(tool: str) -> str | None:
    """Why a tool cannot be used, in a line; None if it is there."""
    return None if shutil.which(tool) else f"{tool} is not in PATH"


def nsys_command(folder: Path, child: Sequence[str]) -> list[str]:
    """A capture of the child's watched steps, kernels of graphs one by one."""
    return [
        "nsys", "profile", "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "-t", "cuda,nvtx",
        "--cuda-graph-trace=node", "--sample=none", "--force-overwrite=true", "-o", str(folder / "nsys"), *child,
    ]  # fmt: skip


def ncu_command(folder: Path, child: Sequence[str], include: str = "") -> list[str]:
    """Counters of the kernels inside the child's watched steps, at the clocks that timings are taken at."""
    wanted = include or f"{DOMAIN}@{WINDOW}/"
    return [
        "ncu", "--nvtx", "--nvtx-include", wanted, "--clock-control", "none", "--profile-from-start", "off",
        "--graph-profiling", "node", "--metrics", ",".join(METRICS), "--force-overwrite", "-o", str(folder / "ncu"),
        *child,
    ]  # fmt: skip


def take_sqlite(folder: Path, child: Sequence[str]) -> Path:
    """Runs a child under Nsight Systems; the export.

    Raises:
        RunFailed: the tool or the child failed, or left nothing.
    """
    _run(nsys_command(folder, child), folder / "nsys.log")
    return export_sqlite(folder / "nsys.nsys-rep", folder)


def export_sqlite(report: Path, folder: Path) -> Path:
    """A stored report as SQLite.

    Raises:
        RunFailed: `nsys` is not here, or failed.
    """
    out = folder / SQLITE
    _run(
        ["nsys", "export", "--type", "sqlite", "--force-overwrite=true", "-o", str(out), str(report)],
        folder / "export.log",
    )
    return out


def take_raw_page(folder: Path, child: Sequence[str], include: str = "") -> Path:
    """Runs a child under Nsight Compute; its raw page.

    Raises:
        RunFailed: the tool or the child failed, the driver keeps its counters to itself, or no kernel was seen.
    """
    _run(ncu_command(folder, child, include), folder / "ncu.log")
    return export_raw_page(folder / "ncu.ncu-rep", folder)


def export_raw_page(report: Path, folder: Path) -> Path:
    """A stored report's raw page as CSV.

    Raises:
        RunFailed: `ncu` is not here, or failed.
    """
    text = _run(["ncu", "--import", str(report), "--page", "raw", "--csv"], folder / "import.log")
    out = folder / RAW
    out.write_text(text, encoding="utf-8")
    return out


def _run(command: Sequence[str], log: Path) -> str:
    missing = why_none(command[0])
    if missing:
        raise RunFailed(missing, f"{command[0]} installed", "install it, or use --tool torch")
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    log.write_text(said, encoding="utf-8")
    if NO_COUNTERS in said:
        raise RunFailed(
            f"the driver lets this user read no counters ({NO_COUNTERS})", "permission for profiling",
            "ask whoever runs the machine, or go on without Nsight Compute: --tool torch",
        )  # fmt: skip
    if done.returncode:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "no output")
        raise RunFailed(f"{command[0]} exited {done.returncode}: {last.strip()}", "exit 0", f"read {log.name}")
    return done.stdout
