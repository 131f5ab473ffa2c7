"""`eagle3lab speed`: options, rows to a file as they are made, one JSON line last; or the kernels they need, built."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3core.kernels import ARCHES
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.pairs.planted import share_for_length
from lab.probes.bench import scenario as scenarios
from lab.probes.bench.command import add_pair_options, chosen_dtype, one_dial, resolved_device
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Tell
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.bench.source import HEADROOM
from lab.probes.proofs.plans import Plans, build
from lab.probes.proofs.subject import Setting
from lab.probes.speed.measure import PROFILED_STEPS, Speed
from lab.probes.speed.rows import FILE
from lab.probes.speed.steps import tokens_for
from lab.rows.store import Row, RowWriter

DEFAULT_LENGTH = 3.0
DIAL_DEPTH = 3  # the depth at which the dial's acceptance length is meant, so that all depths share one dial


def main(arguments: Sequence[str]) -> int:
    """Measures; 0, or 1 if tokens were wrong, or 3 if nothing could be measured."""
    given = _parser().parse_args(list(arguments))
    scenario, stage_ks = scenario_of(given), stage_depths(given.stages, scenarios.read_depths(given.spec))
    if given.build is not None:
        plans = SpeedPlans(geometry=scenario.geometry, scenario=scenario)
        print(json.dumps({"command": "speed", "built": build(plans, ("speed",), given.arch, given.build)}))
        return EXIT_PASSED
    return conclude(measure(scenario, stage_ks, given.out))


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
    resolved = resolved_device(device)
    scenario = Scenario(
        geometry=geometry, pair="planted", points=scenarios.read_points(points), ks=tuple(ks),
        share=dial(acceptance_length, max(ks)), tokens=tokens, rounds=rounds, warmup=0,
        dtype="bfloat16" if resolved == "cuda" else "float32", device=resolved, peers=(),
    )  # fmt: skip
    measure(scenario, stage_depths(f"0,{spec_k}", scenario.ks), folder / FILE, tell)
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


def scenario_of(given: argparse.Namespace) -> Scenario:
    """The scenario of the options.

    Raises:
        ExperimentError: options that contradict, or name what is not there.
    """
    one_dial(given)
    ks = scenarios.read_depths(given.spec)
    device = "cuda" if given.build is not None else resolved_device(given.device)
    return Scenario(
        geometry=given.geometry or "nano",
        pair="planted",
        points=points_of(given.at, given.sweep_batch, given.context),
        ks=ks,
        share=given.share if given.share is not None else dial(given.acceptance_length, max(ks)),
        tokens=given.tokens,
        rounds=given.rounds,
        warmup=given.warmup,
        dtype=chosen_dtype(given, device),
        device=device,
        peers=() if given.peers == "none" else tuple(given.peers.split(",")),
        seed=given.seed,
    )


def dial(length: float | None, deepest: int) -> float:
    """The share at which `DIAL_DEPTH` drafts (or the deepest there is) commit `length` tokens a step."""
    depth = min(DIAL_DEPTH, deepest)
    return share_for_length(length or min(DEFAULT_LENGTH, depth + 1.0), depth) if depth else 1.0


def points_of(at: str, batches: str, context: int) -> tuple[Point, ...]:
    """The points named, or with `batches` those of a sweep over them at one context.

    Raises:
        ExperimentError: both, neither, or another form.
    """
    if bool(at) == bool(batches):
        raise ExperimentError(
            f"--at {at!r} with --sweep-batch {batches!r}", "one of the two", "give --at 512x1 or --sweep-batch 1,2,4"
        )
    return scenarios.read_points(at or ",".join(f"{context}x{batch.strip()}" for batch in batches.split(",")))


def stage_depths(text: str, ks: Sequence[int]) -> tuple[int, ...]:
    """Depths whose steps are taken apart; without a text the baseline and 3 drafts, or the deepest there is.

    Raises:
        ExperimentError: a depth that is not measured.
    """
    if text == "none":
        return ()
    wanted = scenarios.read_depths(text) if text else (0, DIAL_DEPTH if DIAL_DEPTH in ks else max(ks))
    unknown = [k for k in wanted if k not in ks]
    if unknown:
        raise ExperimentError(f"stages of {unknown[0]} drafts", f"depths of --spec: {list(ks)}", "correct --stages")
    return tuple(dict.fromkeys(wanted))


def conclude(rows: Sequence[Row]) -> int:
    """Prints the JSON line and gives the exit code."""
    wrong = [row.name for row in rows if row.status == "measured" and wrong_tokens(row.values)]
    measured = [row for row in rows if row.status == "measured" and row.kind == "bench"]
    over_base = {row.name: row.values["step_over_base"] for row in measured if "step_over_base" in row.values}
    summary = {
        "command": "speed", "n_rows": len(rows), "n_missing": sum(row.status == "missing" for row in rows),
        "wrong_tokens": wrong, "step_over_base": over_base,
    }  # fmt: skip
    print(json.dumps(summary))
    if wrong:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if measured else EXIT_COULD_NOT_RUN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3lab speed", description="Time every depth of speculation and take its step apart, as rows."
    )
    parser.add_argument("--at", default="", metavar="CONTEXTxBATCH,...", help="points, e.g. 512x1,32768x1,16384x4")
    parser.add_argument("--sweep-batch", default="", metavar="B,...", help="batches at one --context, in place of --at")
    parser.add_argument("--context", type=int, default=1024, help="of --sweep-batch (default 1024)")
    parser.add_argument("--spec", default="0,1,2,3,4,5,6,7", metavar="K,...", help="depths (default 0 to 7)")
    parser.add_argument("--stages", default="", metavar="K,...", help="depths to take apart, or none (default 0,3)")
    parser.add_argument("--tokens", type=int, default=256, help="generated a request and round (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--warmup", type=int, default=0, help="rounds before them; a window warms up by itself (0)")
    parser.add_argument("--peers", default="none", help="separated by commas, or none (default none)")
    parser.add_argument("--build", type=Path, metavar="DIR", help="compile the kernels needed into DIR instead")
    parser.add_argument("--arch", choices=ARCHES, default="sm_90a", help="to compile for (default sm_90a)")
    add_pair_options(parser)
    return parser
