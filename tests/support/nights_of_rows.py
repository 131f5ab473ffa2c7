"""Nights made of a few rows: as findings read them, and as a page shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.night.jobs import JOB_FILE
from lab.night.summary import conclude
from lab.page.findings.finding import Night
from lab.page.report import render
from lab.rows import environment
from lab.rows.runs import ENVIRONMENT_FILE, RUN_FILE, SUMMARY_FILE
from lab.rows.store import Row, RowWriter

SHARED: dict[str, Any] = {"run": "r", "notebook": "n", "environment": "e", "recorded_at": "2026-11-21T10:00:00+00:00"}
GATE: dict[str, Any] = {"passed": True, "value": 0, "threshold": 0, "detail": ""}


def row(job: str, kind: str, name: str, values: dict[str, Any] | None = None, **more: Any) -> Row:
    """A row of a job; measured unless `more` says otherwise."""
    return Row(**SHARED, job=job, kind=kind, name=name, values=values or {}, **more)


def decoded(speedup: float, p10: float, p90: float, k: int = 3) -> Row:
    """Of a draft of `k` tokens that makes its target `speedup` times as fast."""
    values = {"decode_tokens_per_s": 50.0, "speedup": speedup, "speedup_p10": p10, "speedup_p90": p90}
    return row("30_decode", "decode", f"spec-{k}", values)


def page_of(folder: Path, rows: list[Row], parameters: dict[str, dict[str, Any]] | None = None) -> tuple[str, str]:
    """Sentence and page text of a finished night with these rows; `parameters` by job."""
    run, record = folder / "reports" / "r", environment.collect()
    ids = list(dict.fromkeys(one.job for one in rows))
    for job in ids:
        with RowWriter(run / "jobs" / job / "rows.jsonl") as writer:
            for one in rows:
                if one.job == job:
                    writer.write(one)
        outcome = {"status": "finished", "seconds": 1.0, "passed": True, "error": None, "cell": None, "traceback": None}
        content = {"id": job, "hash": "h", "parameters": (parameters or {}).get(job, {}), "outcome": outcome}
        (run / "jobs" / job / JOB_FILE).write_text(json.dumps(content), encoding="utf-8")
    plan = {
        "run": "r", "started_at": SHARED["recorded_at"], "argv": [], "config_hash": "c", "pair": {"pair": "shipped"},
        "fingerprint": record.fingerprint, "strict_undecided": False, "gate_required": True, "gates": [],
        "jobs": [{"id": job, "notebook": job, "hash": "h", "reads_run": False} for job in ids],
    }  # fmt: skip
    (run / RUN_FILE).write_text(json.dumps(plan), encoding="utf-8")
    (run / ENVIRONMENT_FILE).write_text(record.model_dump_json(), encoding="utf-8")
    summary = conclude(run, now="2026-11-21T10:05:00+00:00")
    (run / SUMMARY_FILE).write_text(json.dumps(summary), encoding="utf-8")
    return summary["sentence"], render(run).read_text(encoding="utf-8")


def stage(name: str, kind: str, ratio: float, first_bad: float | None = None) -> Row:
    """Of a stage whose largest error is `ratio` times what is allowed."""
    values: dict[str, Any] = {
        "kind": kind, "stage": name, "status": "fail" if ratio > 1 else "pass", "cells": 10, "max_abs": ratio / 100,
        "tolerance": 0.01, "ratio": ratio, "bad_cells": 4 if ratio > 1 else 0, "first_bad": first_bad,
    }  # fmt: skip
    return row("10_parity_stages", "parity", f"{kind}/{name}", values, parameters={"dtype": "float32"})


def night(rows: list[Row], gates: list[dict[str, Any]] | None = None, **more: Any) -> Night:
    """A failed night as findings read it: these rows, and its summary with `more` in it."""
    since = {"previous": None, "changes": []}
    jobs = [{"id": job, "notebook": job, "status": "finished"} for job in dict.fromkeys(one.job for one in rows)]
    return Night({"word": "failed", "gates": gates or [], "jobs": jobs, "since": since} | more, rows)
