"""Kernels as Nsight Compute counted them, from its raw page as CSV: `ncu --import F.ncu-rep --page raw --csv`.

The page has a line of names, a line of units, then a line a kernel. Numbers are written with separators of thousands,
units with a prefix chosen by the tool; the NVTX column holds the ranges around the launch as text. Lines before the
names begin with `==`. Source: Nsight Compute CLI documentation, "Print details" and "NVTX filtering".
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.errors import ExperimentError
from lab.probes.profiles.capture import PUBLIC, SINGLE_STAGES

DURATION, DRAM, WARPS = (
    "gpu__time_duration.sum", "dram__bytes.sum", "sm__warps_active.avg.pct_of_peak_sustained_active",
)  # fmt: skip
METRICS = (DURATION, DRAM, WARPS)
NVTX_COLUMN = "thread Domain:Push/Pop_Range"  # begins the name of the column
SECONDS = {"n": 1e-3, "u": 1.0, "m": 1e3, "": 1e6}  # microseconds of one, by the prefix of second
BYTES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_STAGE = re.compile(r"(?<![\w.])(?:draft|target|tree)\.[a-z0-9_.]*[a-z0-9_]")
_KNOWN = re.compile("|".join(map(re.escape, PUBLIC)) + "|" + _STAGE.pattern + "|"
                    + "|".join(rf"(?<![\w.]){name}(?![\w.])" for name in SINGLE_STAGES))  # fmt: skip


@dataclass(frozen=True)
class NcuKernel:
    """One profiled launch.

    Attributes:
        ranges: of the engine around it. us: its time, alone on the GPU.
        dram_bytes: read and written. occupancy: resident warps over the most there can be, while it ran.
    """

    name: str
    ranges: tuple[str, ...]
    us: float
    dram_bytes: float | None
    occupancy: float | None


def read_ncu(path: Path) -> list[NcuKernel]:
    """The kernels of a raw page.

    Raises:
        ExperimentError: it is none.
    """
    return kernels_of(path.read_text(encoding="utf-8", errors="replace").splitlines(), path.name)


def is_raw_page(lines: Iterable[str]) -> bool:
    """Whether a CSV is Nsight Compute's raw page."""
    return any("Kernel Name" in line and DURATION in line for line in lines)


def kernels_of(lines: Sequence[str], name: str = "the CSV") -> list[NcuKernel]:
    """The kernels of a raw page's lines."""
    first = next((i for i, line in enumerate(lines) if "Kernel Name" in line), None)
    table = [] if first is None else list(csv.reader(lines[first:]))
    if len(table) < 2 or DURATION not in table[0]:
        raise ExperimentError(
            f"{name} has no raw page with {DURATION}", "names, units, then a line a kernel",
            f"write it with `ncu --import F.ncu-rep --page raw --csv`, taken with --metrics {','.join(METRICS)}",
        )  # fmt: skip
    names, units = table[0], dict(zip(table[0], table[1], strict=False))
    nvtx = [i for i, column in enumerate(names) if column.startswith(NVTX_COLUMN)]
    found = []
    for line in table[2:]:
        row = dict(zip(names, line, strict=False))
        if not row.get(DURATION):
            continue
        text = " ".join(line[i] for i in nvtx if i < len(line))
        us = _scaled(row, units, DURATION, SECONDS)
        warps = _number(row.get(WARPS))
        found.append(NcuKernel(
            row["Kernel Name"], tuple(_KNOWN.findall(text)), us or 0.0, _scaled(row, units, DRAM, BYTES),
            None if warps is None else warps / 100,
        ))  # fmt: skip
    return found


def _scaled(row: dict[str, str], units: dict[str, str], metric: str, of: dict[str, float]) -> float | None:
    number, unit = _number(row.get(metric)), units.get(metric, "")
    if number is None:
        return None
    short = {"ns": "n", "us": "u", "ms": "m", "s": ""}
    prefix = short[unit] if unit in short else re.sub(r"(second|byte)s?$", "", unit)
    if prefix not in of:
        raise ExperimentError(
            f"{metric} is in {unit!r}", f"seconds or bytes with a prefix of {sorted(of)}", "take it with this version"
        )
    return number * of[prefix]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None
