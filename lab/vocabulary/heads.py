"""How long the draft's head takes by the size of its vocabulary: timed on this CPU, and read from a GPU's rows.

The head is a product of a row with a table that is read once, so its time goes with the table's bytes; what the memory
alone would take stands beside every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from lab.probes.ceilings import memory_ceilings
from lab.probes.kernels.rows import Bench
from lab.rows.clock import Timing, measure

_ROTATED_BYTES = 256 << 20  # read between two uses of one table: far beyond a CPU's caches
_MOST_TABLES = 4096


@dataclass(frozen=True)
class HeadTime:
    """The time of a head.

    Attributes:
        size: of its vocabulary. width: of the states that it reads.
        us: of a row. floor_us: what reading its bytes takes at the memory's read rate.
        machine: where. timing: the samples; None of a time read from rows.
    """

    size: int
    width: int
    us: float
    floor_us: float
    machine: str
    timing: Timing | None = None

    def row_values(self) -> dict[str, Any]:
        """What is stored beside the time."""
        return {
            "size": self.size,
            "width": self.width,
            "floor_us": self.floor_us,
            "over_floor": self.us / self.floor_us,
        }


def time_heads(sizes: Sequence[int], width: int, dtype: torch.dtype, machine: str, repeats: int = 7) -> list[HeadTime]:
    """The time of one row through heads of these sizes on this CPU, each over tables that no cache holds.

    Args:
        sizes: of vocabularies. width: of the states. machine: the CPU's name.
    """
    gb_per_s = max(one.gb_per_s for one in memory_ceilings("cpu", [_ROTATED_BYTES], repeats=5) if one.way == "read")
    x, times = torch.randn(1, width, dtype=dtype), []
    for size in sizes:
        n_bytes = size * width * dtype.itemsize
        tables = torch.randn(min(_MOST_TABLES, max(2, -(-_ROTATED_BYTES // n_bytes))), size, width, dtype=dtype)

        def rotation(tables: torch.Tensor = tables) -> None:
            for table in tables:
                linear(x, table)

        whole = measure(rotation, warmup=1, repeats=repeats)
        each = Timing(tuple(us / len(tables) for us in whole.samples_us), whole.timer, whole.warmup)
        times.append(HeadTime(size, width, each.median_us, n_bytes / gb_per_s / 1e3, machine, each))
    return times


def stored_times(bench: Bench, rows: int = 1) -> list[HeadTime]:
    """Times of plain products of `rows` rows that a GPU's rows hold, by width and then by columns."""
    found = [
        HeadTime(int(cell.shape["n"]), int(cell.shape["k"]), cell.us, cell.floor_us, bench.gpu)
        for cell in bench.of("gemm")
        if cell.shape.get("kind") == "store" and cell.shape.get("m") == rows and cell.shape.get("dtype") == "bf16"
    ]
    wide = [one for one in found if one.size >= 4 * one.width]  # heads are wide, other maps of a layer are not
    return sorted(wide, key=lambda one: (one.width, one.size))
