"""One run of the gates: every mode through the bench, in performance mode, on weights made once for all runs.

A planted pair's target is the same at any dial, so modes of different acceptance lengths share it, and the peers' copy
of it, and differ in their drafts alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eagle3core.performance import PERF_MODE_VARIABLE
from lab.errors import RunFailed
from lab.pairs.planted import find_geometry, share_for_length
from lab.probes.bench.record import Rows
from lab.probes.bench.rounds import WARM_STEPS, within_rounds
from lab.probes.bench.run import Bench, free, read_ceiling
from lab.probes.bench.scenario import Scenario
from lab.probes.bench.source import PairSource, open_pair
from lab.probes.gates.config import GatesConfig, Mode, RunKind
from lab.probes.gates.walks import Cycle, plan_walks, planned_length
from lab.rows.configuration import variable
from lab.rows.environment import Environment
from lab.rows.store import Row

Tell = Callable[[str], None]


class Runs:
    """Runs of the gates over one pair, opened when a run first needs it.

    Args:
        config: what to measure.
        environment: the machine.
        tell: gets a line at every milestone.
    """

    def __init__(self, config: GatesConfig, environment: Environment, tell: Tell = print) -> None:
        self.config, self.environment, self.tell = config, environment, tell
        self._sources: dict[str, PairSource] = {}
        self._gb_per_s: float | None = None

    def run(self, kind: RunKind, name: str) -> list[Row]:
        """Rows of one run, of that name.

        Raises:
            RunFailed: the configuration asks for a GPU and there is none.
        """
        check_device(self.config)
        rows = Rows(name, self.environment, [], shared={"run_kind": kind})
        device = torch.device(self.config.device)
        with variable(PERF_MODE_VARIABLE, "1"), torch.no_grad():  # a broken invariant ends the run
            for mode in self.config.mode:
                self._measure(mode, kind, rows)
                free(device)
        return rows.rows

    def _measure(self, mode: Mode, kind: RunKind, rows: Rows) -> None:
        self.tell(f"{mode.name}: {mode.point}, spec-{mode.spec} at {mode.acceptance_length} tokens a step")
        scenario = scenario_of(self.config, mode, kind)
        bench = Bench(scenario, tell=self.tell, rows=rows)
        if self.config.pair == "planted":
            geometry = find_geometry(self.config.geometry)
            if not bench.plan(geometry.target, geometry.draft, mode.point).engine_fits:
                bench.run()  # which makes no weights, and says in every row what does not fit
                return
        if self._gb_per_s is None:
            self._gb_per_s = read_ceiling(torch.device(scenario.device))
        first = len(rows.rows)
        source, planned = self._source(mode, scenario)
        bench.measure(source, mode.point, self._gb_per_s)
        rows.rows[first:] = with_ratios(rows.rows[first:], mode, planned)

    def _source(self, mode: Mode, scenario: Scenario) -> tuple[PairSource, float | None]:
        """The pair at the mode's dial, its prompts ended where that length is met, and that length."""
        if mode.name not in self._sources:
            known = next(iter(self._sources.values()), None)
            if known is None:
                source = open_pair(scenario)
                self.tell(f"  {source.card}")
            else:
                source = known if known.planted is None else known.redialled(scenario.share)
            self._sources[mode.name] = source
        source = self._sources[mode.name]
        if source.planted is None:
            return source, None
        walks = plan_walks(
            Cycle(source.planted.tokens, mode.spec), n_requests=mode.batch, n_tokens=scenario.tokens,
            least_length=mode.acceptance_length,
        )  # fmt: skip
        planned = planned_length(walks)
        n_steps = min(walk.n_steps for walk in walks) - 1 - WARM_STEPS
        self.tell(f"  prompts ended so that {scenario.tokens} tokens take {n_steps} full steps, {planned:.4f} each")
        source.ends = tuple(walk.end for walk in walks)
        return source, planned


def scenario_of(config: GatesConfig, mode: Mode, kind: RunKind) -> Scenario:
    """What the bench is asked for."""
    is_planted, length = config.pair == "planted", mode.length(kind)
    return Scenario(
        geometry=config.geometry,
        pair=config.pair,
        points=(mode.point,),
        ks=(0, mode.spec),
        share=share_for_length(mode.acceptance_length, mode.spec) if is_planted else 1.0,
        tokens=mode.tokens(kind, is_planted=is_planted),
        rounds=length.rounds,
        warmup=length.warmup,
        dtype=config.dtype,
        device=config.device,
        peers=mode.peers,
        seed=config.seed,
    )


def with_ratios(rows: list[Row], mode: Mode, planned: float | None) -> list[Row]:
    """A mode's rows, the speculative engine's with the length planned and its speed over each peer's plain decoding.

    `speedup_over_<peer>` is tokens a second at the acceptance measured over the peer's, within each round.
    """
    by_name = {row.name: row for row in rows}
    spec = by_name[mode.point.name(mode.spec)]
    if spec.status == "missing":
        return rows
    more: dict[str, Any] = {"planned_acceptance_length": planned}
    for peer in mode.peers:
        plain = by_name[f"{mode.point.name(0)}/{peer}"].values
        steps, ours = plain.get("step_ms_samples"), spec.values["decode_tokens_per_s_samples"]
        if isinstance(steps, list) and isinstance(ours, list):  # a plain step commits one token a request
            rates = [1e3 * mode.batch / step_ms for step_ms in steps]
            more |= within_rounds(ours, rates).values(f"speedup_over_{peer}")
    richer = spec.model_copy(update={"values": {**spec.values, **more}})
    return [richer if row is spec else row for row in rows]


def check_device(config: GatesConfig) -> None:
    """Refuse a configuration for a GPU on a machine without one.

    Raises:
        RunFailed: there is none.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise RunFailed(
            "the thresholds are a GPU's and torch sees none",
            'a CUDA device, or a configuration with device = "cpu"',
            "run `eagle3lab doctor`, or name another file with --config",
        )
