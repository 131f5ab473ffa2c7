"""Run folders as nights leave them, without the nights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.rows.environment import Environment
from lab.rows.runs import ENVIRONMENT_FILE


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
