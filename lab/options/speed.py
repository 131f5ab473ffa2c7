"""Options of what times one engine closely: every depth, two sides in turns, a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lab.errors import ExperimentError
from lab.options.bench import POINTS, PairOptions, check_shipped
from lab.options.fields import option
from lab.options.formats import FormatOptions
from lab.options.values import (
    DIAL_DEPTH,
    MIN_ROUNDS,
    MOST_DRAFTS,
    ArchName,
    Counts,
    Depths,
    ExistingFile,
    PairName,
    Peers,
    Point,
    Points,
    of_text,
    read_depths,
    read_points,
)


class SpeedOptions(FormatOptions, PairOptions):
    """Time every depth of speculation and take its step apart, as rows."""

    at: Points | None = option(None, "points, e.g. 512x1,32768x1,16384x4", metavar=POINTS)
    sweep_batch: Counts | None = option(None, "batches at one --context, in place of --at", metavar="B,...")
    context: int = option(1024, "of --sweep-batch", ge=2)
    spec: Depths = option("0,1,2,3,4,5,6,7", "drafts a step, 0 is the baseline", metavar="K,...")
    stages: Annotated[tuple[int, ...] | None, BeforeValidator(lambda given: _stages(given))] = option(
        None, "depths to take apart, or none (default: the baseline and 3, or the deepest)", metavar="K,..."
    )
    tokens: int = option(256, "generated a request and round", ge=16)
    rounds: int = option(3, "measured rounds", ge=1)
    warmup: int = option(0, "rounds before them; a window warms up by itself", ge=0)
    sustained: int = option(0, "steps without a rest in one more pass; heat shows from about 2000 on", ge=0)
    peers: Peers = option("none", "what is timed beside the engine, or none", metavar="NAME,...")
    build: Path | None = option(None, "compile the kernels needed into DIR instead", metavar="DIR")
    arch: ArchName = option("sm_90a", "to compile for")

    @property
    def dial_depth(self) -> int:
        """One for all depths."""
        return min(DIAL_DEPTH, max(self.spec))

    @property
    def points(self) -> tuple[Point, ...]:
        """The points named, or those of a sweep over batches at one context."""
        return self.at or tuple(Point(self.context, batch) for batch in self.sweep_batch or ())

    @property
    def stage_depths(self) -> tuple[int, ...]:
        """Depths whose steps are taken apart."""
        return stage_depths(self.stages, self.spec)

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        if bool(self.at) == bool(self.sweep_batch):
            what = "--at together with --sweep-batch" if self.at else "neither --at nor --sweep-batch"
            raise ExperimentError(what, "one of the two", "give --at 512x1 or --sweep-batch 1,2,4")
        stage_depths(self.stages, self.spec)
        return self


def stage_depths(wanted: tuple[int, ...] | None, ks: tuple[int, ...]) -> tuple[int, ...]:
    """Those wanted; None is the baseline and 3 drafts, or the deepest there is.

    Raises:
        ExperimentError: a depth that is not measured.
    """
    if wanted is None:
        wanted = (0, DIAL_DEPTH if DIAL_DEPTH in ks else max(ks))
    unknown = [k for k in wanted if k not in ks]
    if unknown:
        raise ExperimentError(f"stages of {unknown[0]} drafts", f"depths of --spec: {list(ks)}", "correct --stages")
    return tuple(dict.fromkeys(wanted))


def _stages(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    return () if given == "none" else read_depths(given)


def read_point(text: str) -> Point:
    """One point.

    Raises:
        ExperimentError: several, or another form.
    """
    points = read_points(text)
    if len(points) > 1:
        raise ExperimentError(f"--at {text}", "one point, e.g. 512x1", "take several points apart, one command each")
    return points[0]


OnePoint = Annotated[Point, of_text(read_point)]


class AbOptions(PairOptions):
    """Measure two sides in turns, A B A B, on this machine, and say which rows moved.

    Exit codes: 0 nothing slower, 1 something slower (with --plant: not found where it is), 3 nothing ran.
    """

    sides: tuple[str, ...] = option((), "two commits; . is the tree as it is", flag="", metavar="A B", shape="several")
    set_a: tuple[str, ...] = option((), "of A: EAGLE3_X=1, or spec=0,3", metavar="KEY=VALUE", shape="repeated")
    set_b: tuple[str, ...] = option((), "of B", metavar="KEY=VALUE", shape="repeated")
    rounds: int = option(13, "of both sides", ge=1)
    command: Annotated[tuple[str, ...], of_text(lambda text: tuple(text.split()))] = option(
        "bench --warmup 0 --peers none", "what a side runs", metavar="'COMMAND OPTION ...'"
    )
    judge: ExistingFile | None = option(None, "only judge rows that were stored with --out", metavar="FILE.jsonl")
    plant: str = option("", "slow this kernel of one engine's step down, on side B", metavar="STAGE/KERNEL")
    slower_by: Annotated[float, Field(gt=1, allow_inf_nan=False)] = option(1.05, "time of the planted kernel, B over A")
    at: OnePoint = option("512x1", "of --plant", metavar="CONTEXTxBATCH")
    spec: int = option(0, "drafts a step, of --plant", ge=0, le=MOST_DRAFTS, metavar="K")
    tokens: int = option(96, "timed a round, of --plant", ge=16)

    @property
    def dial_depth(self) -> int:
        """The depth of the engine that is slowed down."""
        return min(DIAL_DEPTH, self.spec)

    @model_validator(mode="after")
    def _says_what(self) -> Self:
        if self.judge is not None:
            return self
        if self.rounds < MIN_ROUNDS:
            raise ExperimentError(f"--rounds {self.rounds}", f"at least {MIN_ROUNDS}", "fewer say nothing certain")
        if not self.plant and len(self.sides) != 2:
            raise ExperimentError(
                f"sides {' '.join(self.sides) or '(none)'}", "two commits, or `. .` with --set-a and --set-b",
                "name both, or a stored file with --judge",
            )  # fmt: skip
        return self


class ProfileOptions(PairOptions):
    """What each NVTX range of a decode step costs: Nsight where it is, torch's profiler elsewhere."""

    pair: PairName = option("planted", "planted, or the trained pair that comes with the lab")
    at: OnePoint = option("512x1", "the point that is watched", metavar="CONTEXTxBATCH")
    spec: int = option(3, "drafts a step, 0 is plain decoding", ge=0, le=MOST_DRAFTS, metavar="K")
    steps: int = option(10, "watched, after a few that are not", ge=1)
    tool: Literal["auto", "torch", "nsys", "ncu"] = option("auto", "auto: what is in PATH, else torch's profiler")
    nvtx_include: str = option("", "of Nsight Compute (default: the steps)", metavar="FILTER")
    imports: tuple[ExistingFile, ...] = option(
        (), "read stored captures instead: nsys .sqlite, nsys stats or ncu .csv, a profiler's .json or .json.gz",
        flag="--import", metavar="FILE", shape="several",
    )  # fmt: skip
    out: Path = option("profile", "folder for rows, capture and trace", metavar="DIR")
    bare: Path | None = option(None, "run the steps only, inside a tool that watches", metavar="DIR", is_hidden=True)

    @property
    def dial_depth(self) -> int:
        """The depth of the engine that is watched."""
        return min(DIAL_DEPTH, self.spec)

    @model_validator(mode="after")
    def _has_the_pairs_own_shapes(self) -> Self:
        check_shipped(self.pair, self.geometry)
        return self
