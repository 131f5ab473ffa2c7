"""`eagle3lab scenarios`: the suites of docs/requirements.md R-127 and R-142, and a second backend in the same record.

Each suite is a set of points and depths; `stress` also varies the share of free memory that the caches take. A point
that fails is missing with its reason, and does not stop the next one. Rows are written point by point, and points that
an earlier run of the same command measured on the same machine are not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3core.errors import Eagle3Error
from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, LabError
from lab.options.bench import ScenariosOptions
from lab.options.values import DIAL_DEPTH, Point
from lab.pairs.planted import share_for_length
from lab.probes.bench.command import chosen_device, chosen_dtype, keep_rows
from lab.probes.bench.hf_generate import HF_MODES, hf_limit, hf_rows
from lab.probes.bench.record import Rows, record_of
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Bench, Tell, about, free, read_ceiling
from lab.probes.bench.scenario import CACHE_SHARE, Scenario
from lab.probes.bench.source import open_pair
from lab.rows.environment import collect
from lab.rows.store import Row, read_rows

NAME = "scenarios"
BATCH = 4
DIAL_LENGTH = 3.0  # one dial for all depths, as `eagle3lab speed` has it
_REASONS = (LabError, Eagle3Error, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Suite:
    """A named set of points.

    Attributes:
        contexts: indices into the contexts of the run, shortest first. batch: requests together.
        cache_shares: of the free memory, for both KV caches.
    """

    name: str
    contexts: tuple[int, ...]
    batch: int
    is_speculative: bool = True
    cache_shares: tuple[float, ...] = (CACHE_SHARE,)

    def points(self, contexts: Sequence[int]) -> tuple[Point, ...]:
        """Its points, of the contexts there are."""
        return tuple(Point(contexts[i], self.batch) for i in self.contexts if i < len(contexts))


SUITES = {
    suite.name: suite
    for suite in (
        Suite("baseline", (0, 1, 2), 1, is_speculative=False),
        Suite("single", (0, 1, 2), 1),
        Suite("batch", (0, 1), BATCH),
        Suite("large-context", (2, 3), 1),
        Suite("stress", (2, 3), 1, cache_shares=(0.75, 0.9)),
    )
}


def run(options: ScenariosOptions) -> int:
    """Runs the suites; 0, or 1 if tokens were wrong, or 3 if something could not be measured."""
    common = scenario_of(options)
    hf_context = _hf_context(options) if options.hf else 0
    rows = Rows(options.out.stem if options.out else NAME, collect(), [], job=NAME)
    kept = Kept(options.out)
    run_suites(common, [SUITES[name] for name in options.suites], options.contexts, rows, kept)
    if options.hf:
        first = len(rows.rows)
        rows.rows += hf_rows(
            rows, HF_MODES, Point(hf_context, 1), tokens=options.tokens, rounds=options.rounds,
            device=common.device,
        )  # fmt: skip
        kept.add(rows.rows[first:])
    if options.records is not None:
        options.records.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([record_of(row) for row in rows.rows], indent=1)
        options.records.write_text(text + "\n", encoding="utf-8")
    return conclude(rows.rows)


def _hf_context(options: ScenariosOptions) -> int:
    """The context of transformers' generate: the shortest of the run, or what the shipped target has room for.

    Raises:
        ExperimentError: more tokens than it has positions.
    """
    limit = hf_limit()
    if options.tokens > limit - 2:
        raise ExperimentError(
            f"--hf with --tokens {options.tokens}", f"at most {limit - 2}, of the shipped target's {limit} positions",
            "give fewer tokens, or leave --hf away",
        )  # fmt: skip
    return min(*options.contexts, limit - options.tokens)


class Kept:
    """The file that rows are added to after every point, and what was in it.

    Args:
        out: the file; without one nothing is kept.
    """

    def __init__(self, out: Path | None) -> None:
        self.out = out
        self._earlier = read_rows(out) if out is not None else []

    def measured(self, bench: Bench, point: Point) -> list[Row]:
        """The rows of a point from an earlier run; none unless all that is asked for is among them, measured."""
        scenario, machine = bench.scenario, bench.rows.environment.fingerprint
        alike = [
            row for row in self._earlier
            if row.status == "measured" and row.environment == machine
            and (row.warmup, row.repeats) == (scenario.warmup, scenario.rounds)
        ]  # fmt: skip
        found = []
        for who, ks in (("engine", scenario.ks), *((peer, scenario.ks[:1]) for peer in scenario.peers)):
            for k in ks:
                wanted = bench.parameters(point, k, who) | bench.rows.shared
                same = [row for row in alike if row.parameters == wanted]
                if not same:
                    return []
                found.append(same[-1])
        return found

    def add(self, rows: Sequence[Row]) -> None:
        """Writes rows at the file's end."""
        if rows:
            keep_rows(self.out, rows)


def run_suites(
    common: Scenario, suites: Sequence[Suite], contexts: Sequence[int], rows: Rows, kept: Kept, tell: Tell = print
) -> None:
    """Rows of every suite, on weights made once."""
    source, device = open_pair(common), torch.device(common.device)
    gb_per_s = read_ceiling(device)
    tell(about(source, device, gb_per_s))
    for suite in suites:
        for share in suite.cache_shares:
            for point in suite.points(contexts):
                rows.shared = {"suite": suite.name}
                ks = common.ks if suite.is_speculative else (0,)
                bench = Bench(replace(common, points=(point,), ks=ks, cache_share=share), tell=tell, rows=rows)
                known = kept.measured(bench, point)
                if known:
                    tell(f"{suite.name} {point}, caches {share:.0%}: measured before")
                    rows.rows += known
                    continue
                first = len(rows.rows)
                _guarded(lambda b=bench, p=point: b.measure(source, p, gb_per_s), bench, point)  # type: ignore[misc]
                kept.add(rows.rows[first:])
                del bench
                free(device)


def _guarded(measure: Callable[[], None], bench: Bench, point: Point) -> None:
    """One point; what stops it is the reason of its missing rows."""
    try:
        with torch.no_grad():
            measure()
    except _REASONS as error:
        for k in bench.scenario.ks:
            bench.rows.missing(point.name(k), str(error).splitlines()[0], bench.parameters(point, k, "engine"))
        bench.tell(f"{point}: missing: {error}")


def scenario_of(options: ScenariosOptions) -> Scenario:
    """What all suites have in common."""
    geometry = options.shapes()
    device = chosen_device(options.device, geometry)
    length = options.acceptance_length or DIAL_LENGTH
    return Scenario(
        geometry=geometry, pair="planted", points=(), ks=(0, *options.spec),
        share=options.share if options.share is not None else share_for_length(length, DIAL_DEPTH),
        tokens=options.tokens, rounds=options.rounds, warmup=options.warmup,
        dtype=chosen_dtype(options.dtype, device), device=device, peers=options.peers, seed=options.seed,
        repeated=options.repeated,
    )  # fmt: skip


def conclude(rows: Sequence[Row]) -> int:
    """Prints the summary and gives the exit code."""
    wrong = [row.name for row in rows if row.status == "measured" and wrong_tokens(row.values)]
    missing = [row.name for row in rows if row.status == "missing"]
    speedup: dict[str, Any] = {row.name: row.values["speedup"] for row in rows if "speedup" in row.values}
    tell_summary(
        {"command": NAME, "n_rows": len(rows), "missing": missing, "wrong_tokens": wrong, "speedup": speedup}
    )  # fmt: skip
    if wrong:
        return EXIT_GATE_FAILED
    return EXIT_COULD_NOT_RUN if missing or not rows else EXIT_PASSED
