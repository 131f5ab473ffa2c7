"""Curves of two runs in one drawing: tokens a second, and acceptance length, by depth at every point of both."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lab.figures import Drawing, Kept, look_of, use_style
from lab.page.summary_figures import depth_of
from lab.rows.store import Row

# Of a row: the curve that it belongs to, its depth (0: plain decoding), its value; None where it is on no such curve.
Point = tuple[str, int, float]
RATES = {"decode": "decode_tokens_per_s", "speed_curve": "measured_rate", "bench": "decode_tokens_per_s"}
LENGTHS = {"acceptance": "acceptance_length", "bench": "acceptance_length"}
MOST_PANELS, PANELS_ABREAST = 12, 3


def overlaid(before: tuple[str, list[Row]], after: tuple[str, list[Row]]) -> list[Kept]:
    """Both runs' curves, a panel each; none where the runs share no curve of two depths.

    Args:
        before, after: the run's name, and its rows.
    """
    use_style()
    kept = []
    for order, (name, values, what) in enumerate(
        (("speed", RATES, "tokens a second, decoding only"), ("acceptance", LENGTHS, "tokens a verify step"))
    ):
        sides = {run: _curves(rows, values) for run, rows in (before, after)}
        shared = [curve for curve in sides[before[0]] if curve in sides[after[0]]]
        shared = [curve for curve in shared if any(len(side[curve]) > 1 for side in sides.values())]
        if shared:
            table = _table(sides, shared)
            alt = f"{what.capitalize()} by drafts a step, {before[0]} beside {after[0]}, at {', '.join(shared)}."
            caption = _caption(what, before[0], after[0], len(shared))
            drawn = _drawn(sides, shared[:MOST_PANELS], what)
            drawing = Drawing(drawn, table, alt, caption)
            kept.append(Kept.of(drawing, name=name, prefix="two", order=order))
    return kept


def _caption(what: str, before: str, after: str, n_curves: int) -> str:
    more = f" Drawn are {MOST_PANELS} of {n_curves}; the table has all." if n_curves > MOST_PANELS else ""
    return f"{what.capitalize()} by drafts a step (0: plain decoding): {before} dashed, {after} with a full line.{more}"


def _curves(rows: list[Row], values: dict[str, str]) -> dict[str, dict[int, float]]:
    """By curve its value at each depth; of several rows of one depth the last."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        point = _point(row, values)
        if point is not None:
            curve, depth, value = point
            curves.setdefault(curve, {})[depth] = value
    return curves


def _point(row: Row, values: dict[str, str]) -> Point | None:
    value = row.number(values[row.kind]) if row.kind in values and row.status == "measured" else None
    if value is None or row.parameters.get("who", "engine") != "engine":
        return None
    where = row.parameters
    if row.kind in ("bench", "speed_curve"):
        curve, depth = f"{row.job} {where['context']}x{where['batch']}", where.get("spec_k")
    else:
        curve, depth = row.job, 0 if row.name == "baseline" else depth_of(row)
    return None if not isinstance(depth, int) else (curve, depth, value)


def _table(sides: dict[str, dict[str, dict[int, float]]], shared: list[str]) -> pd.DataFrame:
    """Table: curve, drafts a step, and the value of each run."""
    lines = []
    for curve in shared:
        for depth in sorted({depth for side in sides.values() for depth in side[curve]}):
            own = {run: side[curve].get(depth) for run, side in sides.items()}
            lines.append({"curve": curve, "drafts": depth} | own)
    return pd.DataFrame(lines)


def _drawn(sides: dict[str, dict[str, dict[int, float]]], shared: list[str], what: str) -> Figure:
    across = min(len(shared), PANELS_ABREAST)
    down = -(-len(shared) // across)
    size = (7.2, 3.8) if down == across == 1 else (7.2, 2.3 * down + 0.6)
    figure: Figure
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False)
    panels = list(grid.flat)
    for axes, curve in zip(panels, shared, strict=False):
        for place, (run, side) in enumerate(sides.items()):
            points = sorted(side[curve].items())
            axes.plot([depth for depth, _ in points], [value for _, value in points], label=run, **_look(place))
        axes.set_title(curve, fontsize=8)
        axes.set_ylim(0, None)
    for axes in panels[len(shared) :]:
        axes.remove()
    figure.supxlabel("drafts a step", fontsize=9)
    figure.supylabel(what, fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=9)
    return figure


def _look(place: int) -> dict[str, Any]:
    return look_of("ours" if place else "other") | {"linestyle": "-" if place else "--"}
