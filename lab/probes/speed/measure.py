"""One call of `eagle3lab speed`: every depth at every point in the bench's rounds, then their steps taken apart.

Engines of all depths are alive together, so that rounds take turns between them. Where memory does not hold them all,
depths are measured in groups, each with a baseline of its own; a ratio never spans two groups. Profiles come after all
timed rounds, so that no timed step follows a profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3core.errors import Eagle3Error
from lab.errors import LabError, RunFailed
from lab.pairs.planted import find_geometry
from lab.probes.bench.floors import Floor, step_floor
from lab.probes.bench.memory import Plan
from lab.probes.bench.record import Rows
from lab.probes.bench.run import Bench, Tell, about, free, read_ceiling
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.bench.source import HEADROOM, PairSource, open_pair
from lab.probes.proofs.steps import profile_steps, tokens_for
from lab.probes.speed.stages import KERNEL, STAGE, kernel_values, profiled_values, spanned_values
from lab.rows.environment import collect
from lab.rows.store import Row

NAME = "speed"
PROFILED_STEPS = 20
REASONS = (LabError, Eagle3Error, torch.OutOfMemoryError)  # why a point is missing, and the others are not


@dataclass
class Speed:
    """A scenario being measured.

    Attributes:
        scenario: points and depths; no peers unless it names some.
        stage_ks: depths whose steps are taken apart.
        keep: gets every row as soon as it is made.
        tell: gets a line at every milestone.
    """

    scenario: Scenario
    stage_ks: tuple[int, ...]
    run: str = NAME
    keep: Callable[[Row], None] = lambda row: None
    tell: Tell = print
    n_steps: int = PROFILED_STEPS

    def __post_init__(self) -> None:
        self.rows = Rows(self.run, collect(), [], job=NAME)
        self._n_kept = 0

    def measure(self) -> list[Row]:
        """Rows of every point: depth by depth, and stage by stage."""
        if not any(self._fits(point, (0,)) for point in self.scenario.points):  # then the weights need not be made
            for point in self.scenario.points:
                self._all_missing(point, self.scenario.ks, f"does not fit: {self._plan(point, (0,))}")
            self._keep_new()
            return self.rows.rows
        source = open_pair(self.scenario)
        device = torch.device(self.scenario.device)
        gb_per_s = read_ceiling(device)
        self.tell(about(source, device, gb_per_s))
        is_profiled = source.target.is_packed
        with torch.no_grad():
            for point in self.scenario.points:
                self._time(source, point, gb_per_s, spans=() if is_profiled else self.stage_ks)
            for point in self.scenario.points:
                for k in self.stage_ks:
                    self._take_apart(source, point, k, gb_per_s)
                    free(device)
                    self._keep_new()
        return self.rows.rows

    def _time(self, source: PairSource, point: Point, gb_per_s: float, *, spans: tuple[int, ...]) -> None:
        groups = groups_of(self.scenario.ks, lambda ks: self._fits(point, ks))
        for number, ks in enumerate(groups):
            if len(groups) > 1:
                self.tell(f"{point}: group {number + 1} of {len(groups)}, depths {list(ks)}")
            self.rows.shared = {"group": number}
            bench = self._bench(point, ks, spans)
            try:
                bench.measure(source, point, gb_per_s)
            except REASONS as error:
                self._all_missing(point, ks, str(error))
            del bench
            free(torch.device(self.scenario.device))
            self._keep_new()
        self.rows.shared = {}

    def _bench(self, point: Point, ks: tuple[int, ...], spans: tuple[int, ...] = ()) -> Bench:
        scenario = replace(self.scenario, points=(point,), ks=ks)
        return Bench(scenario, run=self.run, tell=self.tell, rows=self.rows, spans=spans)

    def _plan(self, point: Point, ks: tuple[int, ...]) -> Plan:
        geometry = find_geometry(self.scenario.geometry)
        return self._bench(point, ks).plan(geometry.target, geometry.draft, point)

    def _fits(self, point: Point, ks: tuple[int, ...]) -> bool:
        return self._plan(point, ks).engine_fits

    def _all_missing(self, point: Point, ks: tuple[int, ...], reason: str) -> None:
        bench = self._bench(point, ks)
        for k in ks:
            self.rows.missing(point.name(k), reason, bench.parameters(point, k, "engine"))
        self.tell(f"{point}: missing: {reason}")

    def _take_apart(self, source: PairSource, point: Point, k: int, gb_per_s: float) -> None:
        name = point.name(k)
        parameters = self._bench(point, self.scenario.ks).parameters(point, k, "engine")
        try:
            values = self._stages(source, point, k, gb_per_s)
        except REASONS as error:
            self.rows.missing(f"{name}/stages", str(error), parameters, kind=STAGE)
            self.tell(f"  {name}: missing: {error}")
            return
        for stage, of_stage in values.items():
            where = {**parameters, "stage": stage}
            timer = "perf_counter" if of_stage["gap_us"] is None else "cupti"
            self.rows.measured(f"{name}/{stage}", of_stage, where, self.scenario, kind=STAGE, timer=timer)
        first = next(iter(values.values()))
        total = first["sum_over_step"]
        whole = "" if total is None else f", together {total:.2%} of a step"
        over = first["profiled_over_timed"]
        self.tell(f"  {name}: {len(values)} stages{whole}; with the profiler, {over:.3f} of a step's time without")

    def _stages(self, source: PairSource, point: Point, k: int, gb_per_s: float) -> dict[str, dict[str, Any]]:
        timed = self._timed(point, k)
        timed_us = 1e3 * float(timed["step_ms_median"])
        if source.target.is_packed:
            return self._profiled(source, point, k, gb_per_s, timed)
        spans_ms = {
            name.removeprefix("stage_ms."): float(timed[name]) for name in timed if name.startswith("stage_ms.")
        }
        floor = self._floor(source, point, k, self.scenario.tokens / 2, timed)
        return spanned_values(spans_ms, floor, gb_per_s, timed_us)

    def _profiled(
        self, source: PairSource, point: Point, k: int, gb_per_s: float, timed: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Values by stage; the rows of its kernels are written here."""
        session = point.context + tokens_for(self.n_steps, k) + HEADROOM
        engine = source.engine(k, batch=point.batch, session_len=session)
        profile = profile_steps(engine, source.prompts(point.batch, point.context, self.scenario.seed), self.n_steps)
        floor = self._floor(source, point, k, profile.cached - point.context, timed)
        parameters = self._bench(point, self.scenario.ks).parameters(point, k, "engine")
        for kernel, values in kernel_values(profile).items():
            where = {**parameters, "kernel": kernel}
            name = f"{point.name(k)}/{kernel}"
            self.rows.measured(name, values, where, self.scenario, kind=KERNEL, timer="cupti")
        return profiled_values(profile, floor, gb_per_s, 1e3 * float(timed["step_ms_median"]))

    def _floor(self, source: PairSource, point: Point, k: int, generated: float, timed: Mapping[str, Any]) -> Floor:
        """`timed`: the row of these steps, which says how many experts they chose."""
        read = timed.get("experts_read")
        routing = source.routing if read is None else replace(source.routing, measured={k + 1: float(read)})
        return step_floor(
            source.target_geometry, source.draft_geometry, k=k, batch=point.batch, cached=point.context + generated,
            itemsize=getattr(torch, self.scenario.dtype).itemsize, draft_weights=source.draft.weights,
            target_weights=source.target.weights, routing=routing, **source.caches,
        )  # fmt: skip

    def _timed(self, point: Point, k: int) -> dict[str, Any]:
        """Values of the engine's row at a depth, of the first group for the baseline."""
        wanted = {"context": point.context, "batch": point.batch, "spec_k": k, "who": "engine"}
        for row in self.rows.rows:
            if (
                row.kind not in (STAGE, KERNEL)
                and row.status == "measured"
                and wanted.items() <= row.parameters.items()
            ):
                return dict(row.values)
        raise RunFailed(f"no step of {k} drafts was timed at {point}", "a timed step", "see why its row is missing")

    def _keep_new(self) -> None:
        for row in self.rows.rows[self._n_kept :]:
            self.keep(row)
        self._n_kept = len(self.rows.rows)


def groups_of(ks: Sequence[int], fits: Callable[[tuple[int, ...]], bool]) -> list[tuple[int, ...]]:
    """Depths that are measured together, as many as fit; every group begins with a baseline of its own.

    Args:
        ks: depths, 0 first. fits: whether engines of these depths may be alive at once.
    """
    groups: list[tuple[int, ...]] = []
    for k in ks[1:]:
        if groups and fits((*groups[-1], k)):
            groups[-1] = (*groups[-1], k)
        else:
            groups.append((0, k))
    return groups or [(0,)]
