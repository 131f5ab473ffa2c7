"""Options of proofs and of performance gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from lab.options.bench import POINTS
from lab.options.fields import Options, option
from lab.options.formats import FormatOptions
from lab.options.values import (
    MOST_DRAFTS,
    MOST_REPEATED,
    ArchName,
    ExistingFile,
    GeometryName,
    PlantedGeometryName,
    Points,
    Seconds,
    ShareSlice,
    of_text,
    refused,
)

PartName = Literal[
    "identity", "parity", "quiet", "slots", "long", "memory", "trees", "waiting", "prefill", "adaptive", "serving",
]  # fmt: skip
STATE_FILE = Path("reports", "gates.jsonl")


class ProveOptions(Options):
    """Prove the GPU engine. Exit 0: all held, 1: something failed, 3: something could not run."""

    parts: tuple[PartName, ...] = option(
        (), f"of {', '.join(get_args(PartName))} (default all)", flag="", metavar="PART", shape="several"
    )
    out: Path | None = option(None, "append rows to this file", metavar="NAME.jsonl")
    limit_s: Seconds = option(240.0, "no check begins after this time", metavar="S")
    geometry: PlantedGeometryName = option("llama-3.1-8b", "of the planted pair")
    clients: int = option(200, "of serving: that stream at once", ge=1, le=1000)
    seconds: Seconds = option(60.0, "of serving: they go on asking for", metavar="S")
    build: Path | None = option(None, "compile the kernels the parts need into DIR instead", metavar="DIR")
    arch: ArchName = option("sm_90a", "to compile for")
    share: ShareSlice = option("1/1", "of --build: every N-th kernel from the I-th", metavar="I/N")


class _GatesOptions(Options):
    """Which thresholds are judged."""

    config: Path | None = option(None, "default: the packaged gates.toml, or the geometry's own", metavar="FILE.toml")
    geometry: GeometryName | None = option(None, "default: the configuration's")


class GatesRunOptions(_GatesOptions):
    """Runs that are judged by the gates; full ones need enough green micro runs in a row before them."""

    out: Path | None = option(None, "append rows and gates to this file", metavar="NAME.jsonl")
    records: Path | None = option(None, "write nested records to this file too", metavar="NAME.json")
    state: Path = option(str(STATE_FILE), "what was green", metavar="FILE.jsonl")
    repeat: Annotated[int, Field(ge=1, le=9)] = option(1, "runs, one after the other")
    build: Path | None = option(None, "only compile the kernels that a run needs", metavar="DIR")
    arch: ArchName = option("sm_90a", "target of --build")
    share: ShareSlice = option("1/1", "of --build: every N-th kernel from the I-th", metavar="I/N")


class GatesCheckOptions(_GatesOptions):
    """Judge stored records; those that were no micro run are refused."""

    baseline: ExistingFile = option(..., "records without drafts", flag="", metavar="BASELINE.json")
    spec: ExistingFile = option(..., "records with drafts", flag="", metavar="SPEC.json")
    mode: str = option(..., "a mode of the configuration, such as single32k", metavar="NAME")
    as_kind: Literal["micro", "full"] = option("micro", "whose thresholds", flag="--as")


def read_repeated(text: str) -> tuple[float, ...]:
    """Shares written as `0,0.5`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise refused(text, _REPEATED) from error


def _check_repeated(shares: tuple[float, ...]) -> tuple[float, ...]:
    if not shares or not all(0 <= share <= MOST_REPEATED for share in shares):
        raise refused(",".join(map(str, shares)), _REPEATED)
    return shares


_REPEATED = f"numbers of 0 to {MOST_REPEATED}, separated by commas"


class GatesFeasibleOptions(FormatOptions, _GatesOptions):
    """Say what bytes allow: the most speed-up at each acceptance length, and whether each gate can hold on a GPU.

    Nothing is run. Exit codes: 0 every gate is within reach, 1 one is beyond it under every routing asked for.
    """

    gpu: str = option("H200", "whose memory reads, e.g. H200, H100 SXM, B200", metavar="NAME")
    repeated: Annotated[tuple[float, ...], AfterValidator(_check_repeated), of_text(read_repeated)] = option(
        "0,0.5,0.8", "with experts: shares of rows that take those of the row before (0: any alike likely)",
        metavar="SHARE,...", allowed=_REPEATED,
    )  # fmt: skip
    at: Points | None = option(None, "points in place of the configuration's, without gates", metavar=POINTS)
    spec: int = option(3, "drafts a step, of --at", ge=1, le=MOST_DRAFTS, metavar="K")
    measured: ExistingFile | None = option(None, "rows of eagle3lab speed that stand beside", metavar="FILE.jsonl")
    out: Path | None = option(None, "append rows to this file", metavar="NAME.jsonl")
