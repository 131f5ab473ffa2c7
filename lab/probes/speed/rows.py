"""The rows of `eagle3lab speed` as values: points, the depths measured at each, and the stages of their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError, NotComparable
from lab.probes.bench.results import wrong_tokens
from lab.probes.speed.curves import Range
from lab.probes.speed.stages import STAGE
from lab.rows.committed import newest_committed
from lab.rows.store import Row, read_rows

FILE = "speed.jsonl"
WANTED = "eagle3lab speed --at 512x1 --out " + FILE
NO_ROWS = f"no reports/reference/*/{FILE}; make one: {WANTED}"
_ONE_EACH = ("geometry", "pair", "dtype", "device")  # what all rows of a file must have in common


@dataclass(frozen=True)
class Depth:
    """One depth at one point.

    Attributes:
        over_base: its step over the plain step of the same group; 1 for plain decoding itself.
        bound: what `over_base` would be if only bytes counted.
        length: tokens a step that were measured; dial_length: those the pair was planted for.
        speedup: over plain decoding, as measured.
        by_position: share of steps that accept each drafted position.
        experts_read: distinct experts a layer and step, where the target has any.
        share: of its byte floor at the known ceiling, and run_share at the run's own; None in rows of old.
    """

    k: int
    step_ms: float
    tokens_per_s: float
    over_base: Range
    bound: float = 1.0
    length: float | None = None
    dial_length: float | None = None
    speedup: Range | None = None
    by_position: tuple[float, ...] = ()
    experts_read: float | None = None
    share: float | None = None
    run_share: float | None = None


@dataclass(frozen=True)
class StageCost:
    """A stage of a step, microseconds; what no profile could tell is None."""

    stage: str
    own_us: float
    floor_us: float
    kernel_us: float | None
    gap_us: float | None
    n_kernels: int | None


@dataclass(frozen=True)
class Stages:
    """The step of one depth taken apart.

    Attributes:
        sum_over_step: own times together over the step; None where the step is known as their sum only.
        over_timed: the profiled step over the timed one.
        split: "profile", or why own times could not be split.
    """

    costs: tuple[StageCost, ...]
    step_us: float
    sum_over_step: float | None
    over_timed: float
    split: str

    @property
    def drawn_us(self) -> float:
        """Own times of all stages together: where the last bar of the waterfall ends."""
        return sum(cost.own_us for cost in self.costs)

    @property
    def is_split(self) -> bool:
        """Whether floor, kernels and gaps are known apart."""
        return all(cost.kernel_us is not None for cost in self.costs)


@dataclass
class PointSpeed:
    """Everything known of one point.

    Attributes:
        depths: by number of drafts, plain decoding (0) among them. stages: by number of drafts.
        missing: reasons by row name.
    """

    context: int
    batch: int
    share: float | None = None
    depths: dict[int, Depth] = field(default_factory=dict)
    stages: dict[int, Stages] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As `--at` writes it."""
        return f"{self.context}x{self.batch}"

    @property
    def over_base(self) -> dict[int, float]:
        """Median step over plain step by depth."""
        return {k: depth.over_base.median for k, depth in sorted(self.depths.items())}


@dataclass(frozen=True)
class SpeedRows:
    """One file of rows.

    Attributes:
        name: of the file, folder included. machine: GPU or CPU.
        points: by context, then batch.
    """

    name: str
    geometry: str
    machine: str
    dtype: str
    source: str
    points: tuple[PointSpeed, ...]

    def line(self) -> str:
        """Where the numbers come from, for people."""
        return f"{self.name}: planted {self.geometry}, {self.dtype}, {self.machine}, source {self.source}"


def chosen(path: Path | None) -> SpeedRows | None:
    """The rows of `path`, else of the newest committed file, else None."""
    if path is not None:
        return read_speed(path)
    newest = newest_committed(FILE)
    return read_speed(newest) if newest else None


def read_speed(path: Path) -> SpeedRows:
    """The rows of one file; of several for one measurement the last.

    Raises:
        ExperimentError: no file, or no rows of engines in it.
        NotComparable: its rows are of different geometries, dtypes, devices or machines.
    """
    rows = [row for row in read_rows(path) if row.kind in ("bench", STAGE) and row.parameters.get("who") == "engine"]
    if not rows:
        raise ExperimentError(
            f"{path.name} has no rows of engines", "what `eagle3lab speed` writes", f"make one: {WANTED}"
        )
    common = {name: _one(path, name, [str(row.parameters.get(name)) for row in rows]) for name in _ONE_EACH}
    _one(path, "machine", [row.environment for row in rows])
    points: dict[tuple[int, int], PointSpeed] = {}
    for row in {row.key(): row for row in rows}.values():
        where = _number(row, "context"), _number(row, "batch")
        _take(points.setdefault(where, PointSpeed(*where)), row)
    for row_group in _stage_groups(rows).values():
        _take_stages(points[_number(row_group[0], "context"), _number(row_group[0], "batch")], row_group)
    measured = [row for row in rows if row.status == "measured" and row.kind != STAGE]
    machine = measured[-1].values.get("system.gpu_name") or measured[-1].values.get("system.cpu") if measured else None
    source = measured[-1].values.get("system.source") if measured else None
    return SpeedRows(
        f"{path.parent.name}/{path.name}", common["geometry"], str(machine or common["device"]), common["dtype"],
        str(source or "unknown"), tuple(points[where] for where in sorted(points)),
    )  # fmt: skip


def _take(point: PointSpeed, row: Row) -> None:
    if row.status == "missing":
        point.missing[row.name] = row.reason or "no reason"
        return
    if row.kind == STAGE:
        return
    if wrong := wrong_tokens(row.values):
        point.missing[row.name] = f"its tokens are wrong, so its time says nothing: {wrong}"
        return
    k = _number(row, "spec_k")
    is_later_baseline = k == 0 and k in point.depths and row.parameters.get("group")
    if is_later_baseline:  # of another group, whose ratios are in its own rows
        return
    share = row.parameters.get("share")
    point.share = float(share) if isinstance(share, float) else point.share
    point.depths[k] = depth_of(k, row.values)


def depth_of(k: int, values: Mapping[str, Any]) -> Depth:
    """A depth from the values of its row."""
    read = values.get("experts_read")
    share, run_share, unit = values.get("share_of_floor"), values.get("share_of_run_ceiling"), Range(1.0, 1.0, 1.0)
    plain = Depth(
        k, values["step_ms_median"], values["decode_tokens_per_s"], unit, experts_read=read, share=share,
        run_share=run_share,
    )  # fmt: skip
    if k == 0:
        return plain
    over = _range(values, "step_over_base")
    at_dial = values.get("speedup_at_dial")
    return Depth(
        k, plain.step_ms, plain.tokens_per_s, over, values["step_over_base_bound"], values["acceptance_length"],
        None if at_dial is None else at_dial * over.median, _range(values, "speedup"),
        tuple(values.get("eagle_speculation.acceptance_by_position") or ()), read, share, run_share,
    )  # fmt: skip


def _stage_groups(rows: Sequence[Row]) -> dict[tuple[int, int, int], list[Row]]:
    groups: dict[tuple[int, int, int], list[Row]] = {}
    for row in {row.key(): row for row in rows}.values():
        if row.kind == STAGE and row.status == "measured":
            where = _number(row, "context"), _number(row, "batch"), _number(row, "spec_k")
            groups.setdefault(where, []).append(row)
    return groups


def _take_stages(point: PointSpeed, rows: Sequence[Row]) -> None:
    values: list[Mapping[str, Any]] = [row.values for row in rows]
    costs = tuple(
        StageCost(str(row.parameters["stage"]), of["own_us"], of["floor_us"], of["kernel_us"], of["gap_us"],
                  of["n_kernels"])
        for row, of in zip(rows, values, strict=True)
    )  # fmt: skip
    first = values[0]
    point.stages[_number(rows[0], "spec_k")] = Stages(
        costs, first["step_us_median"], first["sum_over_step"], first["profiled_over_timed"], first["split"]
    )


def _range(values: Mapping[str, Any], name: str) -> Range:
    return Range(values[name], values[f"{name}_p10"], values[f"{name}_p90"])


def _number(row: Row, name: str) -> int:
    return int(row.parameters[name])  # type: ignore[arg-type]  # the lab's own rows, written as numbers


def _one(path: Path, name: str, values: Sequence[str]) -> str:
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        raise NotComparable(
            f"{path.name} has rows of {name} {' and '.join(found)}", f"one {name} a file", "keep them in files apart"
        )
    return found[0]
