"""`eagle3lab speed`: options, rows to a file as they are made, one JSON line last; or the kernels they need, built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.speed import SpeedOptions, stage_depths
from lab.options.values import DIAL_DEPTH, read_points
from lab.pairs.planted import share_for_length
from lab.probes.bench.command import chosen_device, chosen_dtype
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Tell
from lab.probes.bench.scenario import Scenario
from lab.probes.bench.source import HEADROOM
from lab.probes.proofs.plans import Plans, build
from lab.probes.proofs.steps import tokens_for
from lab.probes.proofs.subject import Setting
from lab.probes.speed.measure import PROFILED_STEPS, Speed
from lab.probes.speed.rows import FILE
from lab.rows.store import Row, RowWriter

DEFAULT_LENGTH = 3.0


def run(options: SpeedOptions) -> int:
    """Measures; 0, or 1 if tokens were wrong, or 3 if nothing could be measured."""
    scenario = scenario_of(options)
    if options.build is not None:
        plans = SpeedPlans(geometry=scenario.geometry, scenario=scenario, formats=options.formats)
        tell_summary({"command": "speed", "built": build(plans, ("speed",), options.arch, options.build)})
        return EXIT_PASSED
    return conclude(measure(scenario, options.stage_depths, options.out))


def measure(scenario: Scenario, stage_ks: tuple[int, ...], out: Path | None, tell: Tell = print) -> list[Row]:
    """Rows of a scenario, each on disk as soon as it is made."""
    if out is None:
        return Speed(scenario, stage_ks, tell=tell).measure()
    with RowWriter(out) as writer:
        return Speed(scenario, stage_ks, run=out.stem, keep=writer.write, tell=tell).measure()


def measured(
    folder: Path, *, geometry: str, points: str, ks: Sequence[int], acceptance_length: float, spec_k: int, tokens: int,
    rounds: int, device: str, tell: Tell = print,
) -> Path:  # fmt: skip
    """Rows of this machine, fresh, in `folder`: what notebook 40_speed asks for."""
    resolved = chosen_device(device, geometry)
    scenario = Scenario(
        geometry=geometry, pair="planted", points=read_points(points), ks=tuple(ks),
        share=dial(acceptance_length, max(ks)), tokens=tokens, rounds=rounds, warmup=0,
        dtype="bfloat16" if resolved == "cuda" else "float32", device=resolved, peers=(),
    )  # fmt: skip
    measure(scenario, stage_depths((0, spec_k), scenario.ks), folder / FILE, tell)
    return folder / FILE


@dataclass(frozen=True)
class SpeedPlans(Plans):
    """The engines of a scenario, for those who build their kernels ahead."""

    scenario: Scenario | None = None

    def settings(self, part: str) -> dict[str, list[Setting]]:
        """An engine a depth and point, timed and profiled."""
        assert self.scenario is not None, "plans of a scenario"
        scenario = self.scenario
        return {
            self.geometry: [
                Setting(k, point.batch, point.context + n_tokens + HEADROOM)
                for point in scenario.points
                for k in scenario.ks
                for n_tokens in (scenario.tokens, tokens_for(PROFILED_STEPS, k))
            ]
        }


def scenario_of(options: SpeedOptions) -> Scenario:
    """The scenario of the options.

    Raises:
        ExperimentError: they name what is not there.
    """
    geometry = options.shapes()
    device = "cuda" if options.build is not None else chosen_device(options.device, geometry)
    return Scenario(
        geometry=geometry,
        pair="planted",
        points=options.points,
        ks=options.spec,
        share=options.share if options.share is not None else dial(options.acceptance_length, max(options.spec)),
        tokens=options.tokens,
        rounds=options.rounds,
        warmup=options.warmup,
        dtype=chosen_dtype(options.dtype, device),
        device=device,
        peers=options.peers,
        seed=options.seed,
        repeated=options.repeated,
        sustained=options.sustained,
        **options.formats,
    )


def dial(length: float | None, deepest: int) -> float:
    """The share at which `DIAL_DEPTH` drafts (or the deepest there is) commit `length` tokens a step."""
    depth = min(DIAL_DEPTH, deepest)
    return share_for_length(length or min(DEFAULT_LENGTH, depth + 1.0), depth) if depth else 1.0


def conclude(rows: Sequence[Row]) -> int:
    """Prints the summary and gives the exit code."""
    wrong = [row.name for row in rows if row.status == "measured" and wrong_tokens(row.values)]
    measured = [row for row in rows if row.status == "measured" and row.kind == "bench"]
    over_base = {row.name: row.values["step_over_base"] for row in measured if "step_over_base" in row.values}
    summary = {
        "command": "speed", "n_rows": len(rows), "n_missing": sum(row.status == "missing" for row in rows),
        "wrong_tokens": wrong, "step_over_base": over_base,
    }  # fmt: skip
    tell_summary(summary)
    if wrong:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if measured else EXIT_COULD_NOT_RUN
