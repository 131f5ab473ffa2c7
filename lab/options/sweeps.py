"""Options of sweeps: shapes that are logged, settings of matrix products and of attention that are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lab.errors import ExperimentError
from lab.options.bench import POINTS
from lab.options.fields import Options, option
from lab.options.formats import FormatOptions
from lab.options.values import (
    MOST_DRAFTS,
    ArchName,
    CacheName,
    Counts,
    Depths,
    DeviceName,
    ExistingFile,
    GeometryName,
    Points,
    Seconds,
    Share,
    of_text,
    refused,
)

HEAD_SIZES = (64, 128)


def read_orders(text: str) -> tuple[tuple[int, int], ...]:
    """Orders of sums written as `32x4,8x4`: splits x streams, powers of two."""
    found = []
    for part in text.split(",") if text else ():
        splits, _, streams = part.strip().partition("x")
        if not (splits.isdigit() and streams.isdigit()) or any(
            int(n) < 1 or int(n) & (int(n) - 1) for n in (splits, streams)
        ):
            raise refused(part, "SPLITSxSTREAMS, powers of two, e.g. 32x4")
        found.append((int(splits), int(streams)))
    return tuple(found)


def read_dims(text: str) -> tuple[int, ...]:
    """Head sizes, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) in HEAD_SIZES for part in parts):
        raise refused(text, f"of {', '.join(map(str, HEAD_SIZES))}, separated by commas")
    return tuple(int(part) for part in parts)


class _EngineOptions(Options):
    """The engine whose shapes are logged, or which confirms what was chosen."""

    arch: ArchName = option("sm_90a", "of --build, --bake and shapes")
    geometry: GeometryName = option("llama-3.1-8b", "shapes of the engine")
    at: Points = option("32768x1,16384x4", "points of the engine", metavar=POINTS)
    micro_tokens: int = option(256, "tokens a request and round", ge=16)


class ShapesOptions(_EngineOptions):
    """Log the matrix products of an engine, from its program: needs no GPU and no weights."""

    out: Path = option("shapes.json", "the log", metavar="FILE")
    spec: Depths = option("0,3", "drafts a step", metavar="K,...")
    prefill_chunk: int = option(512, "rows of the largest pass over prompts", ge=1)
    least_rows: int = option(1, "products of fewer rows are left out", ge=1)


class SweepOptions(_EngineOptions):
    """What is swept, and what is made of it."""

    out: Path | None = option(None, "rows are added to this file", metavar="FILE")
    rows: ExistingFile | None = option(None, "judge these rows instead of measuring", metavar="FILE")
    bake: Path | None = option(None, "write entries to this tuned file", metavar="FILE")
    build: Path | None = option(None, "compile the kernels needed into DIR instead", metavar="DIR")
    share: Share = option("1/1", "of --build: every N-th kernel from the I-th", metavar="I/N")
    device: DeviceName = option("auto", "cpu: the emulator")
    limit_s: Seconds = option(480.0, "begin no regime after this many seconds", metavar="S")
    confirm: bool = option(False, "micro runs of the best five and the default, as rows")
    depth: int = option(3, "of --confirm: drafts a step", ge=1, le=MOST_DRAFTS)
    acceptance_length: Annotated[float, Field(ge=1, le=MOST_DRAFTS + 1)] = option(3.0, "of --confirm: dial of the pair")
    rounds: int = option(2, "of --confirm: rounds", ge=1)

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        if self.out is None and self.rows is None and self.build is None:
            raise ExperimentError(
                "neither --out, --rows nor --build", "one of them", "name the file that rows are added to: --out FILE"
            )
        if self.rows is not None and self.confirm:
            raise ExperimentError("--confirm with --rows", "--confirm with --out", "micro runs add rows to --out")
        return self


class GemmOptions(SweepOptions):
    """Time settings of the matrix products and keep the best."""

    shapes: ExistingFile | None = option(None, "the log that `eagle3lab sweep shapes` wrote", metavar="FILE")
    top: int = option(12, "regimes with every setting", ge=0)

    @model_validator(mode="after")
    def _has_shapes(self) -> Self:
        if self.rows is None and self.shapes is None:
            raise ExperimentError("no --shapes", "a shape log", "make one: eagle3lab sweep shapes --out FILE")
        return self


class FmhaOptions(SweepOptions):
    """Time settings of attention and keep the best."""

    dims: Annotated[tuple[int, ...], of_text(read_dims)] = option("128,64", "head sizes", metavar="D,...")
    tokens: Counts = option("1,4,8,16,64", "queries a sequence", metavar="N,...")
    orders: Annotated[tuple[tuple[int, int], ...], of_text(read_orders)] = option(
        "", "orders of sums to try jointly", metavar="SPLITSxSTREAMS,..."
    )
    orders_dim: int = option(128, "head size of --orders", ge=1)
    tile_stats: bool = option(False, "count tiles too, with kernels of their own", variable="EAGLE3_FMHA_TILE_STATS")
    cache_dtype: CacheName = option("as_computed", "of keys and values")
    ab: bool = option(False, "hold the default against plain attention first", variable="EAGLE3_FMHA_AB")


def read_steps(text: str) -> tuple[str, ...]:
    """What steps draft, by name, separated by commas."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise refused(text, "names without repeats, e.g. plain,chain-3,dynamic-16/4/4")
    return names


class StepOptions(SweepOptions, FormatOptions):
    """Time settings of the matrix products in the passes of whole steps, and keep the best. Needs a GPU."""

    steps: Annotated[tuple[str, ...], of_text(read_steps)] = option(
        "dynamic-16/4/4", "what each step drafts: plain, chain-K, dynamic-NODES/DEPTH/TOP_K", metavar="NAME,..."
    )
    context: int = option(512, "tokens before the step", ge=1)
    batch: int = option(1, "sequences of a step", ge=1)
    model: Literal["target", "draft"] = option(
        "target", "whose passes are timed; draft: maps that the target's pass has none of the shape of"
    )
    only: str = option("", "regimes whose name holds this, e.g. 4096x14336 (default all)", metavar="TEXT")
