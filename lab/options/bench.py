"""Options of the bench, its scenarios and planted pairs; and those of a planted pair, which other commands share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from lab.errors import ExperimentError
from lab.options.fields import Options, option
from lab.options.formats import FormatOptions
from lab.options.values import (
    DIAL_DEPTH,
    MOST_DRAFTS,
    MOST_REPEATED,
    USUAL_PEERS,
    Depths,
    DeviceName,
    DtypeName,
    GeometryName,
    PairName,
    PeerName,
    Peers,
    PlantedGeometryName,
    Points,
    cut_name,
    of_text,
    read_counts,
    read_depths,
    refused,
)

SuiteName = Literal["baseline", "single", "batch", "large-context", "stress"]
SUITE_NAMES: tuple[SuiteName, ...] = get_args(SuiteName)
CONTEXTS = (8192, 16384, 32768, 65536)
DRAFTS = (2, 3, 4, 5)
POINTS = "CONTEXTxBATCH,..."


class PairOptions(Options, ABC):
    """Which planted pair, and where it runs."""

    geometry: GeometryName | None = option(None, "shapes (default nano; shipped with that pair)")
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = option(
        None, "dial of a planted pair: share of drafted positions accepted", allowed="a number of 0 to 1"
    )
    acceptance_length: Annotated[float, Field(ge=1, le=MOST_DRAFTS + 1)] | None = option(
        None, "the dial as tokens a step, in place of --share (default 3.0)",
        allowed=f"a number of 1 to {MOST_DRAFTS + 1}",
    )  # fmt: skip
    layers: int | None = option(None, "of the geometry, the first ones alone (default all)", ge=2, metavar="N")
    repeated: Annotated[float, Field(ge=0, le=MOST_REPEATED)] = option(
        0.0, "with experts: share of tokens that take their predecessor's (0: any alike likely)",
        allowed=f"a number of 0 to {MOST_REPEATED}",
    )  # fmt: skip
    dtype: DtypeName | None = option(None, "default bfloat16 on a GPU, float32 on a CPU")
    device: DeviceName = option("auto", "where it runs")
    seed: int = option(0, "of weights and prompts", ge=0)
    out: Path | None = option(None, "append rows to this file", metavar="NAME.jsonl")

    def shapes(self, default: GeometryName = "nano") -> str:
        """The name of the geometry, or of the default, cut or whole."""
        return cut_name(self.geometry or default, self.layers)

    @property
    @abstractmethod
    def dial_depth(self) -> int:
        """Drafts a step at which the acceptance length is meant."""

    @model_validator(mode="after")
    def _has_one_dial(self) -> Self:
        length, depth = self.acceptance_length, self.dial_depth
        if self.share is not None and length is not None:
            raise ExperimentError(
                "--share was given together with --acceptance-length", "one of the two", "leave one of them out"
            )
        if length is not None and depth and length > depth + 1:
            raise ExperimentError(
                f"acceptance length {length} at {depth} drafts a step", f"1 to {depth + 1}",
                "give a length that these drafts can reach, or more drafts",
            )  # fmt: skip
        return self


class BenchOptions(FormatOptions, PairOptions):
    """Time decoding with and without drafts, beside its peers, as rows."""

    pair: PairName = option("planted", "planted, or the trained pair that comes with the lab")
    at: Points = option("512x1", "points that are measured", metavar=POINTS)
    spec: Depths = option("0,3", "drafts a step, 0 is the baseline", metavar="K,...")
    tokens: int = option(256, "generated a request and round", ge=16)
    rounds: int = option(5, "measured rounds", ge=1)
    warmup: int = option(1, "rounds before them", ge=0)
    sustained: int = option(0, "steps without a rest in one more pass; heat shows from about 2000 on", ge=0)
    peers: Peers = option(
        ",".join(USUAL_PEERS), "what is timed beside the engine, or none", metavar="NAME,...",
        allowed=f"{', '.join(get_args(PeerName))}, separated by commas, or none",
    )  # fmt: skip
    records: Path | None = option(None, "write nested records to this file too", metavar="NAME.json")
    forced_length: Annotated[float, Field(ge=1, le=MOST_DRAFTS + 1)] | None = option(
        None, "tokens a step, bonus included, whatever the target holds: speed alone, text that means nothing",
        allowed=f"a number of 1 to {MOST_DRAFTS + 1}",
    )  # fmt: skip
    forced_drafts: Annotated[float, Field(ge=0, le=MOST_DRAFTS)] | None = option(
        None, "the same as accepted drafts a step, bonus left out", allowed=f"a number of 0 to {MOST_DRAFTS}"
    )

    @property
    def dial_depth(self) -> int:
        """The deepest."""
        return max(self.spec)

    @property
    def forced(self) -> float | None:
        """Tokens a step with the bonus, where they are forced."""
        return self.forced_length if self.forced_drafts is None else self.forced_drafts + 1

    @model_validator(mode="after")
    def _forces_what_nothing_contradicts(self) -> Self:
        given = {"--forced-length": self.forced_length, "--forced-drafts": self.forced_drafts, "--share": self.share,
                 "--acceptance-length": self.acceptance_length}  # fmt: skip
        names = [name for name, value in given.items() if value is not None]
        if self.forced is not None and len(names) > 1:
            raise ExperimentError(
                f"{' and '.join(names)} were given together", "one way of saying what is accepted",
                "leave the others out: what is forced comes whatever the pair would accept",
            )  # fmt: skip
        depths = [k for k in self.spec if k]
        if self.forced is not None and (not depths or self.forced > min(depths) + 1):
            raise ExperimentError(
                f"a forced length of {self.forced:g} with --spec {','.join(map(str, self.spec))}",
                "depths whose drafts and bonus are at least as many, each but 0",
                "lower the length, or raise the least of --spec",
            )
        return self

    @model_validator(mode="after")
    def _has_the_pairs_own_shapes(self) -> Self:
        check_shipped(self.pair, self.geometry)
        return self


class StartOptions(Options):
    """Time the first request of processes that have just begun, part by part, as rows."""

    geometry: PlantedGeometryName = option("nano", "shapes of the planted pair")
    spec: Annotated[tuple[int, ...], of_text(read_depths)] = option("0,3", "drafts a step", metavar="K,...")
    context: int = option(512, "tokens of the prompt", ge=2)
    batch: int = option(1, "slots of the engine", ge=1)
    rounds: int = option(1, "processes of each kind", ge=1)
    dtype: DtypeName | None = option(None, "default bfloat16 on a GPU, float32 on a CPU")
    device: DeviceName = option("auto", "where it runs")
    out: Path | None = option(None, "append rows to this file", metavar="NAME.jsonl")


class ScenariosOptions(PairOptions):
    """Measure the named suites of contexts, batches and depths over a planted pair, as rows."""

    suites: Annotated[tuple[SuiteName, ...], of_text(lambda text: tuple(part.strip() for part in text.split(",")))] = (
        option(
            ",".join(SUITE_NAMES), "suites that are measured", metavar="NAME,...", variable="EAGLE3_SCENARIOS",
            allowed=f"{', '.join(SUITE_NAMES)}, separated by commas",
        )
    )  # fmt: skip
    contexts: Annotated[tuple[int, ...], of_text(lambda text: read_contexts(text))] = option(
        ",".join(map(str, CONTEXTS)), "in tokens, shortest first", metavar="S,..."
    )
    spec: Annotated[tuple[int, ...], of_text(lambda text: read_drafts(text))] = option(
        ",".join(map(str, DRAFTS)), "drafts a step, beside the baseline", metavar="K,..."
    )
    tokens: int = option(256, "generated a request and round", ge=16)
    rounds: int = option(2, "measured rounds", ge=1, variable="EAGLE3_MEASUREMENT_RUNS")
    warmup: int = option(0, "rounds before them", ge=0, variable="EAGLE3_WARMUP_RUNS")
    peers: Peers = option(
        "none", "what is timed beside the engine, or none", metavar="NAME,...",
        allowed=f"{', '.join(get_args(PeerName))}, separated by commas, or none",
    )  # fmt: skip
    hf: bool = option(False, "also Hugging Face's generate, on the shipped pair")
    records: Path | None = option(None, "write nested records to this file too", metavar="NAME.json")

    @property
    def dial_depth(self) -> int:
        """One for all suites."""
        return DIAL_DEPTH


class PlantedOptions(PairOptions):
    """Check a planted pair against its dial, or write it to disk."""

    at: Points = option("64x8", "points that are counted at", metavar=POINTS)
    spec: int = option(3, "drafts a step", ge=1, le=MOST_DRAFTS, metavar="K")
    steps: int = option(5000, "verify steps to count, 0 for none", ge=0)
    no_margin: bool = option(False, "leave out the top-2 gap against the logit error")
    load: bool = option(False, "how much memory loading takes beyond the models; with --write, from disk")
    write: Path | None = option(None, "write target, draft and card.json (small shapes)", metavar="DIR")

    @property
    def dial_depth(self) -> int:
        """The depth that is checked."""
        return self.spec


def check_shipped(pair: PairName, geometry: GeometryName | None) -> None:
    """Refuse other shapes for the trained pair.

    Raises:
        ExperimentError: they were asked for.
    """
    if pair == "shipped" and geometry not in (None, "shipped"):
        raise ExperimentError(
            f"the shipped pair at geometry {geometry!r}", "geometry 'shipped'", "use --pair planted for others"
        )


def read_contexts(text: str) -> tuple[int, ...]:
    """Contexts in tokens, shortest first."""
    parts = [part.strip() for part in text.split(",")]
    contexts = [int(part) for part in parts if part.isdigit()]
    if len(contexts) != len(parts) or contexts != sorted(set(contexts)) or contexts[0] < 2:
        raise refused(text, "ascending numbers of tokens of at least 2, e.g. 8192,16384")
    return tuple(contexts)


def read_drafts(text: str) -> tuple[int, ...]:
    """Depths of speculation, ascending; the baseline is always measured beside them."""
    depths = tuple(sorted(set(read_counts(text))))
    if depths[-1] > MOST_DRAFTS:
        raise refused(text, f"numbers of drafts of 1 to {MOST_DRAFTS}, e.g. 2,3,4,5")
    return depths
