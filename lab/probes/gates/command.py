"""`eagle3lab gates micro|full|check`: runs and their gates, a line a gate, a summary last."""

from __future__ import annotations

import json
import time
from pathlib import Path

from lab.ending import tell_summary
from lab.errors import EXIT_PASSED
from lab.options.proofs import GatesCheckOptions, GatesRunOptions
from lab.probes.bench.record import record_of
from lab.probes.gates.config import GatesConfig, RunKind, load_gates, packaged_gates
from lab.probes.gates.history import Key, append, entry_of, green_row, key_of, read, require_green
from lab.probes.gates.judging import EXIT_OF, gate_row, judge_mode, judge_run, listing, outcome
from lab.probes.gates.kernels import build_kernels
from lab.probes.gates.measure import Runs, check_device
from lab.probes.gates.records import rows_of
from lab.rows.environment import Environment, collect
from lab.rows.gates import GateResult
from lab.rows.store import Row, RowWriter, utc_now


def run_micro(options: GatesRunOptions) -> int:
    """Micro runs; 0 if every gate passed, 1 if one failed, 3 if one is missing or nothing could be run."""
    return _runs("micro", options)


def run_full(options: GatesRunOptions) -> int:
    """Full runs, if enough micro runs in a row were green; codes as of micro runs."""
    return _runs("full", options)


def check(options: GatesCheckOptions) -> int:
    """Judges stored records."""
    config = load_gates(options.config or packaged_gates(options.geometry), options.geometry)
    mode = config.find(options.mode)
    results = judge_mode(config, mode, options.as_kind, rows_of(options.baseline, options.spec, mode))
    print(listing(results))
    result = outcome(results)
    values = {gate.name: gate.value for gate in results}
    tell_summary({"command": "gates check", "mode": mode.name, "result": result, "values": values})
    return EXIT_OF[result]


def _runs(kind: RunKind, options: GatesRunOptions) -> int:
    config = load_gates(options.config or packaged_gates(options.geometry), options.geometry)
    if options.build is not None:
        made = build_kernels(config, kind, options.arch, options.build, options.share)
        tell_summary({"command": f"gates {kind}", "built": made})
        return EXIT_PASSED
    environment = collect()
    key = key_of(config, environment)
    check_device(config)
    if kind == "full":
        print(require_green(options.state, key, config.green_in_a_row))
    return _run(config, kind, options, environment, key)


def _run(config: GatesConfig, kind: RunKind, options: GatesRunOptions, environment: Environment, key: Key) -> int:
    """Runs one after the other; one that is not green is the last, as the row has to begin anew after it."""
    runs = Runs(config, environment, tell=_tell)
    print(key)
    records: list[dict[str, object]] = []
    for number in range(1, options.repeat + 1):
        started = time.perf_counter()
        _tell(f"{kind} run {number} of {options.repeat}")
        results = _once(runs, kind, options, key, f"gates-{kind}-{utc_now()}", records)
        result = outcome(results)
        _tell(f"{kind} run {number}: {result}, {time.perf_counter() - started:.0f} s")
        if result != "green":
            break
    row = green_row(read(options.state), key, config.green_in_a_row)
    _tell(str(row))
    not_passed = [gate.name for gate in results if gate.word != "pass"]
    summary = {"command": f"gates {kind}", "result": result, "n_runs": number, "not_passed": not_passed}
    tell_summary({**summary, "n_green_in_a_row": row.n_green, "full_allowed": row.is_long_enough})
    return EXIT_OF[result]


def _once(
    runs: Runs, kind: RunKind, options: GatesRunOptions, key: Key, name: str, records: list[dict[str, object]]
) -> list[GateResult]:
    """One run: measured, judged, written, and its line in the state file whatever becomes of it."""
    machine = runs.environment.fingerprint
    try:
        rows = runs.run(kind, name)
    except Exception as error:  # whatever ends a run, it was not green
        first = (str(error).splitlines() or ["no message"])[0]
        append(options.state, entry_of(key, kind, "broke", [f"{type(error).__name__}: {first}"], machine))
        raise
    results = judge_run(runs.config, kind, rows)
    result = outcome(results)
    _tell(listing(results))
    if options.out is not None:
        _write(options.out, [*rows, *(gate_row(gate, rows[0]) for gate in results)])
    if options.records is not None:
        records += [record_of(row) for row in rows]
        options.records.parent.mkdir(parents=True, exist_ok=True)
        options.records.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    not_passed = [gate.name for gate in results if gate.word != "pass"]
    append(options.state, entry_of(key, kind, result, not_passed, machine))
    return results


def _write(path: Path, rows: list[Row]) -> None:
    with RowWriter(path) as writer:
        for row in rows:
            writer.write(row)


def _tell(line: str) -> None:
    print(line, flush=True)
