"""How fast this machine moves memory: the ceiling every bandwidth number in a report is read against.

A copy reads and writes each byte; a read sums it. Buffers from inside the cache to well beyond it show where the
ceiling of the memory itself begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from lab.errors import ExperimentError
from lab.figures import Drawing
from lab.rows.clock import Timing, measure

Way = Literal["copy", "read"]

# The best read rate that any run saw, 10^9 bytes a second, by a word of the GPU's name. H200: a read-only reduction
# over 4 GiB; source: docs/log.md.
_KNOWN_GB_PER_S = {"H200": 4578.0}

# 10^9 bytes a second that the vendor states, of a GPU of each architecture that kernels are compiled for. Read rates
# that are reached are lower: of the H200's 4800 they are 4578. Source: NVIDIA's data sheets of these products.
STATED_GB_PER_S = {
    "A100 SXM 80 GB": 2039.0,
    "H100 SXM": 3350.0,
    "H200": 4800.0,
    "B200": 8000.0,
    "RTX PRO 6000 Blackwell": 1792.0,
}


@dataclass(frozen=True)
class ReadRate:
    """How fast a GPU reads its memory: the best that any run saw, or, of one that was not measured, what is stated."""

    gpu: str
    gb_per_s: float
    is_measured: bool

    def __str__(self) -> str:
        return f"{self.gpu}: {self.gb_per_s:.0f} GB/s, {'measured' if self.is_measured else 'as stated'}"


def read_rate(gpu: str) -> ReadRate:
    """The rate of a GPU of this name.

    Raises:
        ExperimentError: none is known of it.
    """
    measured = known_gb_per_s(gpu)
    if measured is not None:
        return ReadRate(gpu, measured, True)
    if gpu in STATED_GB_PER_S:
        return ReadRate(gpu, STATED_GB_PER_S[gpu], False)
    raise ExperimentError(f"no read rate is known of a GPU {gpu!r}", ", ".join(STATED_GB_PER_S), "name one of these")


# 10^12 operations a second of the library's product of large matrices in bf16, by a word of the GPU's name: what power
# leaves of the tensor cores' 989 on an H200.
_KNOWN_TFLOP_PER_S = {"H200": 690.0}


def known_tflop_per_s(gpu: str | None) -> float | None:
    """What a library's large products reach in bf16 on GPUs of this name; None where none is known."""
    return next((rate for word, rate in _KNOWN_TFLOP_PER_S.items() if gpu and word in gpu), None)


def known_gb_per_s(gpu: str | None) -> float | None:
    """The best read rate known of GPUs of this name; None where none is known, or there is no GPU."""
    return next((rate for word, rate in _KNOWN_GB_PER_S.items() if gpu and word in gpu), None)


def gpu_name(device: torch.device) -> str | None:
    """The GPU as the driver names it; None of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def ceiling_words(gpu: str | None, gb_per_s: float) -> str:
    """A read ceiling for people, and where it comes from if it was measured in the run alone."""
    told = f"read ceiling {gb_per_s:.0f} GB/s"
    return told if known_gb_per_s(gpu) else f"{told}, as this run measured it: none is known of {gpu or 'a CPU'}"


@dataclass(frozen=True)
class Ceiling:
    """One way of moving a buffer of `n_bytes`: `moved_bytes` counts reads and writes."""

    device: str
    way: Way
    n_bytes: int
    moved_bytes: int
    timing: Timing

    @property
    def gb_per_s(self) -> float:
        """Bytes moved a second at the median, in 10^9."""
        return self.moved_bytes / self.timing.median_us / 1e3

    @property
    def samples_gb_per_s(self) -> list[float]:
        """The same for each sample."""
        return [self.moved_bytes / sample / 1e3 for sample in self.timing.samples_us]

    def row_values(self) -> dict[str, float | int | list[float]]:
        """The values of its row."""
        samples = self.samples_gb_per_s
        return {"gb_per_s": self.gb_per_s, "gb_per_s_samples": samples, "moved_bytes": self.moved_bytes}


def memory_ceilings(device: str, sizes: list[int], *, repeats: int = 15) -> list[Ceiling]:
    """Copy and read bandwidth of `device` ("cpu" or "cuda") for each buffer size in bytes, ascending.

    On a CPU the number of torch threads that the process was given is used, and is part of what is measured.
    """
    found = []
    for n_bytes in sizes:
        source = torch.rand(n_bytes // 4, dtype=torch.float32, device=device)
        destination = torch.empty_like(source)
        found.append(_ceiling(device, "copy", n_bytes, 2 * n_bytes, partial(destination.copy_, source), repeats))
        found.append(_ceiling(device, "read", n_bytes, n_bytes, source.sum, repeats))
    return found


def _ceiling(
    device: str, way: Way, n_bytes: int, moved_bytes: int, call: Callable[[], object], repeats: int
) -> Ceiling:
    return Ceiling(device, way, n_bytes, moved_bytes, measure(call, warmup=3, repeats=repeats, device=device))


def bandwidth(moved: Sequence[Ceiling]) -> Drawing:
    """Bandwidth over the size of the buffer, a line a device and way."""
    import pandas as pd
    from matplotlib import pyplot as plt

    columns = {
        "device": [one.device for one in moved], "way": [one.way for one in moved],
        "buffer_mib": [one.n_bytes / 2**20 for one in moved], "gb_per_s": [one.gb_per_s for one in moved],
    }  # fmt: skip
    table = pd.DataFrame(columns)
    fig, axes = plt.subplots()
    for (device, way), part in table.groupby(["device", "way"], sort=False):
        axes.plot(part["buffer_mib"], part["gb_per_s"], label=f"{device} {way}")
    sizes = sorted(set(table["buffer_mib"]))
    axes.set(xscale="log", xlabel="buffer, MiB", ylabel="GB/s, median", ylim=(0, None))
    axes.set_title("Memory bandwidth by buffer size")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.legend()
    widest = max(moved, key=lambda one: one.gb_per_s)
    last = [one for one in moved if one.n_bytes == moved[-1].n_bytes]
    alt = (
        f"Lines of memory bandwidth against buffer size. Highest: {widest.gb_per_s:.0f} GB/s ({widest.device} "
        f"{widest.way}, "
        f"{widest.n_bytes / 2**20:g} MiB). At the largest buffer: "
        + ", ".join(f"{one.device} {one.way} {one.gb_per_s:.0f} GB/s" for one in last)
        + "."
    )
    timing = moved[0].timing
    caption = f"Median of {timing.repeats} samples a point, {timing.timer}; 1 GB is 10^9 bytes."
    return Drawing(fig, table, alt, caption)
