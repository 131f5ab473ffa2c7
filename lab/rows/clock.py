"""One way to time a call: CUDA events on a GPU, the monotonic nanosecond counter on a CPU.

`METHOD` is part of each row's timer: when this file measures differently, the number goes up, and the history starts
anew instead of showing a changed timer as a regression.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.errors import ExperimentError

METHOD = 1
ON_CPU, ON_CUDA = f"perf_counter_ns/{METHOD}", f"cuda_event/{METHOD}"


@dataclass(frozen=True)
class Timing:
    """What repeated calls took, in microseconds.

    `samples_us` are in the order measured; the percentiles interpolate linearly between samples.
    """

    samples_us: tuple[float, ...]
    timer: str
    warmup: int

    @property
    def repeats(self) -> int:
        """How many samples there are."""
        return len(self.samples_us)

    @property
    def median_us(self) -> float:
        """The middle sample."""
        return quantile(self.samples_us, 0.5)

    @property
    def p10_us(self) -> float:
        """The time that one call in ten beats."""
        return quantile(self.samples_us, 0.1)

    @property
    def p90_us(self) -> float:
        """The time that nine calls in ten beat."""
        return quantile(self.samples_us, 0.9)

    def values(self, name: str = "time") -> dict[str, float | list[float]]:
        """The row values `<name>_us` (median), `<name>_us_p10`, `<name>_us_p90`, `<name>_us_samples`."""
        return {
            f"{name}_us": self.median_us,
            f"{name}_us_p10": self.p10_us,
            f"{name}_us_p90": self.p90_us,
            f"{name}_us_samples": list(self.samples_us),
        }


def quantile(samples: tuple[float, ...] | list[float], q: float) -> float:
    """The `q` quantile (0..1) of `samples`, linear between neighbours."""
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def measure(call: Callable[[], object], *, warmup: int = 3, repeats: int = 20, device: str = "cpu") -> Timing:
    """Times `call`, one sample a call.

    On `cuda` the events bracket the call on the current stream, so a sample holds launch gaps as well as kernels.

    Raises:
        ExperimentError: fewer than one repeat, a negative warm-up, or a device kind that has no timer.
    """
    if repeats < 1 or warmup < 0:
        raise ExperimentError(
            f"measure was asked for {repeats} repeats after {warmup} warm-up calls",
            "repeats >= 1, warmup >= 0",
            "give at least one repeat; 20 or more make the percentiles mean something",
        )
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ExperimentError(f"no timer for device {device!r}", "cpu, cuda, cuda:N", "measure on one of these")
    for _ in range(warmup):
        call()
    samples = _on_cpu(call, repeats) if kind == "cpu" else _on_cuda(call, repeats, device)
    return Timing(tuple(samples), ON_CPU if kind == "cpu" else ON_CUDA, warmup)


def _on_cpu(call: Callable[[], object], repeats: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return samples


def _on_cuda(call: Callable[[], object], repeats: int, device: str) -> list[float]:
    import torch

    with torch.cuda.device(device):
        event: Any = torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
        torch.cuda.synchronize()
        for start, stop in pairs:
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [float(start.elapsed_time(stop)) * 1e3 for start, stop in pairs]
