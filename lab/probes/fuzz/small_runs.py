"""Small valid runs, as nights leave them, and the rows, records and reports beside them: what the groups damage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from lab.night.summary import conclude
from lab.page.report import render
from lab.probes.fuzz.damage import as_bytes, damaged_bytes, damaged_text, damaged_value
from lab.probes.fuzz.doors import run_command
from lab.probes.fuzz.group import Ended
from lab.rows import environment
from lab.rows.environment import Environment
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter

FINGERPRINT = "0123456789ab"
N_ROUNDS = 11
MACHINE = Environment(
    fingerprint=FINGERPRINT, system="Linux 6", machine="x86_64", cpu="A CPU", n_cores=2, python="3.11.7",
    packages={"torch": "2.11.0", "numba": None}, cuda=None, gpus=[], no_gpu_reason="none", commit="0123456789ab",
    dirty=False, source="ba9876543210", argv=["eagle3lab", "nightly"],
)  # fmt: skip
SVG = '<svg viewBox="0 0 9 9"><g id="a"><text>1</text></g></svg>'
VLLM = {
    "spec_decode_acceptance_length": 2.5, "spec_decode_acceptance_rate": 50.0, "spec_decode_num_drafts": 100,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.2],
}  # fmt: skip
COUNTERS = {
    "vllm:spec_decode_num_drafts": 100, "vllm:spec_decode_num_draft_tokens": 300,
    "vllm:spec_decode_num_accepted_tokens": 150, "vllm:spec_decode_num_accepted_tokens_per_pos": [80, 50, 20],
}  # fmt: skip
SGLANG = {"accept_length": 2.5, "internal_states": [{"avg_spec_accept_length": 2.4}], "meta_info": {"acc_length": 2.0}}


@dataclass(frozen=True)
class SmallRuns:
    """Three nights of one machine in a reports folder, and files that commands read.

    Attributes:
        reports: the folder. before, after: two of its runs. ab: rows of two sides in turns. old: rows of older forms.
        records: (baseline, speculative) for the gates of `gates`.
    """

    reports: Path
    before: Path
    after: Path
    ab: Path
    old: Path
    records: tuple[Path, Path]
    gates: Path


def prepare_runs(folder: Path) -> SmallRuns:
    """All of them; drawn once, so that whatever is imported late has been."""
    reports = folder / "reports"
    nights = [_night(reports / f"night-{i}", f"2026-01-0{i + 1}T00:00:00+00:00", 10.0 + i) for i in range(3)]
    records = (folder / "baseline.json", folder / "spec.json")
    for path, k in zip(records, (0, 3), strict=True):
        path.write_text(json.dumps([_record(k)]))
    runs = SmallRuns(reports, nights[0], nights[2], folder / "ab.jsonl", folder / "old.jsonl", records, _gates(folder))
    _write_ab(runs.ab)
    runs.old.write_text("".join(json.dumps(line) + "\n" for line in OLD))
    warm_up(runs)
    return runs


def warm_up(runs: SmallRuns) -> None:
    """Each door once, so that its imports and templates are ready in every child."""
    render(runs.after)
    for words in (
        ["compare", str(runs.before), str(runs.after)], ["ab", "--judge", str(runs.ab)],
        ["rows", "upgrade", str(runs.old)], ["notebooks"], check_words(*runs.records, runs.gates),
    ):  # fmt: skip
        ended = judged(words)
        assert ended is None or "unforeseen" not in ended.told, ended.told


def check_words(baseline: Path, spec: Path, gates: Path) -> list[str]:
    """`gates check` over two files of records."""
    return ["gates", "check", str(baseline), str(spec), "--mode", "small", "--config", str(gates)]


def judged(words: Sequence[str], verdicts: tuple[int, ...] = (1, 3, 4)) -> Ended | None:
    """How a command ended; None where it came to a verdict of its own, which is told on stdout.

    No program is asked what machine this is: that is not what is damaged.
    """
    with mock.patch.object(environment, "collect", return_value=MACHINE):
        with mock.patch("lab.acceptance.reported.command.collect", return_value=MACHINE):
            ended = run_command(words)
    return None if ended.code in verdicts and not ended.told.startswith("eagle3lab: ") else ended


def damage_one_file(
    folder: Path, random: Random, names: Sequence[str] = ("*.json", "*.jsonl", "*.ipynb", "*.svg")
) -> None:
    """One file under a folder, in its structure or its bytes."""
    found = sorted(path for name in names for path in folder.rglob(name) if path.is_file())
    path = random.choice(found)
    path.write_bytes(damaged_file(path, random))


def damaged_file(path: Path, random: Random) -> bytes:
    """The bytes of a JSON file, of JSON lines, or of any other, damaged."""
    content = path.read_bytes()
    if path.suffix in (".json", ".ipynb") and _is_json(content):
        return damaged_text(json.loads(content), random)
    if path.suffix == ".jsonl" and random.random() < 0.8:
        lines = content.splitlines(keepends=True)
        for _ in range(random.choice((1, 1, 3))):
            at = random.randrange(len(lines))
            lines[at] = as_bytes(damaged_value(json.loads(lines[at]), random)) + b"\n" if _is_json(lines[at]) else b"\n"
        return b"".join(lines)
    return damaged_bytes(content, random)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


# ---- The valid inputs.


def _night(run: Path, started: str, rate: float) -> Path:
    jobs = ("30_decode", "31_acceptance")
    for job in jobs:
        _job(run, job, rate)
    plan = {
        "run": run.name, "started_at": started, "argv": [], "config_hash": "c", "fingerprint": FINGERPRINT,
        "strict_undecided": False, "gate_required": True, "pair": {"pair": "shipped"},
        "gates": [{"name": "g", "kind": "decode", "row": "spec-3", "value": "speedup", "at_least": 1.0}],
        "jobs": [{"id": job, "notebook": job, "hash": "h", "reads_run": False} for job in jobs],
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(plan))
    (run / "environment.json").write_text(MACHINE.model_dump_json())
    with RowWriter(run / "rows.jsonl") as writer:
        writer.write(RowMaker(run.name, "night", FINGERPRINT, "nightly").machine(MACHINE))
    (run / "summary.json").write_text(json.dumps(conclude(run, now="2026-02-01T00:00:00+00:00")))
    return run


def _job(run: Path, job: str, rate: float) -> None:
    folder = run / "jobs" / job
    maker = RowMaker(run.name, job, FINGERPRINT)
    values = {
        "decode_tokens_per_s": rate, "decode_tokens_per_s_samples": [rate, rate + 1, rate - 1], "speedup": 2.0,
        "speedup_p10": 1.9, "speedup_p90": 2.1, "throttled": "",
    }  # fmt: skip
    with RowWriter(folder / "rows.jsonl") as writer:
        writer.write(maker.measured("decode", "spec-3", values, {"dtype": "float32"}, timer="t/1", repeats=3))
        counted = {"acceptance_length": 2.5, "acceptance_by_position": [0.8, 0.5], "worst": [[1.5]]}
        writer.write(maker.measured("acceptance", "spec-3", counted))
        writer.write(maker.measured("gate", "holds", {"passed": True, "value": 1, "threshold": 1, "detail": ""}))
        writer.write(maker.measured("sentence", "sentence 1", {"text": "It is so."}))
        writer.write(maker.measured("bench", "b", {"share_of_floor": 0.5}, {"pair": "planted", "geometry": "nano"}))
        writer.write(maker.missing("decode", "spec-5", "no memory"))
    outcome = {"status": "finished", "seconds": 1.5, "passed": True, "cell": None, "error": None, "traceback": None}
    record = {"id": job, "notebook": job, "hash": "h", "parameters": {"ks": [1, 3], "dtype": "x"}, "outcome": outcome}
    (folder / "job.json").write_text(json.dumps(record))
    (folder / "figures").mkdir()
    (folder / "figures" / "f.svg").write_text(SVG)
    words = {
        "name": "f",
        "alt": "a",
        "caption": "c",
        "order": 1,
        "columns": ["x", "y"],
        "rows": [["a", 1.5], ["b", None]],
    }
    (folder / "figures" / "f.json").write_text(json.dumps(words))
    (folder / "executed.ipynb").write_text(json.dumps(EXECUTED))


_OUTPUTS = [
    {"output_type": "stream", "name": "stdout", "text": ["a\n", "b"]},
    {"output_type": "display_data", "metadata": {}, "data": {"text/html": "<b>b</b>", "text/plain": "b"}},
    {"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": [SVG]}},
    {"output_type": "error", "ename": "E", "evalue": "e", "traceback": ["\x1b[31mE\x1b[0m: e"]},
]  # fmt: skip
EXECUTED: dict[str, Any] = {
    "nbformat": 4, "nbformat_minor": 5, "metadata": {},
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# A title\n", "\n", "* one **b** [c](d)\n"]},
        {"cell_type": "code", "id": "b", "metadata": {"tags": ["parameters"]}, "execution_count": 1,
         "outputs": _OUTPUTS,
         "source": 'run_dir: str = ""\njob: str = ""\nn: int = 3  # steps [1..9]'},
    ],
}  # fmt: skip
_ABOUT = {"gpu": "NVIDIA H200", "versions": {"torch": "2.11.0", "driver": "580"}, "commit": "59d4", "timer": "t"}
_CLOCKS = {"clocks.sm": "1980 MHz", "power.draw": "143.93 W", "temperature.gpu": "[N/A]"}
OLD: tuple[dict[str, Any], ...] = (
    {"kind": "ceiling", "op": "read", "gb_per_s": 4287.5, "clocks": _CLOCKS, **_ABOUT},
    {"kind": "kernel", "op": "attention", "shape": {"dtype": "bf16", "dim": 128}, "us": 33.75, "us_p10": 33.5,
     "peers": {"sdpa": 47.25}, "clocks": {"unknown": "no"}, "status": "incomplete", **_ABOUT},
    {"time": "2026-11-22T01:24:41.147+00:00", "mode": "micro", "result": "red", "code": "6e", "config": "57",
     "gpu": "NVIDIA H200", "geometry": "nano", "why": ["speed-up"]},
    {"schema_version": 1, "run": "r", "job": "j", "notebook": "n", "kind": "kernel", "name": "gemm",
     "values": {"time_us": 1.5, "worst": "NaN"}, "parameters": {"shape": "m=1"}, "status": "measured", "reason": None,
     "timer": "cuda graph replay", "warmup": None, "repeats": None, "environment": "2f", "recorded_at": "2026"},
)  # fmt: skip


def _write_ab(path: Path) -> None:
    maker = RowMaker("ab", "bench", FINGERPRINT)
    with RowWriter(path) as writer:
        for number in range(1, N_ROUNDS + 1):
            for side in ("A", "B"):
                at = {"side": side, "round": number, "resolution": 0.01}
                writer.write(maker.measured("bench", "p", {"step_ms_median": 1.0 + number / 100}, at, timer="t/1"))
                writer.write(maker.missing("bench", "q", "no memory", at))


def _record(k: int) -> dict[str, Any]:
    return {
        "name": f"Speculative_Single_Context96_{k}tokens" if k else "Baseline_Single_Context96",
        "status": "measured", "parameters": {"geometry": "nano", "spec_k": k, "context": 96, "batch": 1, "tokens": 32,
                                             "dtype": "float32"},
        "scenario": {"micro_run": True}, "throughput_tokens_per_sec": {"mean": 10.0 + k, "values": [10.0, 10.0 + k]},
        "step_ms_median": 2.0, "step_ms_samples": [2.0, 2.0 + k], "acceptance_length": 3.0, "share_of_floor": 0.5,
        "eagle_speculation": {"mean_acceptance_length": 3.0}, "n_steps": 8, "n_divergent": 0, "n_wrong_requests": 0,
        "invariants": {"faults": 0, "single_token_steps": 0}, "ceiling_gb_per_s": 10.0, "floor_ms": 1.0,
        "stage_ms": {"target.mlp": 1.0}, "speedup_at_dial": 1.0, "step_over_base": 1.0, "over_plain-torch": 0.5,
    }  # fmt: skip


GATES_TEXT = """
geometry = "nano"
device = "cpu"
dtype = "float32"
invariants = ["single_token_steps", "faults"]

[[mode]]
name = "small"
context = 96
batch = 1
spec = 3
acceptance_length = 3.0
peers = ["plain-torch"]
micro = { steps = 6, rounds = 2, warmup = 0 }
full = { steps = 8, rounds = 1, warmup = 0 }
gate = [
    { name = "speed-up", of = "spec", value = "speedup", at_least = 0.1 },
    { name = "share", of = "baseline", value = "share_of_floor", at_least = 0.1, at_most = 1.0 },
    { name = "step", of = "baseline", value = "over_plain-torch", at_most = 10.0 },
]
"""


def _gates(folder: Path) -> Path:
    path = folder / "gates.toml"
    path.write_text(GATES_TEXT)
    return path
