"""Whether a GPU held its clocks back, read once beside a measurement; nothing here changes a clock.

A row that was measured while they were held back says so, and no verdict is taken from it (`lab.rows.history`).
"""

from __future__ import annotations

import subprocess

from lab.rows.gpus import ask, current_gpu

# What slows a GPU below what it was asked for. The power cap is not among them: a decode step lives below it, and a
# prefill that meets it is not what is timed.
REASONS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
VALUE = "throttled"


def held_back() -> str | None:
    """Why the clocks of the GPU in use are held back now; empty if they are not, None where nothing can tell."""
    try:
        lines = ask([f"clocks_event_reasons.{reason}" for reason in REASONS], current_gpu())
    except (OSError, subprocess.SubprocessError):
        return None
    return held_back_in(lines[0]) if len(lines) == 1 else None


def held_back_in(line: str) -> str | None:
    """The reasons that a line of answers, one a reason, names; None if it is no such line."""
    answers = [answer.strip() for answer in line.strip().split(",")]
    if len(answers) != len(REASONS):
        return None
    active = [reason for reason, answer in zip(REASONS, answers, strict=True) if answer == "Active"]
    return ", ".join(reason.replace("_", " ") for reason in active)
