"""Where each microsecond of a step goes: bytes, kernels above them, gaps, and the time between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from lab.figures import HATCHES, MEANINGS, Drawing, colour_of
from lab.probes.speed.rows import PointSpeed, StageCost, Stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = ("floor of its bytes", "kernels above it", "no kernel running")
WHOLE = "own time, not split"
LOOKS = dict(zip((*PARTS, WHOLE), ("bound", "bad", "other", "ours"), strict=True))  # what each is drawn as
MANY_US = 1e4  # from here on milliseconds read better


def parts_of(cost: StageCost) -> tuple[float, float, float] | None:
    """(floor, kernels above it, gaps) as they are stacked, us; they sum to the own time.

    A stage may be faster than the read ceiling, from a cache: then its floor is drawn as long as it took.
    """
    if cost.kernel_us is None or cost.gap_us is None:
        return None
    gap = min(max(cost.gap_us, 0.0), cost.own_us)
    floor = min(cost.floor_us, cost.own_us - gap)
    return floor, cost.own_us - gap - floor, gap


def above_floor(cost: StageCost) -> float | None:
    """Time of a stage as it is drawn beyond its floor, us; None where no floor is drawn."""
    parts = parts_of(cost)
    return None if parts is None else parts[1] + parts[2]


def table_of(point: PointSpeed, k: int) -> pd.DataFrame:
    """One row a stage, plain decoding first, then `k` drafts."""
    rows = []
    for depth, stages in _shown(point, k):
        for cost in stages.costs:
            floor, kernels, gap = parts_of(cost) or (None, None, None)
            rows.append(
                {
                    "step": _name(depth), "stage": cost.stage, "own_us": cost.own_us, "floor_us": floor,
                    "kernels_above_us": kernels, "gap_us": gap, "kernels": cost.n_kernels,
                    "above_floor_us": above_floor(cost), "share_of_step": cost.own_us / stages.drawn_us,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def why(point: PointSpeed, k: int) -> str:
    """One sentence a step, from what the bars draw: the three stages with most time above the floor, or most time."""
    return " ".join(_why(depth, stages) for depth, stages in _shown(point, k))


def _why(depth: int, stages: Stages) -> str:
    drawn = {cost.stage: cost.own_us if (above := above_floor(cost)) is None else above for cost in stages.costs}
    most = sorted(drawn, key=lambda stage: drawn[stage], reverse=True)[:3]
    held, total = ", ".join(f"{stage} {_took(drawn[stage])}" for stage in most), sum(drawn.values())
    share = f"{sum(drawn[stage] for stage in most) / total if total else 0.0:.0%}"
    step = f"{_name(depth).capitalize()} takes {stages.drawn_us / 1e3:.3f} ms"
    if not stages.is_split:
        return f"{step}, {share} of it in {held}."
    return f"{step}, {total / 1e3:.3f} ms of it above the floor of its bytes, {share} of that in {held}."


def checks(point: PointSpeed, k: int) -> str:
    """Whether the parts are the whole, and the whole the step as it is timed."""
    shown = _shown(point, k)
    parts = []
    for depth, stages in shown:
        total = stages.sum_over_step
        whole = "" if total is None else f"own times sum to {total:.2%} of the step; "
        parts.append(f"{_name(depth)}: {whole}with its stages timed a step takes {stages.over_timed:.3f} of its time")
    return "; ".join([*parts, *{f"kernels and gaps {stages.split}" for _, stages in shown if not stages.is_split}])


def has_steps(point: PointSpeed, k: int) -> bool:
    """Whether a step of plain decoding or of `k` drafts was taken apart at this point."""
    return bool(_shown(point, k))


def waterfall(point: PointSpeed, k: int, source: str) -> Drawing:
    """A step of plain decoding above, one of `k` drafts below, stage after stage on one scale; of a point that
    `has_steps`.

    Args:
        source: where the rows come from, for the caption.
    """
    from matplotlib import pyplot as plt

    shown = _shown(point, k)
    counts = [len(stages.costs) for _, stages in shown]
    fig, panels = plt.subplots(
        len(shown), 1, figsize=(7.2, 1.7 + 0.27 * sum(counts)), sharex=True, height_ratios=counts, squeeze=False
    )
    for axes, (depth, stages) in zip(panels[:, 0], shown, strict=True):
        _falling(axes, depth, stages)
    is_long = max((stages.drawn_us for _, stages in shown), default=0.0) >= MANY_US
    panels[-1, 0].xaxis.set_major_formatter(lambda us, _: f"{us / 1e3 if is_long else us:g}")
    panels[-1, 0].set_xlabel(f"{'milliseconds' if is_long else 'microseconds'} into a step at {point.name}")
    if any(stages.is_split for _, stages in shown):
        panels[0, 0].legend(fontsize=8.5, loc="upper right")
    words = why(point, k)
    alt = f"Waterfall of a step by stage, plain and spec-{k}. {words}"
    return Drawing(fig, table_of(point, k), alt, f"{words} Checks: {checks(point, k)}. {source}.")


def _falling(axes: Axes, depth: int, stages: Stages) -> None:
    start = 0.0
    labels: set[str] = set()
    for y, cost in enumerate(stages.costs):
        parts = parts_of(cost)
        pieces = list(zip(PARTS, parts, strict=True)) if parts else [(WHOLE, cost.own_us)]
        left = start
        for label, us in pieces:
            name = "" if label in labels else label
            hatch = HATCHES[MEANINGS[LOOKS[label]]]
            axes.barh(y, us, left=left, color=colour_of(LOOKS[label]), hatch=hatch, label=name)
            labels.add(label)
            left += us
        start += cost.own_us
        above = above_floor(cost)
        text = _took(cost.own_us) + ("" if above is None else f", {_took(above)} above the floor")
        axes.annotate(text, (start, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(stages.costs)), [cost.stage for cost in stages.costs], fontsize=8.5)
    axes.set_ylim(len(stages.costs) - 0.4, -0.6)
    axes.margins(x=0.3)
    axes.grid(visible=False, axis="y")  # it would strike the numbers through
    axes.set_title(f"{_name(depth)}: {stages.drawn_us / 1e3:.3f} ms")


def _shown(point: PointSpeed, k: int) -> list[tuple[int, Stages]]:
    return [(depth, point.stages[depth]) for depth in dict.fromkeys((0, k)) if depth in point.stages]


def _took(us: float) -> str:
    """A time for people: `3.9 us`, `710 us`, `26.5 ms`."""
    if us >= MANY_US:
        return f"{us / 1e3:.3g} ms"
    return f"{us:.0f} us" if us >= 100 else f"{us:.3g} us"


def _name(depth: int) -> str:
    return f"spec-{depth}" if depth else "plain decoding"
