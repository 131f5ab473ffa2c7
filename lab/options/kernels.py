"""Options of the kernels: what is shown of them, how they are timed by themselves, and the run under the sanitizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import model_validator

from lab.errors import ExperimentError
from lab.options.fields import Options, option
from lab.options.formats import FormatOptions
from lab.options.values import (
    ArchName,
    Counts,
    ExistingFile,
    Names,
    PlantedGeometryName,
    Seconds,
    ShareSlice,
    of_text,
    read_depths,
)

MOST_JOBS = 12  # processes at once under the sanitizer; each holds a CUDA context and a core or more


def _geometries(text: str) -> tuple[str, ...]:
    """Names separated by commas; every name there is for "all", none for nothing."""
    if text == "all":
        return get_args(PlantedGeometryName)
    return tuple(part.strip() for part in text.split(",")) if text else ()


class KernelsOptions(Options):
    """List the GPU kernels, their proofs and their thresholds."""

    rows: ExistingFile | None = option(None, "benchmark rows; default: the newest committed", metavar="FILE.jsonl")
    gates: bool = option(False, "judge the rows; exit 1 if a threshold failed, 3 if missing")
    draw: Path | None = option(None, "write the roofline of all kernels", metavar="FILE.svg")
    sanitize: str | None = option(
        None, "run every card under compute-sanitizer on this GPU, rows appended to OUT; exit 1 if anything was found",
        metavar="OUT.jsonl", shape="maybe",
    )  # fmt: skip


class WarmOptions(FormatOptions):
    """Compile the kernels that an engine will launch, so that its first start need not; a GPU is not needed.

    They go into this machine's cache, where every engine looks, or into a folder; --archive packs them into one file
    for other machines, which read it where EAGLE3_CUBINS names it.
    """

    geometry: Annotated[tuple[PlantedGeometryName, ...], of_text(_geometries)] = option(
        "", "shapes with a name, or all", metavar="NAME,...",
        allowed=f"{', '.join(get_args(PlantedGeometryName))}, separated by commas, or all",
    )  # fmt: skip
    target: str = option("", "directory of a target, in place of --geometry", metavar="DIR")
    draft: str = option("", "directory of its draft; without one decoding is plain", metavar="DIR")
    spec: Annotated[tuple[int, ...], of_text(read_depths)] = option("0,3", "drafts a step", metavar="K,...")
    batch: Counts = option("1,4", "slots of engines", metavar="B,...")
    session_len: int = option(2048, "tokens of a prompt with its answer", ge=2)
    arch: ArchName | None = option(None, "to compile for; default: this machine's GPU's, without one sm_90a")
    out: Path | None = option(None, "put them into this folder instead of the cache", metavar="DIR")
    archive: Path | None = option(None, "write them, those found included, to this file too", metavar="NAME.zip")

    @model_validator(mode="after")
    def _says_of_what(self) -> Self:
        if bool(self.geometry) == bool(self.target):
            what = "--geometry together with --target" if self.target else "neither --geometry nor --target"
            raise ExperimentError(what, "one of the two", "give --geometry llama-3.1-8b or --target TARGET_DIR")
        if self.draft and not self.target:
            raise ExperimentError(
                "--draft without --target", "the target it belongs to", "give --target TARGET_DIR too"
            )
        if self.archive is not None and self.archive.suffix != ".zip":
            raise ExperimentError(
                f"--archive is {str(self.archive)!r}", "a name that ends in .zip", "give cubins-sm_90a.zip, for example"
            )
        return self


class BenchOptions(Options):
    """Time the cards on a GPU, proofs first; or settings of theirs against each other."""

    out: Path = option("kernels.jsonl", "rows are appended to this file", metavar="FILE")
    ops: Names = option("", "cards, separated by commas (default: all but attention)", metavar="NAME,...")
    only: str = option("", "only shapes whose text holds these words, e.g. 'm=16 n=4096'; several values: 'm=1,4,16'")
    settings: bool = option(False, "in place of proofs and peers: each setting worth trying beside the default")
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


class ChainOptions(Options):
    """Time the matrix products of layers that follow each other, beside torch's in the same order. Needs a GPU."""

    out: Path = option("chain.jsonl", "rows are appended to this file", metavar="FILE")
    rows: ExistingFile | None = option(None, "read these rows and measure nothing; no GPU needed", metavar="FILE.jsonl")
    geometry: Annotated[tuple[PlantedGeometryName, ...], of_text(_geometries)] = option(
        "llama-3.1-8b,llama-3.1-70b,qwen3-8b", "shapes with a name", metavar="NAME,...",
        allowed=f"{', '.join(get_args(PlantedGeometryName))}, separated by commas, or all",
    )  # fmt: skip
    at: Counts = option("16,24,32,64,128,256", "rows of a pass", metavar="N,...")
    layers: int = option(8, "layers of the chain", ge=2)
    limit_s: Seconds = option(300.0, "start no measurement after this many seconds", metavar="S")
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
