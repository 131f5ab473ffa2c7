"""`eagle3lab ab`: two commits or settings in turns, a planted slowdown, or rows that were stored; a verdict a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, RunFailed
from lab.options.speed import AbOptions
from lab.probes.ab.judging import judge, verdict_rows
from lab.probes.ab.slowdown import PlantedSlowdown, SwitchedReplayer, capture_pieces, unexpected
from lab.probes.ab.turns import read_side, shown, take_turns
from lab.probes.bench.command import chosen_device, chosen_dtype
from lab.probes.bench.record import Rows
from lab.probes.bench.scenario import Scenario
from lab.probes.bench.source import HEADROOM, open_pair
from lab.probes.proofs.steps import tokens_for
from lab.probes.speed.command import dial
from lab.rows import environment
from lab.rows.comparison import listed
from lab.rows.history import Change
from lab.rows.store import Row, RowWriter, read_rows

NAME = "ab"
SESSION_TOKENS = 256  # of an engine, at least: the length for which `eagle3lab speed` builds kernels ahead


def run(options: AbOptions) -> int:
    """Measures or reads; 0, or 1 if something is slower (of a planted slowdown: if it was not found where it is)."""
    if options.judge is not None:
        return conclude(judge(read_rows(options.judge)), options.plant)
    rows = planted(options) if options.plant else in_turns(options)
    if not rows:
        raise RunFailed("nothing was measured", "rows of both sides", "run the command by hand")
    changes = judge(rows)
    _keep(options.out, verdict_rows(changes, rows[0]))
    return conclude(changes, options.plant)


def in_turns(options: AbOptions) -> list[Row]:
    """Rows of two sides, each a process a round."""
    root = environment.checkout()
    if root is None:
        raise ExperimentError(
            "this eagle3lab is installed, not run from a checkout", "a checkout, whose commits are the sides",
            "clone the project, install it with pip install -e, and run the command there",
        )  # fmt: skip
    sides = read_side(options.sides[0], options.set_a), read_side(options.sides[1], options.set_b)
    print(shown(sides), flush=True)
    rows = []
    for row in take_turns(root, sides, list(options.command), options.rounds, _tell):
        _keep(options.out, [row])
        rows.append(row)
    return rows


def planted(options: AbOptions) -> list[Row]:
    """Rows of one engine with and without a slowdown in one kernel.

    Raises:
        RunFailed: no captured steps here.
    """
    scenario = scenario_of(options)
    rows = Rows(options.out.stem if options.out else NAME, environment.collect(), [], job=NAME)
    with torch.no_grad():
        found = slowed_engine(scenario, options.spec, options.plant, rows)
        cycles = found.plant(options.slower_by)
        _tell(f"{options.plant}: every launch waits {cycles} cycles")
        made: list[Row] = []
        for number in range(1, options.rounds + 1):
            for side in ("A", "B"):
                own = found.once(side, number)
                _keep(options.out, own)
                made += own
            _tell(f"round {number} of {options.rounds}")
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


def scenario_of(options: AbOptions) -> Scenario:
    """One point and the depth asked for, with the baseline that a scenario has beside it."""
    geometry = options.shapes()
    device = chosen_device(options.device, geometry)
    return Scenario(
        geometry=geometry, pair="planted", points=(options.at,), ks=tuple(sorted({0, options.spec})),
        share=options.share if options.share is not None else dial(options.acceptance_length, options.spec),
        tokens=options.tokens, rounds=options.rounds, warmup=0, dtype=chosen_dtype(options.dtype, device),
        device=device, peers=(), seed=options.seed, repeated=options.repeated,
    )  # fmt: skip


def conclude(changes: Sequence[Change], kernel: str) -> int:
    """Prints the verdicts, worst first, and a summary; 3 where nothing could be compared."""
    print("\n".join(listed(changes)))
    words = dict(Counter(change.verdict.word for change in changes))
    summary: dict[str, object] = {"command": NAME, "n": len(changes), "words": words}
    if set(words) <= {"missing"}:  # also with no row at all
        tell_summary(summary)
        return EXIT_COULD_NOT_RUN
    if not kernel:
        tell_summary(summary)
        return EXIT_GATE_FAILED if words.get("slower") else EXIT_PASSED
    faults = unexpected(changes, kernel)
    tell_summary({**summary, "planted": kernel, "unexpected": faults})
    return EXIT_GATE_FAILED if faults else EXIT_PASSED


def _keep(out: Path | None, rows: Sequence[Row]) -> None:
    if out is not None:
        with RowWriter(out) as writer:
            for row in rows:
                writer.write(row)


def _tell(line: str) -> None:
    print(line, flush=True)
