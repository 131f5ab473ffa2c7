"""Captures of Nsight Systems: its SQLite export, whole, or the sums of `nsys stats` as CSV.

The export's tables change between versions, so that only the columns named here are read, and a table that is missing
is an error or an empty list as it has to be. Source: Nsight Systems documentation, "SQLite schema reference" and
"Report scripts"; times are nanoseconds there, microseconds here.
"""

from __future__ import annotations

import csv
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lab.errors import ExperimentError
from lab.probes.profiles.capture import Capture, is_range
from lab.probes.proofs.gpu_trace import WINDOW, GpuTrace, Span

NEEDED = ("NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL")
PUSH_POP = 59  # eventType of a push/pop range
# ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND, as torch's profiler words them
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device"}

_RANGES = """
    SELECT COALESCE(e.text, s.value), e.start, e.end FROM NVTX_EVENTS e LEFT JOIN StringIds s ON e.textId = s.id
    WHERE e.eventType = ? AND e.end IS NOT NULL ORDER BY e.start, e.end DESC"""
_CALLS = """
    SELECT s.value, c.start, c.end, c.correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME c
    JOIN StringIds s ON c.nameId = s.id ORDER BY c.start"""
_KERNELS = """
    SELECT s.value, k.start, k.end, k.correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN StringIds s ON k.shortName = s.id ORDER BY k.start"""
_COPIES = """
    SELECT copyKind, dstKind, start, end, correlationId FROM CUPTI_ACTIVITY_KIND_MEMCPY ORDER BY start"""


def read_sqlite(path: Path) -> Capture:
    """The capture in `nsys export --type sqlite`.

    Raises:
        ExperimentError: no such file, or an export without ranges, calls or kernels.
    """
    if not path.is_file():
        raise ExperimentError(f"no file {path.name}", "an export of Nsight Systems", "correct --import")
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
        try:
            tables = {str(name) for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            missing = [name for name in NEEDED if name not in tables]
            if missing:
                raise ExperimentError(
                    f"{path.name} has no table {missing[0]}", f"the tables {', '.join(NEEDED)}",
                    "take the capture with `-t cuda,nvtx --cuda-graph-trace=node` and export it whole",
                )  # fmt: skip
            return _capture(base, has_copies="CUPTI_ACTIVITY_KIND_MEMCPY" in tables)
        except sqlite3.DatabaseError as error:
            raise ExperimentError(
                f"{path.name} cannot be read: {error}", "the columns that docs/measuring.md names",
                "export it with `nsys export --type sqlite`",
            ) from error  # fmt: skip


def _capture(base: sqlite3.Connection, *, has_copies: bool) -> Capture:
    ranges = [Span(str(name), start / 1e3, end / 1e3) for name, start, end in base.execute(_RANGES, (PUSH_POP,))]
    copies = []
    for kind, memory, start, end, number in base.execute(_COPIES) if has_copies else ():
        # The memory a copy goes to is told as torch tells it: "Memcpy DtoH (Device -> Pinned)".
        name = f"Memcpy {COPY_KINDS.get(kind, kind)} (-> {MEMORY_KINDS.get(memory, memory)})"
        copies.append(Span(name, start / 1e3, end / 1e3, number))
    trace = GpuTrace(
        tuple(one for one in ranges if one.name == WINDOW), tuple(_spans(base, _CALLS)),
        tuple(_spans(base, _KERNELS)), tuple(copies),
    )  # fmt: skip
    return Capture("nsys", tuple(one for one in ranges if is_range(one.name)), trace)


def _spans(base: sqlite3.Connection, query: str) -> Iterator[Span]:
    for name, start, end, number in base.execute(query):
        yield Span(str(name), start / 1e3, end / 1e3, number)


@dataclass(frozen=True)
class RangeSum:
    """One line of `nsys stats --report nvtx_gpu_proj_sum`.

    Attributes:
        gpu_us: of all instances, first piece of work to last. host_us: of all. n_ops: pieces of work on the GPU.
    """

    name: str
    instances: int
    gpu_us: float
    host_us: float
    n_ops: int


COLUMNS = ("Range", "Total Proj Time (ns)", "Total Range Time (ns)", "Range Instances", "Total GPU Ops")


def is_range_sums(lines: Sequence[str]) -> bool:
    """Whether a CSV is that report."""
    return any(line.startswith("Range,") and "Total Proj Time" in line for line in lines)


def read_range_sums(path: Path) -> list[RangeSum]:
    """The engine's ranges and the steps in `nsys stats --report nvtx_gpu_proj_sum --format csv`.

    Raises:
        ExperimentError: it is another report.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("Range,")), None)
    table = csv.DictReader([] if first is None else lines[first:])
    if not set(COLUMNS) <= set(table.fieldnames or ()):
        raise ExperimentError(
            f"{path.name} has the columns {list(table.fieldnames or ())}", f"{list(COLUMNS)} among them",
            "write it with `nsys stats --report nvtx_gpu_proj_sum --format csv`",
        )  # fmt: skip
    made = []
    for row in table:
        name = row["Range"]
        # The domain stands before a colon, nothing for the default one; names hold colons themselves.
        name = name.partition(":")[2] if name.startswith((":", "eagle3core:")) else name
        if is_range(name) or name == WINDOW:
            made.append(RangeSum(
                name, int(row["Range Instances"]), float(row["Total Proj Time (ns)"]) / 1e3,
                float(row["Total Range Time (ns)"]) / 1e3, int(row["Total GPU Ops"]),
            ))  # fmt: skip
    return made
