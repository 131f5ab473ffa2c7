"""What share of its byte floor a step reaches at each batch, and the least that a night asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from lab.errors import ExperimentError
from lab.figures import Drawing, look_of
from lab.night.experiment import Experiment
from lab.probes.speed.rows import PointSpeed

_LIMIT = re.compile(r"(\d+x\d+)/(\d+)=(0?\.\d+|1(?:\.0)?)")
Limits = dict[tuple[str, int], float]  # by point, as `--at` writes it, and drafts a step


def read_limits(texts: Sequence[str]) -> Limits:
    """Limits of texts such as "1024x16/3=0.70": 16 requests of 1024 tokens, 3 drafts, at least 0.70 of the floor.

    Raises:
        ExperimentError: a text of another form, or two for one step.
    """
    limits: Limits = {}
    for text in texts:
        found = _LIMIT.fullmatch(text.strip())
        if found is None or (found[1], int(found[2])) in limits:
            raise ExperimentError(
                f"a least share {text!r}", "CONTEXTxBATCH/DRAFTS=SHARE, each step once, e.g. 1024x16/0=0.82",
                "correct min_shares",
            )  # fmt: skip
        limits[found[1], int(found[2])] = float(found[3])
    return limits


def batches(points: Sequence[PointSpeed]) -> list[PointSpeed]:
    """Points of the context that was measured at most batches, smallest batch first; none if no context has two."""
    by_context: dict[int, list[PointSpeed]] = {}
    for point in points:
        if any(depth.share is not None for depth in point.depths.values()):
            by_context.setdefault(point.context, []).append(point)
    most = max(by_context.values(), key=len, default=[])
    return sorted(most, key=lambda point: point.batch) if len(most) > 1 else []


def table_of(points: Sequence[PointSpeed]) -> pd.DataFrame:
    """One line a batch and depth: the step, its share of the floor at the known ceiling and at the run's own."""
    return pd.DataFrame(
        {
            "batch": point.batch, "drafts": k, "step_ms": depth.step_ms, "share_of_floor": depth.share,
            "share_of_run_ceiling": depth.run_share,
        }
        for point in points
        for k, depth in sorted(point.depths.items())
        if depth.share is not None
    )  # fmt: skip


def by_batch(points: Sequence[PointSpeed], k: int, limits: Limits, source: str) -> Drawing:
    """Shares over the batch, plain and with `k` drafts, with their limits.

    Args:
        points: of `batches`, at least two. source: where the rows come from, for the caption.
    """
    from matplotlib import pyplot as plt

    table = table_of(points)
    fig, axes = plt.subplots()
    for drafts, label, meaning in ((0, "plain", "plain"), (k, f"{k} drafts", "ours")):
        part, style = table[table["drafts"] == drafts], look_of(meaning)
        axes.plot(part["batch"], part["share_of_floor"], label=label, **style)
        for point in points:
            if limit := limits.get((point.name, drafts)):
                axes.plot([point.batch], [limit], color=style["color"], marker="_", markersize=14, linestyle="")
    axes.set(xscale="log", xlabel="requests together (bars: least share asked for)", ylabel="share of the byte floor")
    axes.set_ylim(0, 1.05)
    axes.set_xticks([point.batch for point in points], [str(point.batch) for point in points])
    axes.minorticks_off()
    axes.set_title(f"What is reached of the bytes' time, {points[0].context} tokens")
    axes.legend()
    least = table.loc[table["share_of_floor"].idxmin()]
    who = f"{least['batch']:.0f} requests and {least['drafts']:.0f} drafts a step"
    words = f"Least: {least['share_of_floor']:.0%} with {who}."
    return Drawing(fig, table, f"Lines of the share of the byte floor over the batch. {words}", f"{words} {source}")


def write_gates(exp: Experiment, points: Sequence[PointSpeed], limits: Limits) -> None:
    """Each limit against the step it names; a step that was not measured passes nothing."""
    known = {point.name: point for point in points}
    for (where, k), least in limits.items():
        point = known.get(where)
        depth = point.depths.get(k) if point else None
        share = depth.share if depth else None
        why = "" if share is not None else f"{where} with {k} drafts was not measured"
        passed = None if share is None else share >= least
        exp.gate(f"share of the floor, {where}/spec-{k}", passed, value=share, threshold=least, detail=why)
