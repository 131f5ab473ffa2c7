"""Options of proofs and of performance gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from lab.options.fields import Options, option
from lab.options.values import ArchName, ExistingFile, GeometryName, PlantedGeometryName, Seconds, ShareSlice

PartName = Literal[
    "identity", "parity", "quiet", "slots", "long", "memory", "trees", "waiting", "adaptive", "serving",
    "prefill",
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

    config: Path | None = option(None, "default: the packaged gates.toml", metavar="FILE.toml")
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
