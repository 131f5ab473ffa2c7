"""`eagle3lab bench`: options, rows to a file, records to another, lines for people, one JSON line last."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.pairs.planted import GEOMETRIES, share_for_length
from lab.probes.bench import scenario as scenarios
from lab.probes.bench.record import Rows, record_of
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Bench
from lab.rows.store import RowWriter

DEFAULT_LENGTH = 3.0  # acceptance length of a planted pair, at the deepest depth


def main(arguments: Sequence[str]) -> int:
    """Runs the bench; 0, or 1 if tokens were wrong, or 3 if nothing of the engine could be measured."""
    given = _parser().parse_args(list(arguments))
    scenario = scenario_of(given)
    rows = Bench(scenario, run=given.out.stem if given.out else "bench").run()
    if given.out is not None:
        with RowWriter(given.out) as writer:
            for row in rows.rows:
                writer.write(row)
    if given.records is not None:
        given.records.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([record_of(row) for row in rows.rows], indent=1)
        given.records.write_text(text + "\n", encoding="utf-8")
    return _conclude(rows)


def scenario_of(given: argparse.Namespace) -> scenarios.Scenario:
    """The scenario of the options.

    Raises:
        ExperimentError: options that contradict, or name what is not there.
    """
    ks = scenarios.read_depths(given.spec)
    one_dial(given)
    deepest = max(ks)
    share = given.share if given.share is not None else 1.0
    if given.share is None and deepest:
        share = share_for_length(given.acceptance_length or min(DEFAULT_LENGTH, deepest + 1.0), deepest)
    device = resolved_device(given.device)
    return scenarios.Scenario(
        geometry=given.geometry or ("shipped" if given.pair == "shipped" else "nano"),
        pair=given.pair,
        points=scenarios.read_points(given.at),
        ks=ks,
        share=share,
        tokens=given.tokens,
        rounds=given.rounds,
        warmup=given.warmup,
        dtype=chosen_dtype(given, device),
        device=device,
        peers=() if given.peers == "none" else tuple(given.peers.split(",")),
        seed=given.seed,
    )


def one_dial(given: argparse.Namespace) -> None:
    """Refuse the dial of a planted pair named twice.

    Raises:
        ExperimentError: --share beside --acceptance-length.
    """
    if given.share is not None and given.acceptance_length is not None:
        raise ExperimentError(
            "--share was given together with --acceptance-length", "one of the two", "leave one of them out"
        )


def chosen_dtype(given: argparse.Namespace, device: str) -> str:
    """The dtype named, or the device's own."""
    return str(given.dtype or ("bfloat16" if device == "cuda" else "float32"))


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


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which planted pair, shared with `eagle3lab planted`."""
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), help="shapes (default nano; shipped with that pair)")
    parser.add_argument("--share", type=float, help="dial of a planted pair: share of drafted positions accepted, 0..1")
    parser.add_argument(
        "--acceptance-length", type=float, help="the dial as tokens a step at the deepest --spec (default 3.0)"
    )
    parser.add_argument("--dtype", choices=scenarios.DTYPES, help="default bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")
    parser.add_argument("--out", type=Path, help="append rows to this file, NAME.jsonl")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3lab bench", description="Time decoding with and without drafts, beside its peers, as rows."
    )
    parser.add_argument("--pair", choices=scenarios.PAIRS, default="planted", help="default planted")
    parser.add_argument("--at", default="512x1", metavar="CONTEXTxBATCH,...", help="default 512x1")
    parser.add_argument("--spec", default="0,3", metavar="K,...", help="depths, 0 is the baseline (default 0,3)")
    parser.add_argument("--tokens", type=int, default=256, help="generated a request and round (default 256)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them (default 1)")
    parser.add_argument("--peers", default=",".join(scenarios.PEERS), help="separated by commas, or none (default all)")
    parser.add_argument("--records", type=Path, help="write nested records (R-125, R-126) to this file, NAME.json")
    add_pair_options(parser)
    return parser


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
    print(json.dumps(summary))
    if wrong:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if measured else EXIT_COULD_NOT_RUN
