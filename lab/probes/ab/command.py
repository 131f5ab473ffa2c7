"""`eagle3lab ab`: two commits or settings in turns, a planted slowdown, or rows that were stored; a verdict a row."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, RunFailed
from lab.probes.ab.judging import judge, verdict_rows
from lab.probes.ab.slowdown import PlantedSlowdown, SwitchedReplayer, capture_pieces, unexpected
from lab.probes.ab.turns import read_side, shown, take_turns
from lab.probes.bench import scenario as scenarios
from lab.probes.bench.command import add_pair_options, chosen_dtype, one_dial, resolved_device
from lab.probes.bench.record import Rows
from lab.probes.bench.scenario import Scenario
from lab.probes.bench.source import HEADROOM, open_pair
from lab.probes.speed.command import dial
from lab.probes.speed.steps import tokens_for
from lab.rows import environment
from lab.rows.comparison import listed
from lab.rows.history import Change
from lab.rows.store import Row, RowWriter, read_rows
from lab.rows.verdict import MIN_ROUNDS

NAME = "ab"
DEFAULT_ROUNDS = 13
SESSION_TOKENS = 256  # of an engine, at least: the length for which `eagle3lab speed` builds kernels ahead
BENCH = ("bench", "--warmup", "0", "--peers", "none")


def main(arguments: Sequence[str]) -> int:
    """Measures or reads; 0, or 1 if something is slower (of a planted slowdown: if it was not found where it is)."""
    given = _parser().parse_args(list(arguments))
    if given.judge is not None:
        return conclude(judge(read_rows(given.judge)), given.plant)
    if given.rounds < MIN_ROUNDS:
        raise ExperimentError(f"--rounds {given.rounds}", f"at least {MIN_ROUNDS}", "fewer say nothing certain")
    rows = planted(given) if given.plant else in_turns(given)
    if not rows:
        raise RunFailed("nothing was measured", "rows of both sides", "run the command by hand")
    changes = judge(rows)
    _keep(given.out, verdict_rows(changes, rows[0]))
    return conclude(changes, given.plant)


def in_turns(given: argparse.Namespace) -> list[Row]:
    """Rows of two sides, each a process a round."""
    root = environment.checkout()
    if root is None or len(given.sides) != 2:
        raise ExperimentError(
            f"sides {given.sides}", "two commits, or `. .` with --set-a and --set-b, in a checkout", "name both"
        )
    sides = read_side(given.sides[0], given.set_a), read_side(given.sides[1], given.set_b)
    print(shown(sides), flush=True)
    command = list(given.command or BENCH)
    rows = []
    for row in take_turns(root, sides, command, given.rounds, _tell):
        _keep(given.out, [row])
        rows.append(row)
    return rows


def planted(given: argparse.Namespace) -> list[Row]:
    """Rows of one engine with and without a slowdown in one kernel.

    Raises:
        RunFailed: no captured steps here.
    """
    one_dial(given)
    scenario = scenario_of(given)
    rows = Rows(given.out.stem if given.out else NAME, environment.collect(), [], job=NAME)
    with torch.no_grad():
        found = slowed_engine(scenario, given.spec, given.plant, rows)
        found.tokens = given.tokens
        found.prepare()
        cycles = found.plant(given.slower_by)
        _tell(f"{given.plant}: every launch waits {cycles} cycles")
        made: list[Row] = []
        for number in range(1, given.rounds + 1):
            for side in ("A", "B"):
                own = found.once(side, number)
                _keep(given.out, own)
                made += own
            _tell(f"round {number} of {given.rounds}")
    return made


def slowed_engine(scenario: Scenario, k: int, kernel: str, rows: Rows) -> PlantedSlowdown:
    """The engine of a scenario's one point at depth `k`, its step switchable.

    Raises:
        RunFailed: it runs no captured steps.
    """
    [point] = scenario.points
    source = open_pair(scenario)
    session = point.context + max(SESSION_TOKENS, scenario.tokens, tokens_for(20, k)) + HEADROOM
    engine = source.engine(k, batch=point.batch, session_len=session)
    runner = engine.runner
    if not runner.has_kernels:
        raise RunFailed(
            "the engine runs in plain torch and captures no step to plant a slowdown in", "a GPU and bfloat16",
            "run it on a machine with a GPU",
        )  # fmt: skip
    replayer = SwitchedReplayer(kernel, runner.replayer, capture_pieces)
    runner.replay_by(replayer)
    prompts = source.prompts(point.batch, point.context, scenario.seed)
    return PlantedSlowdown(engine, replayer, prompts, point.name(k), rows, tokens=scenario.tokens)


def scenario_of(given: argparse.Namespace) -> Scenario:
    """One point and the depth asked for, with the baseline that a scenario has beside it."""
    points, device = scenarios.read_points(given.at), resolved_device(given.device)
    if len(points) != 1:
        raise ExperimentError(f"--at {given.at!r}", "one point", "plant a slowdown at one point at a time")
    return Scenario(
        geometry=given.geometry or "nano", pair="planted", points=points, ks=tuple(sorted({0, given.spec})),
        share=given.share if given.share is not None else dial(given.acceptance_length, given.spec),
        tokens=given.tokens, rounds=given.rounds, warmup=0, dtype=chosen_dtype(given, device), device=device,
        peers=(), seed=given.seed,
    )  # fmt: skip


def conclude(changes: Sequence[Change], kernel: str) -> int:
    """Prints the verdicts, worst first, and one JSON line."""
    print("\n".join(listed(changes)))
    words = dict(Counter(change.verdict.word for change in changes))
    summary: dict[str, object] = {"command": NAME, "n": len(changes), "words": words}
    if not changes:
        print(json.dumps(summary))
        return EXIT_COULD_NOT_RUN
    if not kernel:
        print(json.dumps(summary))
        return EXIT_GATE_FAILED if words.get("slower") else EXIT_PASSED
    faults = unexpected(changes, kernel)
    print(json.dumps({**summary, "planted": kernel, "unexpected": faults}))
    return EXIT_GATE_FAILED if faults else EXIT_PASSED


def _keep(out: Path | None, rows: Sequence[Row]) -> None:
    if out is not None:
        with RowWriter(out) as writer:
            for row in rows:
                writer.write(row)


def _tell(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3lab ab",
        description="Measure two sides in turns, A B A B, on this machine, and say which rows moved.",
        epilog="Exit codes: 0 nothing slower, 1 something slower (with --plant: not found where it is), 3 nothing ran.",
    )
    parser.add_argument("sides", nargs="*", metavar="A B", help="two commits; . is the tree as it is")
    parser.add_argument(
        "--set-a", action="append", default=[], metavar="KEY=VALUE", help="of A: EAGLE3_X=1, or spec=0,3"
    )
    parser.add_argument("--set-b", action="append", default=[], metavar="KEY=VALUE", help="of B")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help=f"of both sides (default {DEFAULT_ROUNDS})")
    parser.add_argument(
        "--command", type=str.split, default=None, help=f"what a side runs (default {' '.join(BENCH)!r})"
    )
    parser.add_argument("--judge", type=Path, metavar="FILE.jsonl", help="only judge rows that were stored with --out")
    parser.add_argument(
        "--plant", default="", metavar="STAGE/KERNEL", help="slow this kernel of one engine's step down, on side B"
    )
    parser.add_argument("--slower-by", type=float, default=1.05, help="time of the planted kernel, B over A (1.05)")
    parser.add_argument("--at", default="512x1", metavar="CONTEXTxBATCH", help="of --plant (default 512x1)")
    parser.add_argument("--spec", type=int, default=0, metavar="K", help="drafts a step, of --plant (default 0)")
    parser.add_argument("--tokens", type=int, default=96, help="timed a round, of --plant (default 96)")
    add_pair_options(parser)
    return parser
