"""Values that several commands take: names that are known beforehand, points, depths, shares, files that must exist.

The names are those of what lies in slow rooms (shapes, architectures, sizes); `tests/lab/options/test_values.py` holds
the two together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from lab.errors import ExperimentError

MOST_DRAFTS = 7
MIN_ROUNDS = 11  # of each side, from which `lab.rows.verdict` says anything certain
MOST_REPEATED = 0.99  # beyond, tokens far apart take the same experts too, and a wrong draft repeats as well
DIAL_DEPTH = 3  # the depth at which a dial's acceptance length is meant, so that all depths share one dial

GeometryName = Literal[
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-8b", "qwen3-4b", "gpt-oss-20b",
    "gpt-oss-120b", "gpt-oss-20b-thin", "gpt-oss-120b-thin", "qwen3-30b-a3b", "shipped", "nano", "nano-experts",
]  # fmt: skip
PlantedGeometryName = Literal[
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-8b", "qwen3-4b", "gpt-oss-20b",
    "gpt-oss-120b", "gpt-oss-20b-thin", "gpt-oss-120b-thin", "qwen3-30b-a3b", "nano", "nano-experts",
]  # fmt: skip
PairName = Literal["planted", "shipped"]
PeerName = Literal["plain-torch", "hf-static", "compiled-torch"]
USUAL_PEERS: tuple[PeerName, ...] = ("plain-torch", "hf-static")  # the other one compiles for minutes
DtypeName = Literal["float32", "bfloat16", "float16"]
WeightsName = Literal["as_stored", "fp8"]
CacheName = Literal["as_computed", "fp8"]
TargetWeightsName = Literal["as_stored", "fp8", "dequantised"]
DeviceName = Literal["auto", "cpu", "cuda"]
ArchName = Literal["sm_80", "sm_90a", "sm_100", "sm_120"]
MOST_SECONDS = 1e8  # three years: what a timer of the operating system takes
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)]

Made = TypeVar("Made")


def cut_name(name: str, layers: int | None) -> str:
    """The name that records give to a geometry's first `layers` layers; None: to all of them."""
    return name if layers is None else f"{name}, {layers} layers"


def read_cut_name(name: str) -> tuple[str, int | None]:
    """The same the other way around."""
    found = re.fullmatch(r"(.+), (\d+) layers", name)
    return (found[1], int(found[2])) if found else (name, None)


@dataclass(frozen=True)
class Point:
    """Requests decoded together, each after a prompt of `context` tokens."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"{self.context}x{self.batch}"

    def name(self, k: int) -> str:
        """The scenario's name at `k` drafts a step."""
        width = "Single" if self.batch == 1 else f"Batch{self.batch}"
        thousands = self.context % 1024 == 0
        context = f"Context{self.context // 1024}K" if thousands else f"Context{self.context}"
        return f"Speculative_{width}_{context}_{k}tokens" if k else f"Baseline_{width}_{context}"


def read_points(text: str) -> tuple[Point, ...]:
    """Points written as `512x1,16384x4`: context x batch.

    Raises:
        ExperimentError: another form, or a count below 2 and 1.
    """
    points = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)x(\d+)\s*", part)
        if not found or int(found[1]) < 2 or int(found[2]) < 1:
            raise ExperimentError(
                f"point {part!r}", "CONTEXTxBATCH of at least 2x1, e.g. 32768x1", "separate several points by commas"
            )
        points.append(Point(int(found[1]), int(found[2])))
    return tuple(points)


def read_depths(text: str) -> tuple[int, ...]:
    """Depths written as `0,3`, ascending."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise refused(text, f"numbers of 0 to {MOST_DRAFTS}, e.g. 0,3")
    return tuple(sorted({int(part) for part in parts}))


def check_depths(ks: tuple[int, ...]) -> tuple[int, ...]:
    """Depths that a speed-up can be told from: the baseline first.

    Raises:
        ExperimentError: no baseline, out of order, or deeper than the engine drafts.
    """
    if not ks or ks[0] != 0 or list(ks) != sorted(set(ks)) or ks[-1] > MOST_DRAFTS:
        raise ExperimentError(
            f"depths {list(ks)}",
            f"ascending depths of 0 to {MOST_DRAFTS}, 0 (the baseline) among them",
            "a speed-up needs its own baseline: write --spec 0,3",
        )
    return ks


def read_counts(text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise refused(text, "whole numbers of 1 or more, separated by commas")
    return tuple(int(part) for part in parts)


def read_share(text: str) -> tuple[int, int]:
    """(i, n) of "i/n": every n-th from the i-th, which counts from 1."""
    which, _, n = text.partition("/")
    if not (which.isdigit() and n.isdigit() and 1 <= int(which) <= int(n)):
        raise refused(text, "I/N with I of 1 to N, e.g. 1/2")
    return int(which), int(n)


def read_slice(text: str) -> tuple[int, int]:
    """(start, step) of the same: the place of the first, which counts from 0, and how far it is to the next."""
    which, n = read_share(text)
    return which - 1, n


def refused(value: object, allowed: str) -> PydanticCustomError:
    """What a validator raises: the reader adds the option's name, and what to do."""
    return PydanticCustomError("refused", "refused", {"shown": str(value), "allowed": allowed})


def of_text(read: Callable[[str], Made]) -> BeforeValidator:
    """A validator that reads texts and leaves what a caller in Python made already."""

    def validated(value: Any) -> Any:
        return read(value) if isinstance(value, str) else value

    return BeforeValidator(validated)


def _names(text: str) -> tuple[str, ...]:
    """Names separated by commas; none for "none" and for nothing."""
    return () if text in ("none", "") else tuple(part.strip() for part in text.split(","))


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise refused(f"{str(path)!r}, which {what}", "a file that exists")
    return path


Points = Annotated[tuple[Point, ...], of_text(read_points)]
Depths = Annotated[tuple[int, ...], AfterValidator(check_depths), of_text(read_depths)]
Counts = Annotated[tuple[int, ...], of_text(read_counts)]
Peers = Annotated[tuple[PeerName, ...], of_text(_names)]
Names = Annotated[tuple[str, ...], of_text(_names)]
Share = Annotated[tuple[int, int], of_text(read_share)]
ShareSlice = Annotated[tuple[int, int], of_text(read_slice)]
Folder = Annotated[Path, AfterValidator(Path.resolve)]  # `.` has neither a name nor a folder above it until then
ExistingFile = Annotated[Path, AfterValidator(_existing_file)]
