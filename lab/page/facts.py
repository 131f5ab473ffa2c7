"""What a run's page says beside the verdict: pairs measured, what was not, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.night.jobs import PAIR_PARAMETERS, recorded
from lab.rows.store import JOBS_FOLDER, Row


def pairs_measured(run_dir: Path, plan: dict[str, Any], rows: list[Row]) -> list[str]:
    """The pairs that jobs of the run worked on, by what was recorded: the night's own, and planted ones by geometry."""
    records = [recorded(run_dir / JOBS_FOLDER / job["id"])[0] for job in plan["jobs"]]
    took_the_pair = any(set(PAIR_PARAMETERS) & set(record["parameters"]) for record in records if record)
    own = ", ".join(text if key == "pair" else f"{key} {text}" for key, text in plan.get("pair", {}).items())
    planted = [str(row.parameters.get("geometry")) for row in rows if row.parameters.get("pair") == "planted"]
    return [*([own] if took_the_pair and own else []), *(f"planted {geometry}" for geometry in dict.fromkeys(planted))]


def counts(rows: list[Row]) -> str:
    """How many rows there are, how many are missing, and how many the parameters left out."""
    n_missing, n_not_asked = (sum(row.status == word for row in rows) for word in ("missing", "not asked"))
    left_out = f", {n_not_asked} not asked for" if n_not_asked else ""
    return f"{len(rows)} rows, {n_missing} missing{left_out}"
