"""Where a measurement ran: device, driver, clocks, packages, commit."""

from __future__ import annotations

import platform
import subprocess
import time
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """What ran where: device, driver, packages, commit."""
    packages = ("torch", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "triton")
    versions = {name: _version(name) for name in packages}
    versions["python"] = platform.python_version()
    versions["driver"] = query("driver_version")
    return {"gpu": torch.cuda.get_device_name(), "versions": versions, "commit": _commit()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


_CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def clocks() -> dict[str, str]:
    """Clocks, power and temperature of the device, as the driver's tool words them; asked for every 2 s at most."""
    return _clocks(int(time.monotonic() / 2))


@lru_cache(maxsize=1)
def _clocks(moment: int) -> dict[str, str]:
    words = query(",".join(_CLOCKS)).split(", ")
    return dict(zip(_CLOCKS, words, strict=True)) if len(words) == len(_CLOCKS) else {"unknown": ", ".join(words)}


def query(fields: str) -> str:
    """Fields of the driver's report on the first device, or why there are none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "nvidia-smi is not installed"
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 else done.stderr.strip()
