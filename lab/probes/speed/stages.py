"""Rows of kind "stage": what each stage of a step costs, and how much of it bytes, kernels and gaps ask for.

    own time = floor + kernels above it + gaps

The split needs a profile of the captured step. Where there is none (plain torch on a CPU) a stage has its own time and
its floor, and the rest is missing with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from lab.probes.bench.floors import Floor
from lab.probes.proofs.steps import BETWEEN_STEPS, StepProfile

STAGE = "stage"
KERNEL = "kernel"
SUM_TOLERANCE = 0.01  # by which own times may miss the step, and a profiled step the timed one
NO_SPLIT = "spans of plain torch are timed as a whole: no profile says when a kernel ran"


def profiled_values(profile: StepProfile, floor: Floor, gb_per_s: float, timed_us: float) -> dict[str, dict[str, Any]]:
    """Row values by stage, from a profile.

    Args:
        floor: of the profiled steps. timed_us: a step's time with no profiler about.
    """
    step_us = median(profile.step_us)
    over_timed = step_us / timed_us
    common = {
        "step_us_median": step_us,
        "sum_over_step": profile.sum_over_step,
        "sums_to_step": abs(profile.sum_over_step - 1) <= SUM_TOLERANCE,
        "profiled_over_timed": over_timed,
        "profile_is_true": abs(over_timed - 1) <= SUM_TOLERANCE,
        "split": "profile",
    }
    found = {}
    for stage in profile.stages:
        bytes_us = floor.stage_us(stage.stage, gb_per_s)
        above = [own - gap - bytes_us for own, gap in zip(stage.own_us, stage.gap_us, strict=True)]
        if stage.stage == BETWEEN_STEPS:
            above = [0.0] * len(above)
        found[stage.stage] = {
            "floor_us": bytes_us,
            **_spread("own_us", stage.own_us),
            **_spread("kernel_us", above),
            **_spread("gap_us", stage.gap_us),
            "n_kernels": stage.n_kernels,
            **common,
        }
    return found


def spanned_values(
    stage_ms: Mapping[str, float], floor: Floor, gb_per_s: float, timed_us: float
) -> dict[str, dict[str, Any]]:
    """Row values by stage, from spans timed one by one; the parts of an own time are missing, with the reason."""
    step_us = 1e3 * sum(stage_ms.values())
    return {
        stage: {
            "floor_us": floor.stage_us(stage, gb_per_s),
            "own_us": 1e3 * own_ms,
            "kernel_us": None,
            "gap_us": None,
            "n_kernels": None,
            "step_us_median": step_us,
            "sum_over_step": None,  # a span's step is the sum of its spans: nothing to hold it against
            "sums_to_step": None,
            "profiled_over_timed": step_us / timed_us,
            "profile_is_true": abs(step_us / timed_us - 1) <= SUM_TOLERANCE,
            "split": f"missing: {NO_SPLIT}",
        }
        for stage, own_ms in stage_ms.items()
    }


def kernel_values(profile: StepProfile) -> dict[str, dict[str, Any]]:
    """Row values by stage and kernel, the launches of one kernel in one stage together."""
    return {
        one.stage: {**_spread("own_us", one.own_us), **_spread("gap_us", one.gap_us), "n_kernels": one.n_kernels}
        for one in profile.kernels
    }


def _spread(name: str, samples: tuple[float, ...] | list[float]) -> dict[str, Any]:
    return {name: median(samples), f"{name}_samples": list(samples)}
