"""What notebook 40_speed writes down: curves, choices and predictions as rows, and what is missing with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.night.experiment import Experiment
from lab.probes.speed.curves import break_even_length, break_even_share, envelope
from lab.probes.speed.recommend import Acceptance, Choice, Prediction, measured_acceptance
from lab.probes.speed.rows import NO_ROWS, PointSpeed, SpeedRows
from lab.probes.speed.stages import KERNEL, STAGE
from lab.rows.store import read_rows

CURVE, BEST_SPAN, CHOICE, PREDICTION = "speed_curve", "speed_best_depth", "speed_choice", "speed_prediction"


def write_curves(exp: Experiment, speed: SpeedRows | None) -> None:
    """A row a depth and point, and one a span of shares with its best depth."""
    if speed is None:
        exp.missing(CURVE, "every point", NO_ROWS)
        return
    for point in speed.points:
        where: dict[str, Any] = {
            "geometry": speed.geometry,
            "dtype": speed.dtype,
            "context": point.context,
            "batch": point.batch,
        }
        for name, reason in point.missing.items():
            exp.missing(CURVE, name, reason, **where)
        if not point.stages:
            exp.missing(STAGE, point.name, "no step was taken apart", **where)
        for k, stages in point.stages.items():
            if not stages.is_split:
                exp.missing(STAGE, f"{point.name}/spec-{k}, kernels and gaps", stages.split, **where)
        for k, depth in sorted(point.depths.items()):
            over, gain = depth.over_base, depth.speedup
            values = {
                "step_ms_median": depth.step_ms, "step_over_base": over.median, "step_over_base_p10": over.low,
                "step_over_base_p90": over.high, "step_over_base_bound": depth.bound,
                "break_even_tokens": break_even_length(k, over.median) if k else None,
                "break_even_share": break_even_share(k, over.median) if k else None,
                "most_times_plain": (k + 1) / over.median, "measured_tokens": depth.length,
                "dial_tokens": depth.dial_length, "measured_rate": depth.tokens_per_s,
            }  # fmt: skip
            if gain:
                values |= {"speedup": gain.median, "speedup_p10": gain.low, "speedup_p90": gain.high}
            exp.write(CURVE, f"{point.name}/spec-{k}", values, spec_k=k, **where)
        for span in envelope(point.over_base) if 0 in point.depths else ():
            values = {"from_share": span.low, "to_share": span.high, **asdict(span.best)}
            exp.write(BEST_SPAN, f"{point.name}/spec-{span.k}", values, **where)


def write_parts(exp: Experiment, path: Path) -> None:
    """Stages and kernels of the steps as rows of the night, so that the nights after it compare them."""
    for row in read_rows(path):
        if row.kind in (STAGE, KERNEL) and row.status == "measured":
            exp.carry(row)


def acceptances(shares: Sequence[float], path: str, speed: SpeedRows) -> list[Acceptance]:
    """What recommendations are made for: the shares named, the rows named, or else the measured pair's planted one."""
    deepest = max((k for point in speed.points for k in point.depths), default=0)
    found = [Acceptance.of_share(float(share), deepest) for share in shares]
    if path:
        found.append(measured_acceptance(Path(path)))
    planted = sorted({point.share for point in speed.points if point.share is not None})
    return found or [Acceptance.of_share(share, deepest, f"the planted share {share:.2f}") for share in planted]


def write_choices(exp: Experiment, found: Mapping[str, Sequence[Choice]]) -> None:
    """A row an acceptance and point."""
    for name, ones in found.items():
        for one in ones:
            values = {
                "best_k": one.k, "times_plain": one.speedup, "next_k": one.next_k,
                "ahead_of_next": one.advantage, "is_clear": one.is_clear,
                "expected_rates": [one.tokens_per_s[k] for k in sorted(one.tokens_per_s)],
                "depths": sorted(one.tokens_per_s),
            }  # fmt: skip
            exp.write(CHOICE, f"{one.context}x{one.batch}", values, acceptance=name)


def write_predictions(exp: Experiment, found: Sequence[Prediction]) -> None:
    """A row a setting that was measured."""
    for one in found:
        values = {"measured": one.measured, "at_dial": one.at_dial, "at_measured": one.at_measured, "error": one.error}
        exp.write(PREDICTION, f"{one.point}/spec-{one.k}", values)


def write_gates(exp: Experiment, points: Sequence[PointSpeed], k: int, least: float, most: float) -> None:
    """Thresholds at `k` drafts, of every point; 0 sets none.

    Args:
        least: speed-up at the planted acceptance. most: step over plain step.
    """
    if not points and (least > 0 or most > 0):
        exp.gate(f"thresholds of spec-{k}", None, detail="no point with a baseline and drafts was measured")
    for point in points:
        depth = point.depths.get(k)
        why = "" if depth else f"spec-{k} was not measured at {point.name}"
        if least > 0:
            gain = depth.dial_length / depth.over_base.median if depth and depth.dial_length else None
            passed = None if gain is None else gain >= least
            exp.gate(f"speed-up of spec-{k}, {point.name}", passed, value=gain, threshold=least, detail=why)
        if most > 0:
            over = depth.over_base.median if depth else None
            passed = None if over is None else over <= most
            exp.gate(f"step over plain step, spec-{k}, {point.name}", passed, value=over, threshold=most, detail=why)
