"""Run folders as nights leave them, without the nights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.rows.environment import Environment
from lab.rows.runs import ENVIRONMENT_FILE
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
