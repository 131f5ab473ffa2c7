"""The read ceiling as this run measures it: the best bulk reader, on a GPU that is as warm as the steps left it.

A known ceiling (`lab.probes.ceilings`) compares runs; this one says what this machine gave at that moment. A rate
counts only if its sums prove that every byte was read. A CPU has no bulk copies, and reads by torch.

Source: docs/requirements.md R-129; derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3core.errors import Eagle3Error
from eagle3core.kernels import launch
from lab.errors import RunFailed
from lab.probes.ceilings import memory_ceilings
from lab.probes.kernels.reading.bulk import RINGS, Ring, is_read_whole, reads
from lab.rows import gpus
from lab.rows.graph_clock import time_graphs

GPU_BYTES, CPU_BYTES = 2**31, 2**26  # 36 times an H200's L2 cache; twice a large L3


@dataclass(frozen=True)
class RunCeiling:
    """How fast memory was read in this run.

    Attributes:
        gb_per_s: the best rate, 10^9 bytes a second. reader: what reached it.
        rates: of each reader, by its name.
        reason: why it is not the bulk readers' rate; empty if it is.
    """

    gb_per_s: float
    reader: str
    rates: dict[str, float]
    reason: str = ""

    def values(self) -> dict[str, Any]:
        """Of a row: `ceiling_of_run_gb_per_s`, which reader, and why none of bulk copies where that is so."""
        return {
            "ceiling_of_run_gb_per_s": self.gb_per_s,
            "ceiling_of_run_reader": self.reader,
            **({"ceiling_of_run_without_bulk": self.reason} if self.reason else {}),
        }


def run_ceiling(device: torch.device) -> RunCeiling:
    """The ceiling at this moment: by bulk copies, or by torch's sum where those cannot run, with the reason.

    Raises:
        RunFailed: a reader's sums are not the buffer's, so its rate would be of something else.
    """
    if device.type != "cuda":
        return _by_torch(device, CPU_BYTES, "a CPU has no bulk copies")
    try:
        rates = bulk_rates(device, RINGS.get(launch.device_arch(device), ()), GPU_BYTES)
    except (Eagle3Error, torch.OutOfMemoryError) as error:
        return _by_torch(device, GPU_BYTES // 8, str(error).splitlines()[0])
    if not rates:
        return _by_torch(device, GPU_BYTES // 8, "this architecture has no bulk copies")
    best = max(rates, key=lambda name: rates[name])
    return RunCeiling(rates[best], best, rates)


def bulk_rates(device: torch.device, rings: Sequence[Ring], n_bytes: int) -> dict[str, float]:
    """GB/s of each ring, reading one run of memory a warp, and pieces in turn, over `n_bytes` of random words.

    Raises:
        RunFailed: sums that are not the buffer's.
    """
    x = torch.randint(-(2**31), 2**31, (n_bytes // 4,), dtype=torch.int32, device=device)
    n_processors = torch.cuda.get_device_properties(device).multi_processor_count
    ways = {
        f"bulk copies, {ring}, {'a run a warp' if consecutive else 'in turn'}":
            reads(ring, x, n_processors, consecutive=consecutive)
        for ring in rings for consecutive in (False, True)
    }  # fmt: skip
    with torch.cuda.device(device):
        timings = time_graphs([[launch.bind([item])] * 4 for item, _, _ in ways.values()])
        torch.cuda.synchronize()
    for name, (_, sums, n_read) in ways.items():  # after the clock: what was timed is what is proven
        check(name, x, sums, n_read)
    return {name: way[2] / timing.median_us / 1e3 for (name, way), timing in zip(ways.items(), timings, strict=True)}


def check(name: str, x: torch.Tensor, sums: torch.Tensor, n_read: int) -> None:
    """Refuse a reader that left something out.

    Raises:
        RunFailed: its sums are not the buffer's.
    """
    if not is_read_whole(x, sums, n_read):
        raise RunFailed(
            f"{name}: its sums differ from those of the {n_read} bytes it was to read", "each word read once",
            "report the GPU and driver: a rate of anything else is no ceiling",
        )  # fmt: skip


def clock_values(name: str, device: torch.device) -> dict[str, Any]:
    """Clocks, power and temperature of the GPU in use at this moment, as values `<name>.*`; none of a CPU."""
    return {f"{name}.{key}": value for key, value in gpus.clocks().items()} if device.type == "cuda" else {}


def _by_torch(device: torch.device, n_bytes: int, reason: str) -> RunCeiling:
    """The best plain read of torch."""
    found = memory_ceilings(device.type, [n_bytes], repeats=9)
    best = max(one.gb_per_s for one in found if one.way == "read")
    return RunCeiling(best, "torch.sum", {"torch.sum": best}, reason)
