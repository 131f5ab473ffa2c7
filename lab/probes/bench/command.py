"""`eagle3lab bench`: options, rows to a file, records to another, lines for people, a summary last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.options.bench import BenchOptions
from lab.options.values import DtypeName
from lab.pairs.planted import find_geometry, share_for_length
from lab.probes.bench.record import Rows, record_of
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Bench
from lab.probes.bench.scenario import Scenario
from lab.rows.store import Row, RowWriter

MOST_CPU_WEIGHTS = 1_000_000_000  # a step of more reads at least 4 GB in fp32: a bench of them takes hours
DEFAULT_LENGTH = 3.0  # acceptance length of a planted pair, at the deepest depth


def run(options: BenchOptions) -> int:
    """Runs the bench; 0, or 1 if tokens were wrong, or 3 if nothing of the engine could be measured."""
    scenario = scenario_of(options)
    keep_rows(options.out, [])  # a file that cannot be written is found before anything is measured
    out = options.out
    rows = Bench(scenario, run=out.stem if out else "bench", keep=lambda rows: keep_rows(out, rows)).run()
    if options.records is not None:
        options.records.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([record_of(row) for row in rows.rows], indent=1)
        options.records.write_text(text + "\n", encoding="utf-8")
    return _conclude(rows)


def keep_rows(out: Path | None, rows: Sequence[Row]) -> None:
    """Adds rows to a file, if there is one; nobody else is kept from it between two points.

    Raises:
        RunFailed: the file system refused them.
    """
    if out is not None:
        with RowWriter(out) as writer:
            for row in rows:
                writer.write(row)


def scenario_of(options: BenchOptions) -> Scenario:
    """The scenario of the options.

    Raises:
        ExperimentError: they name what is not there.
    """
    deepest = max(options.spec)
    share = options.share if options.share is not None else 1.0
    if options.share is None and deepest:
        share = share_for_length(options.acceptance_length or min(DEFAULT_LENGTH, deepest + 1.0), deepest)
    geometry = options.shapes("shipped" if options.pair == "shipped" else "nano")
    device = chosen_device(options.device, geometry)
    return Scenario(
        geometry=geometry,
        pair=options.pair,
        points=options.at,
        ks=options.spec,
        share=share,
        tokens=options.tokens,
        rounds=options.rounds,
        warmup=options.warmup,
        dtype=chosen_dtype(options.dtype, device),
        device=device,
        peers=options.peers if options.forced is None else (),  # what a peer commits cannot be forced
        seed=options.seed,
        repeated=options.repeated,
        sustained=options.sustained,
        **options.formats,
        forced=options.forced,
    )


def chosen_dtype(dtype: DtypeName | None, device: str) -> str:
    """The dtype named, or the device's own."""
    return dtype or ("bfloat16" if device == "cuda" else "float32")


def chosen_device(name: str, geometry: str) -> str:
    """The device named, "auto" resolved, and refused where the shapes are out of its reach.

    Raises:
        ExperimentError: CUDA was asked for and is not there, or a CPU would need hours for these shapes.
    """
    device, n_weights = resolved_device(name), find_geometry(geometry).n_weights
    if device == "cpu" and n_weights > MOST_CPU_WEIGHTS:
        raise ExperimentError(
            f"{geometry} has {n_weights / 1e9:.1f} billion weights, and this run would be on a CPU",
            f"a GPU for these shapes; on a CPU at most {MOST_CPU_WEIGHTS / 1e9:.0f} billion weights, e.g. nano",
            "run it on a machine with a GPU, or use --geometry nano",
        )
    return device


def resolved_device(name: str) -> str:
    """The device named, "auto" resolved.

    Raises:
        ExperimentError: CUDA was asked for and is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ExperimentError(
            "device is 'cuda' and torch sees none", "cpu or auto on this machine", "use --device auto"
        )
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _conclude(rows: Rows) -> int:
    wrong = [row.name for row in rows.rows if row.status == "measured" and wrong_tokens(row.values)]
    measured = [row for row in rows.rows if row.status == "measured" and row.parameters["who"] == "engine"]
    summary = {
        "command": "bench",
        "n_rows": len(rows.rows),
        "n_missing": sum(row.status == "missing" for row in rows.rows),
        "wrong_tokens": wrong,
        "share_of_floor": {row.name: row.values["share_of_floor"] for row in measured},
        "speedup": {row.name: row.values["speedup"] for row in measured if "speedup" in row.values},
    }
    tell_summary(summary)
    if wrong:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if measured else EXIT_COULD_NOT_RUN
