"""Run folders as nights leave them, without the nights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.night.summary import conclude
from lab.page.report import render
from lab.rows.environment import Environment
from lab.rows.gpus import Gpu
from lab.rows.runs import ENVIRONMENT_FILE, SUMMARY_FILE
from lab.rows.store import Row, RowWriter


def plan(folder: Path, fingerprint: str = "m", **changes: Any) -> Path:
    """A run folder with one finished job and its machine, as a night leaves it, and no row yet."""
    content = {
        "started_at": "2026-01-02T00:00:00+00:00",
        "config_hash": "c",
        "fingerprint": fingerprint,
        "strict_undecided": False,
        "gate_required": True,
        "gates": [],
        "jobs": [{"id": "j", "notebook": "n"}],
    }
    outcome = {"status": "finished", "seconds": 1.0, "passed": True, "error": None, "cell": None}
    (folder / "jobs" / "j").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(content | changes))
    (folder / "jobs" / "j" / "job.json").write_text(json.dumps({"hash": "h", "outcome": outcome, "parameters": {}}))
    machine = dict.fromkeys(Environment.model_fields) | {
        "fingerprint": fingerprint, "packages": {}, "gpus": [], "argv": [],
    }  # fmt: skip
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(machine))
    return folder


def add_rows(folder: Path, *facts: dict[str, Any]) -> None:
    """Adds rows to that job's file."""
    base = {"run": folder.name, "job": "j", "notebook": "n", "environment": "m", "recorded_at": "2026"}
    with (folder / "jobs" / "j" / "rows.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"schema_version": 1, **base, **fact}) + "\n" for fact in facts)


def store(
    reports: Path, name: str, *, fingerprint: str = "m", started: str = "2026-01-01", value: float = 10.0,
    config: str = "c",
) -> Path:  # fmt: skip
    """A finished run with one row, as `compare` reads it."""
    run = reports / name
    summary = {
        "started_at": started,
        "fingerprint": fingerprint,
        "config_hash": config,
        "jobs": [{"id": "j", "status": "finished", "seconds": value}],
    }
    machine = dict.fromkeys(Environment.model_fields) | {
        "cpu": "Fast", "n_cores": 2, "gpus": [], "fingerprint": fingerprint, "packages": {"torch": name}, "argv": [],
    }  # fmt: skip
    with RowWriter(run / "rows.jsonl") as writer:
        writer.write(
            Row(
                run=name, job="j", notebook="30_decode", kind="decode", name="spec-3", environment="m",
                recorded_at="2026-01-01T00:00:00+00:00", values={"tokens_per_s": value},
            )
        )  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "environment.json").write_text(json.dumps(machine))
    return run


DEPTHS = (0, 1, 2, 3, 5, 7)
MACHINES = {"a1b2c3d4e5f6": "NVIDIA H200", "0f9e8d7c6b5a": "NVIDIA GeForce RTX 4090"}


def nights(reports: Path, n: int) -> list[Path]:
    """`n` finished nights of two machines and two planted pairs, oldest first; drafts help less from the 20th on, and
    every seventh has a failed gate. Rounds are made up from the night's number: nothing is drawn by chance.
    """
    return [_night(reports, number) for number in range(n)]


def _night(reports: Path, number: int) -> Path:
    fingerprint, card = list(MACHINES.items())[number % 5 == 4]
    at = f"2026-{9 + number // 28:02d}-{1 + number % 28:02d}T02:00:00+00:00"
    run = plan(reports / f"night-{number:02d}", fingerprint, started_at=at)
    _write_machine(run / ENVIRONMENT_FILE, card, number)
    geometry = "gpt-oss-20b" if number % 3 == 2 else "llama-3.1-8b"
    gain = (1.0 if number < 20 else 0.8) * (1 + 0.004 * (number % 4 - 1.5))
    plain = 270.0 if card.endswith("H200") else 90.0
    for k in DEPTHS:
        rate = plain * (1 + 0.9 * k * 0.8**k * gain)
        speedup = (
            {"speedup": rate / plain, "speedup_p10": 0.99 * rate / plain, "speedup_p90": 1.01 * rate / plain}
            if k
            else {}
        )
        point = {"geometry": geometry, "pair": "planted", "context": 1024, "batch": 1, "spec_k": k}
        length = {"acceptance_length": 1 + k * 0.85**k * gain}
        rates = {"decode_tokens_per_s": rate, "share_of_floor": 0.72, **(length if k else {}), **speedup}
        add_rows(
            run,
            {"kind": "decode", "name": f"spec-{k}" if k else "baseline", "values": {"decode_tokens_per_s": rate}},
            {"kind": "bench", "name": f"1024x1/spec-{k}", "parameters": {"who": "engine", **point}, "values": rates},
            *([{"kind": "acceptance", "name": f"spec-{k}", "values": length}] if k else []),
        )
    gate = {"passed": number % 7 != 6, "value": number % 7 // 6, "threshold": 0, "detail": ""}
    add_rows(run, {"kind": "gate", "name": "greedy equality", "values": gate})
    summary = conclude(run, now=at)
    (run / SUMMARY_FILE).write_text(json.dumps(summary), encoding="utf-8")
    render(run)
    return run


def _write_machine(path: Path, card: str, number: int) -> None:
    gpu = dict.fromkeys(Gpu.model_fields) | {"name": card, "memory_mib": 143771, "driver": "580.1"}
    told = {
        "cpu": "Fast CPU @ 2 GHz", "n_cores": 16, "system": "Linux 6.8", "machine": "x86_64", "python": "3.11.9",
        "gpus": [gpu], "commit": f"{number:012x}", "source": f"{number // 5:012x}",
        "packages": {"torch": "2.9.0" if number < 15 else "2.9.1", "numba": "0.62.1"},
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | told), encoding="utf-8")
