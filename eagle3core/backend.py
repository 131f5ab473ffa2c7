"""Which device runs the engine and by what, chosen once, with the reasons."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from eagle3core.config import EngineConfig
from eagle3core.errors import BackendUnavailable


@dataclass(frozen=True)
class Backend:
    """A device and why it was chosen, and what computes on it.

    Attributes:
        path: `kernels`, the GPU's own, with the step on the device; or `torch`, operation by operation.
        path_reason: why.
    """

    device: torch.device
    reason: str
    path: Literal["torch", "kernels"] = "torch"
    path_reason: str = "plain torch unless a model is chosen for the kernels"

    @property
    def free_bytes(self) -> int:
        """Memory that is free on the device now, bytes; torch first gives back what it kept for later."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self.device)[0])
        return available_host_bytes()


def choose_backend(config: EngineConfig) -> Backend:
    """The device that `config.device` names, or the best there is.

    Raises:
        BackendUnavailable: CUDA was asked for by name and torch sees none.
    """
    if config.device == "cpu":
        return Backend(torch.device("cpu"), "device='cpu' was asked for")
    if torch.cuda.is_available():
        return Backend(torch.device("cuda"), f"CUDA device {torch.cuda.get_device_name()}")
    why_not = "torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
    if config.device == "cuda":
        raise BackendUnavailable(
            f"device is 'cuda' and {why_not}", "'cpu' or 'auto' on this machine", "set device='auto', or install a GPU"
        )
    return Backend(torch.device("cpu"), why_not)


def available_host_bytes() -> int:
    """Host memory that a program may still take, bytes: what Linux calls available, which counts reclaimable cache."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in values:
            return int(values["MemAvailable"].split()[0]) * 1024  # the file counts in KiB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no such account elsewhere: all of it


def processes_for(n_jobs: int, bytes_each: int) -> int:
    """How many processes are worth starting: one a job, as far as processors and free memory go, at least one."""
    return max(1, min(n_jobs, processors(), available_host_bytes() // bytes_each))


def processors() -> int:
    """Processors that this process may use; a container's share of them where that is less."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        allowed, period = quota.read_text().split()
        n = n if allowed == "max" else min(n, -(-int(allowed) // int(period)))
    return n
