"""Options of what is kept of acceptance, and of what is shown of it afterwards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import model_validator

from lab.errors import ExperimentError
from lab.options.fields import Options, option
from lab.options.values import Folder, of_text, refused

COSTS = "NODES:COST,... in ascending nodes from 1 on, e.g. 1:100,4:106,64:150"


def read_costs(text: str) -> tuple[tuple[int, float], ...]:
    """What a step costs by the nodes it verifies, written as `1:100,4:106`; any unit.

    Raises:
        PydanticCustomError: another form, nodes that do not ascend from 1, or a cost that is not above 0.
    """
    parts = [re.fullmatch(r"\s*(\d{1,4}):(\d{1,9}(?:\.\d{1,9})?)\s*", part) for part in text.split(",")]
    costs = tuple((int(part[1]), float(part[2])) for part in parts if part is not None)
    nodes = [n for n, _ in costs]
    if len(costs) < len(parts) or nodes[0] != 1 or nodes != sorted(set(nodes)) or min(c for _, c in costs) <= 0:
        raise refused(text, COSTS)
    return costs


class GoldenOptions(Options):
    """Keep a run's acceptance lengths as what later runs are held against: drift is then a verdict."""

    run_dir: Folder = option(..., "a run folder", flag="", metavar="DIR")
    out: Path = option(
        ..., "the file to write or add to; notebooks look for golden_lengths.json beside the draft's folder",
        metavar="FILE.json",
    )  # fmt: skip
    tolerance: float | None = option(
        None, "tokens a step, either way (default: half the 95% interval over prompts)", gt=0, le=8
    )


class InspectRunOptions(Options):
    """Say what a run's drafts gave, request by request, and what other drafts would have given; nothing is run."""

    run_dir: Folder = option(..., "a run folder, or an acceptance log", flag="", metavar="DIR|FILE")
    requests: int = option(20, "requests that are listed, those with the lowest lengths", ge=0)
    what_if: tuple[str, ...] = option(
        (), "other drafts: chain-K, a published list or a file of choices, or best-NODES", metavar="SHAPE",
        shape="several",
    )  # fmt: skip
    costs: Annotated[tuple[tuple[int, float], ...], of_text(read_costs)] = option(
        (), "with --what-if: what a step costs by the nodes it verifies, in any unit", metavar="NODES:COST,...",
        allowed=COSTS,
    )  # fmt: skip

    @model_validator(mode="after")
    def _has_something_to_cost(self) -> Self:
        if self.costs and not self.what_if:
            raise ExperimentError("--costs without --what-if", "both", "add --what-if chain-3, or leave it out")
        return self
