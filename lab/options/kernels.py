"""Options of the kernels: what is shown of them, how they are timed by themselves, and the run under the sanitizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from lab.options.fields import Options, option
from lab.options.values import ArchName, ExistingFile, Names, Seconds, ShareSlice

MOST_JOBS = 12  # processes at once under the sanitizer; each holds a CUDA context and a core or more


class KernelsOptions(Options):
    """List the GPU kernels, their proofs and their thresholds."""

    rows: ExistingFile | None = option(None, "benchmark rows; default: the newest committed", metavar="FILE.jsonl")
    gates: bool = option(False, "judge the rows; exit 1 if a threshold failed, 3 if missing")
    draw: Path | None = option(None, "write the roofline of all kernels", metavar="FILE.svg")
    sanitize: str | None = option(
        None, "run every card under compute-sanitizer on this GPU, rows appended to OUT; exit 1 if anything was found",
        metavar="OUT.jsonl", shape="maybe",
    )  # fmt: skip


class BenchOptions(Options):
    """Time the cards on a GPU, proofs first."""

    out: Path = option("kernels.jsonl", "rows are appended to this file", metavar="FILE")
    ops: Names = option("", "cards, separated by commas (default: all but attention)", metavar="NAME,...")
    only: str = option("", "only shapes whose text holds these words, e.g. 'm=16 n=4096'")
    limit_s: Seconds = option(480.0, "start no measurement after this many seconds", metavar="S")
    build: Path | None = option(None, "compile for --arch into this folder and stop; no GPU needed", metavar="DIR")
    arch: ArchName = option("sm_90a", "to compile for")
    share: ShareSlice = option("1/1", "of --build: every N-th kernel from the I-th", metavar="I/N")


class AttentionBenchOptions(Options):
    """Time attention beside the libraries."""

    out: Path = option("attention.jsonl", "rows are appended to this file", metavar="FILE")
    only: str = option("", "only shapes whose text holds these words, e.g. 'dim=128 tokens=4'")
    limit_s: Seconds = option(480.0, "start no measurement after this many seconds", metavar="S")
    skip_peers: Names = option("", "peers not to time, separated by commas", metavar="NAME,...")
    build: Path | None = option(None, "compile for --arch into this folder and stop; no GPU needed", metavar="DIR")
    arch: ArchName = option("sm_90a", "to compile for")
    share: ShareSlice = option("1/1", "of --build: every N-th kernel from the I-th", metavar="I/N")


class AttentionBoundOptions(Options):
    """Time attention over trees beside libraries that obey no mask, and say what theirs would make of a pass."""

    out: Path = option("attention_bound.jsonl", "rows are appended to this file", metavar="FILE")
    rows: ExistingFile | None = option(None, "read these rows and measure nothing; no GPU needed", metavar="FILE.jsonl")
    proofs: ExistingFile | None = option(
        None, "rows of `eagle3lab prove trees`; default: the newest committed", metavar="FILE.jsonl"
    )
    limit_s: Seconds = option(60.0, "start no measurement after this many seconds", metavar="S")
    build: Path | None = option(None, "compile for --arch into this folder and stop; no GPU needed", metavar="DIR")
    arch: ArchName = option("sm_90a", "to compile for")
    share: ShareSlice = option("1/1", "of --build: every N-th kernel from the I-th", metavar="I/N")


class BookkeepingOptions(Options):
    """Time rewind, acceptance and path packing by themselves."""

    device: Literal["cpu", "cuda"] = option("cpu", "plain torch, or the kernels")
    batch: int = option(8, "sequences a call works on", ge=1)
    calls: int = option(100, "timed calls", ge=1)


class SanitizeOptions(Options):
    """Every card under compute-sanitizer; exit 0: all clean, 1: something found, 3: not all could run."""

    out: Path | None = option(None, "rows are appended to this file", metavar="FILE")
    ops: Names = option("", "cards, separated by commas (default: all)", metavar="NAME,...")
    jobs: int = option(min(MOST_JOBS, os.cpu_count() or 1), "processes at once", ge=1)
    limit_s: Seconds = option(510.0, "stop whatever runs after this many seconds", metavar="S")
    logs: Path | None = option(None, "keep the tools' logs in this folder", metavar="DIR")
    build: Path | None = option(None, "compile for --arch into this folder and stop; no GPU needed", metavar="DIR")
    arch: ArchName = option("sm_90a", "to compile for")


class SanitizedCardOptions(Options):
    """One card under a tool of compute-sanitizer, started by the sanitizer's command."""

    card: str = option(..., "its name, or a plant's")
    tool: Literal["memcheck", "racecheck"] = option(..., "that watches")
    result: Path = option(..., "JSON file for what was seen", metavar="FILE")


class WatchedRunOptions(Options):
    """Short decoding under compute-sanitizer, started by `eagle3lab prove memory`."""

    result: Path = option(..., "JSON file for the counts and faults", metavar="FILE")
    plant: bool = option(False, "only put a request into a slot past the last")
