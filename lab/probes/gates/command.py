"""`eagle3lab gates micro|full|check`: runs and their gates, a line a gate, one JSON line last."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3core.kernels import ARCHES
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_PASSED
from lab.pairs.planted import GEOMETRIES
from lab.probes.bench.record import record_of
from lab.probes.gates.config import GatesConfig, RunKind, load_gates, packaged_gates
from lab.probes.gates.history import STATE_FILE, Key, append, entry_of, green_row, key_of, read, require_green
from lab.probes.gates.judging import EXIT_OF, gate_row, judge_mode, judge_run, listing, outcome
from lab.probes.gates.kernels import build_kernels
from lab.probes.gates.measure import Runs, check_device
from lab.probes.gates.records import rows_of
from lab.probes.proofs.command import read_share
from lab.rows.environment import Environment, collect
from lab.rows.gates import GateResult
from lab.rows.store import Row, RowWriter, utc_now


def main(arguments: Sequence[str]) -> int:
    """Runs or checks; 0 if every gate passed, 1 if one failed, 3 if one is missing or nothing could be run."""
    given = _parser().parse_args(list(arguments))
    config = load_gates(given.config or packaged_gates(), given.geometry)
    if given.command == "check":
        return _check(config, given)
    kind: RunKind = given.command
    if given.build is not None:
        made = build_kernels(config, kind, given.arch, given.build, read_share(given.share))
        print(json.dumps({"command": f"gates {kind}", "built": made}))
        return EXIT_PASSED
    environment = collect()
    key = key_of(config, environment)
    check_device(config)
    if kind == "full":
        print(require_green(given.state, key, config.green_in_a_row))
    return _run(config, kind, given, environment, key)


def _run(config: GatesConfig, kind: RunKind, given: argparse.Namespace, environment: Environment, key: Key) -> int:
    """Runs one after the other; one that is not green is the last, as the row has to begin anew after it."""
    runs = Runs(config, environment, tell=_tell)
    print(key)
    records: list[dict[str, object]] = []
    for number in range(1, given.repeat + 1):
        started = time.perf_counter()
        _tell(f"{kind} run {number} of {given.repeat}")
        results = _once(runs, kind, given, key, f"gates-{kind}-{utc_now()}", records)
        result = outcome(results)
        _tell(f"{kind} run {number}: {result}, {time.perf_counter() - started:.0f} s")
        if result != "green":
            break
    row = green_row(read(given.state), key, config.green_in_a_row)
    _tell(str(row))
    not_passed = [gate.name for gate in results if gate.word != "pass"]
    summary = {"command": f"gates {kind}", "result": result, "n_runs": number, "not_passed": not_passed}
    print(json.dumps({**summary, "n_green_in_a_row": row.n_green, "full_allowed": row.is_long_enough}))
    return EXIT_OF[result]


def _once(
    runs: Runs, kind: RunKind, given: argparse.Namespace, key: Key, name: str, records: list[dict[str, object]]
) -> list[GateResult]:
    """One run: measured, judged, written, and its line in the state file whatever becomes of it."""
    try:
        rows = runs.run(kind, name)
    except Exception as error:  # whatever ends a run, it was not green
        first = (str(error).splitlines() or ["no message"])[0]
        append(given.state, entry_of(key, kind, "broke", [f"{type(error).__name__}: {first}"]))
        raise
    results = judge_run(runs.config, kind, rows)
    result = outcome(results)
    _tell(listing(results))
    if given.out is not None:
        _write(given.out, [*rows, *(gate_row(gate, rows[0]) for gate in results)])
    if given.records is not None:
        records += [record_of(row) for row in rows]
        given.records.parent.mkdir(parents=True, exist_ok=True)
        given.records.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    append(given.state, entry_of(key, kind, result, [gate.name for gate in results if gate.word != "pass"]))
    return results


def _check(config: GatesConfig, given: argparse.Namespace) -> int:
    mode = config.find(given.mode)
    results = judge_mode(config, mode, given.as_kind, rows_of(given.baseline, given.spec, mode))
    print(listing(results))
    result = outcome(results)
    values = {gate.name: gate.value for gate in results}
    print(json.dumps({"command": "gates check", "mode": mode.name, "result": result, "values": values}))
    return EXIT_OF[result]


def _write(path: Path, rows: list[Row]) -> None:
    with RowWriter(path) as writer:
        for row in rows:
            writer.write(row)


def _tell(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="eagle3lab gates",
        description="Performance gates: micro runs, full ones after three green micro runs in a row, stored records.",
        epilog=f"Exit codes: 0 every gate passed, 1 one failed, {EXIT_COULD_NOT_RUN} one is missing or nothing ran.",
    )
    commands = top.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for kind, text in (("micro", "short runs, which count"), ("full", "long runs, after enough green micro runs")):
        _run_options(commands.add_parser(kind, help=text, description=text))
    text = "judge stored records; those that were no micro run are refused"
    check = commands.add_parser("check", help=text, description=text)
    check.add_argument("baseline", type=Path, metavar="BASELINE.json")
    check.add_argument("spec", type=Path, metavar="SPEC.json")
    check.add_argument("--mode", required=True, help="a mode of the configuration, such as single32k")
    check.add_argument("--as", dest="as_kind", choices=("micro", "full"), default="micro", help="default micro")
    _config_options(check)
    return top


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="default: the packaged gates.toml")
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), help="default: the configuration's")


def _run_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("--out", type=Path, help="append rows and gates to this file, NAME.jsonl")
    parser.add_argument("--records", type=Path, help="write nested records (R-125, R-126) to this file, NAME.json")
    parser.add_argument("--state", type=Path, default=STATE_FILE, help=f"what was green (default {STATE_FILE})")
    parser.add_argument("--repeat", type=int, choices=range(1, 10), default=1, metavar="N", help="runs (default 1)")
    parser.add_argument("--build", type=Path, metavar="DIR", help="only compile the kernels that a run needs")
    parser.add_argument("--arch", choices=ARCHES, default="sm_90a", help="target of --build (default sm_90a)")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th kernel of --build, from I")
