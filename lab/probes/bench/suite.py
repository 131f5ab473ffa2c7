"""`eagle3lab scenarios`: the suites of docs/requirements.md R-127 and R-142, and a second backend in the same record.

Each suite is a set of points and depths; `stress` also varies the share of free memory that the caches take. A point
that fails is missing with its reason, and does not stop the next one. Rows are written point by point, and points that
an earlier run of the same command measured on the same machine are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3core.errors import Eagle3Error
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, LabError
from lab.pairs.planted import share_for_length
from lab.probes.bench.command import add_pair_options, chosen_dtype, one_dial, resolved_device
from lab.probes.bench.hf_generate import HF_MODES, hf_rows
from lab.probes.bench.record import Rows, record_of
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Bench, Tell, free, read_ceiling
from lab.probes.bench.scenario import CACHE_SHARE, Point, Scenario
from lab.probes.bench.source import open_pair
from lab.rows.environment import collect
from lab.rows.store import Row, RowWriter, read_rows

NAME = "scenarios"
SCENARIOS_VARIABLE = "EAGLE3_SCENARIOS"
WARMUP_VARIABLE = "EAGLE3_WARMUP_RUNS"
ROUNDS_VARIABLE = "EAGLE3_MEASUREMENT_RUNS"
CONTEXTS = (8192, 16384, 32768, 65536)
DRAFTS = (2, 3, 4, 5)
BATCH = 4
DIAL_DEPTH, DIAL_LENGTH = 3, 3.0  # one dial for all depths, as `eagle3lab speed` has it
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


def main(arguments: Sequence[str]) -> int:
    """Runs the suites; 0, or 1 if tokens were wrong, or 3 if something could not be measured."""
    given = _parser().parse_args(list(arguments))
    suites, contexts = read_suites(given.suites), read_contexts(given.contexts)
    one_dial(given)
    rows = Rows(given.out.stem if given.out else NAME, collect(), [], job=NAME)
    kept = Kept(given.out)
    run_suites(scenario_of(given), suites, contexts, rows, kept)
    if given.hf:
        first = len(rows.rows)
        rows.rows += hf_rows(
            rows, HF_MODES, Point(min(contexts), 1), tokens=given.tokens, rounds=given.rounds,
            device=resolved_device(given.device),
        )  # fmt: skip
        kept.add(rows.rows[first:])
    if given.records is not None:
        given.records.parent.mkdir(parents=True, exist_ok=True)
        given.records.write_text(json.dumps([record_of(row) for row in rows.rows], indent=1) + "\n", encoding="utf-8")
    return conclude(rows.rows)


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
        if self.out is not None and rows:
            with RowWriter(self.out) as writer:
                for row in rows:
                    writer.write(row)


def run_suites(
    common: Scenario, suites: Sequence[Suite], contexts: Sequence[int], rows: Rows, kept: Kept, tell: Tell = print
) -> None:
    """Rows of every suite, on weights made once."""
    source, device = open_pair(common), torch.device(common.device)
    gb_per_s = read_ceiling(device)
    tell(f"{source.card}; read ceiling {gb_per_s:.0f} GB/s")
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


def scenario_of(given: argparse.Namespace) -> Scenario:
    """What all suites have in common."""
    device = resolved_device(given.device)
    length = given.acceptance_length or DIAL_LENGTH
    return Scenario(
        geometry=given.geometry or "nano", pair="planted", points=(), ks=(0, *read_drafts(given.spec)),
        share=given.share if given.share is not None else share_for_length(length, DIAL_DEPTH), tokens=given.tokens,
        rounds=given.rounds, warmup=given.warmup, dtype=chosen_dtype(given, device), device=device,
        peers=() if given.peers == "none" else tuple(given.peers.split(",")), seed=given.seed,
    )  # fmt: skip


def read_suites(text: str) -> list[Suite]:
    """Suites by name, separated by commas.

    Raises:
        ExperimentError: an unknown one.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise ExperimentError(
            f"no scenario {unknown[0]!r}", ", ".join(SUITES), f"correct --suites, or {SCENARIOS_VARIABLE}"
        )
    return [SUITES[name] for name in names]


def read_contexts(text: str) -> list[int]:
    """Contexts in tokens, shortest first.

    Raises:
        ExperimentError: not ascending numbers of 2 or more.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or found != sorted(set(found)) or found[0] < 2:
        raise ExperimentError(
            f"contexts {text!r}", "ascending numbers of tokens, e.g. 8192,16384", "correct --contexts"
        )
    return found


def read_drafts(text: str) -> tuple[int, ...]:
    """Depths of speculation; the baseline is always measured beside them.

    Raises:
        ExperimentError: not numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ExperimentError(f"depths {text!r}", "numbers of drafts, e.g. 2,3,4,5", "correct --spec")
    return tuple(sorted({int(part) for part in parts}))


def env_count(name: str, default: int) -> int:
    """A count that the environment may give.

    Raises:
        ExperimentError: it gives something else.
    """
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ExperimentError(f"{name}={text!r}", "a whole number", f"unset {name}, or correct it")
    return int(text)


def conclude(rows: Sequence[Row]) -> int:
    """Prints the JSON line and gives the exit code."""
    wrong = [row.name for row in rows if row.status == "measured" and wrong_tokens(row.values)]
    missing = [row.name for row in rows if row.status == "missing"]
    speedup: dict[str, Any] = {row.name: row.values["speedup"] for row in rows if "speedup" in row.values}
    print(json.dumps(
        {"command": NAME, "n_rows": len(rows), "missing": missing, "wrong_tokens": wrong, "speedup": speedup}
    ))  # fmt: skip
    if wrong:
        return EXIT_GATE_FAILED
    return EXIT_COULD_NOT_RUN if missing or not rows else EXIT_PASSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3lab scenarios",
        description="Measure the named suites of contexts, batches and depths over a planted pair, as rows.",
        epilog=f"{SCENARIOS_VARIABLE}, {WARMUP_VARIABLE} and {ROUNDS_VARIABLE} give --suites, --warmup and --rounds.",
    )
    suites = os.environ.get(SCENARIOS_VARIABLE, ",".join(SUITES))
    parser.add_argument("--suites", default=suites, metavar="NAME,...", help=f"default {suites}")
    text = ",".join(map(str, CONTEXTS))
    parser.add_argument("--contexts", default=text, metavar="S,...", help=f"shortest first (default {text})")
    parser.add_argument("--spec", default=",".join(map(str, DRAFTS)), metavar="K,...", help="depths (default 2,3,4,5)")
    parser.add_argument("--tokens", type=int, default=256, help="generated a request and round (default 256)")
    parser.add_argument("--rounds", type=int, default=env_count(ROUNDS_VARIABLE, 2), help="measured rounds (2)")
    parser.add_argument("--warmup", type=int, default=env_count(WARMUP_VARIABLE, 0), help="rounds before them (0)")
    parser.add_argument("--peers", default="none", help="separated by commas, or none (default none)")
    parser.add_argument("--hf", action="store_true", help="also Hugging Face's generate, on the shipped pair")
    parser.add_argument("--records", type=Path, help="write nested records (R-125, R-126) to this file, NAME.json")
    add_pair_options(parser)
    return parser
