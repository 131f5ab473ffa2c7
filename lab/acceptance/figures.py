"""Pictures of acceptance, each with the table it was drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from lab.acceptance.counts import ACCEPTED, DEEP, NEAR, OUTSIDE, REFUSED, DepthAcceptance
from lab.acceptance.intervals import Interval
from lab.acceptance.measure import AcceptanceReport
from lab.figures import HATCHES, MARKERS, MEANINGS, Drawing, colour_of, depth_look, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#7a7b7c"
# A class keeps its colour and hatch whichever other classes a draft shows: charts of two drafts are read side by side.
RANK_STYLES = {ACCEPTED: "ours", OUTSIDE: "plain", NEAR: "expected", DEEP: "other", REFUSED: "bad"}


def lengths_table(report: AcceptanceReport) -> pd.DataFrame:
    """One row a depth."""
    return pd.DataFrame(
        [
            {
                "mode": f"spec-{d.k}",
                "acceptance_length": d.length.mean,
                "low": d.length.low,
                "high": d.length.high,
                "outside_loops": d.outside_loops.mean,
                "if_independent": d.expected_if_independent,
                "most_possible": d.k + 1,
                "steps": d.n_steps,
                "looped_share": d.looped_share,
                "coverage": d.coverage,
            }
            for d in report.depths
        ]
    )


def lengths(report: AcceptanceReport, k: int, turns: str) -> Drawing:
    """Acceptance length by depth, with its interval, outside loops, and what equally easy positions would give.

    Args:
        k: the depth that the words tell of. turns: which turns of the prompts were asked, a sentence or nothing.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots()
    ks = [d.k for d in report.depths]
    axes.plot(ks, [k + 1 for k in ks], label="most possible, k + 1", color=GREY, marker="", linestyle=":")
    axes.plot(ks, [d.expected_if_independent for d in report.depths], label="if every position were like the first",
              **look_of("expected"))  # fmt: skip
    axes.plot(ks, [d.outside_loops.mean for d in report.depths], label="outside loops",
              **{**look_of("other"), "linestyle": "none"})  # fmt: skip
    axes.plot(ks, [d.length.mean for d in report.depths], label="measured", **look_of("ours"))
    for depth in report.depths:
        if depth.length.low is not None:
            axes.vlines(
                depth.k, depth.length.low, depth.length.high or depth.length.low, color=colour_of("ours"), linewidth=3
            )
    axes.set_xticks(ks, [f"spec-{k}" for k in ks])
    axes.set_xlim(min(ks) - 0.4, max(ks) + 0.4)
    axes.set_ylim(bottom=0.9)
    axes.set_ylabel("tokens a verify step")
    axes.set_title("Acceptance length by depth")
    axes.legend(fontsize=8.5)
    caption = (
        "Tokens committed by a complete verify step, bonus included; bars are 95% bootstrap intervals over prompts. "
        f"Outside loops leaves out steps with a token in a repeated run of 16.{turns}"
    )
    return Drawing(fig, lengths_table(report), f"Acceptance length by depth. {report.at(k).why}", caption)


def positions(report: AcceptanceReport, k: int) -> Drawing:
    """Share of steps that accept each drafted position, and the share among those that reached it."""
    from matplotlib import pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True)
    rows = []
    for depth in report.depths:
        xs = range(1, depth.k + 1)
        left.plot(xs, [_nan(value) for value in depth.by_position], label=f"spec-{depth.k}", **depth_look(depth.k))
        right.plot(xs, [_nan(value) for value in depth.given_prefix], label=f"spec-{depth.k}", **depth_look(depth.k))
        rows += [
            {"mode": f"spec-{depth.k}", "position": x, "accepted": a, "accepted_if_reached": g}
            for x, a, g in zip(xs, depth.by_position, depth.given_prefix, strict=True)
        ]
    for axes, title in ((left, "of all steps"), (right, "of the steps that reached it")):
        axes.set_title(title)
        axes.set_xlabel("drafted position")
        axes.set_xticks(range(1, max(d.k for d in report.depths) + 1))
        axes.set_ylim(0, 1)
    left.set_ylabel("accepted, share")
    left.legend(fontsize=8.5)
    alt = (
        "Share of steps that accept each drafted position, of all steps and of those that reached it. "
        f"At spec-{k}: {', '.join(f'{share:.2f}' for share in report.at(k).by_position)}."
    )
    caption = "Left: positions add up to the acceptance length, less one. Right: how hard each position is by itself."
    return Drawing(fig, pd.DataFrame(rows), alt, caption)


def histogram(report: AcceptanceReport, k: int) -> Drawing:
    """Share of steps by number of accepted drafts."""
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots()
    width = 0.8 / len(report.depths)
    rows = []
    for i, depth in enumerate(report.depths):
        shares = [count / max(depth.n_steps, 1) for count in depth.histogram]
        xs = [a + (i - (len(report.depths) - 1) / 2) * width for a in range(depth.k + 1)]
        axes.bar(xs, shares, width, label=f"spec-{depth.k}", color=depth_look(depth.k)["color"],
                 hatch=HATCHES[(depth.k - 1) % len(HATCHES)])  # fmt: skip
        rows += [
            {"mode": f"spec-{depth.k}", "accepted_drafts": a, "steps": count, "share": share}
            for a, (count, share) in enumerate(zip(depth.histogram, shares, strict=True))
        ]
    axes.set_xticks(range(max(d.k for d in report.depths) + 1))
    axes.set_xlabel("accepted drafts in a step")
    axes.set_ylabel("share of steps")
    axes.set_title("How many drafts a step accepts")
    axes.legend(fontsize=8.5)
    told = report.at(k)
    alt = (
        f"Share of steps by number of accepted drafts. At spec-{k}, {told.histogram[0]} of {told.n_steps} steps accept "
        f"none and {told.histogram[-1]} accept all."
    )
    caption = "Complete verify steps; those cut short by an end token or the length limit are left out."
    return Drawing(fig, pd.DataFrame(rows), alt, caption)


def ranks(depth: DepthAcceptance) -> Drawing:
    """By position, where in the draft's order the target's token lay, of the steps that reached the position."""
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(7.2, 1.5 + 0.45 * depth.k))
    labels = [f"position {i + 1}" for i in range(depth.k)]
    left = [0.0] * depth.k
    for name, values in depth.rank_shares.items():
        if any(values):
            style = RANK_STYLES[name]
            axes.barh(labels, values, left=left, label=name, color=colour_of(style), hatch=HATCHES[MEANINGS[style]])
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the steps that reached the position")
    axes.set_title(f"Rank of the target's token in the draft's order, spec-{depth.k}", pad=40)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8.5, borderaxespad=0.2)
    table = pd.DataFrame({"position": range(1, depth.k + 1), **depth.rank_shares})
    for name, values in depth.loss_by_cause.items():
        table[f"tokens lost: {name}"] = values
    alt = f"Where the target's token lay in the draft's order, by position. {depth.why}"
    caption = "Of the steps that reached the position. Tokens lost count what a miss there costs a step on average."
    return Drawing(fig, table, alt, caption)


def categories(depth: DepthAcceptance) -> Drawing:
    """Acceptance length by category with its interval, and every prompt beside it."""
    from matplotlib import pyplot as plt

    fig, (left, right) = plt.subplots(
        1, 2, figsize=(7.2, max(2.6, 1.1 + 0.32 * len(depth.categories))), width_ratios=(3, 2)
    )
    names = [f"{c.category} ({c.n_prompts})" for c in depth.categories]
    for y, category in enumerate(depth.categories):
        _whisker(left, category.length, y)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("tokens a verify step, 95% interval")
    left.set_title("by category (prompts)")
    measured = sorted(value for value in depth.per_prompt if value is not None)
    right.plot(range(1, len(measured) + 1), measured, linestyle="none", marker=MARKERS[0], markersize=3.5)
    right.set_xlabel("prompts in order")
    right.set_title("prompt by prompt")
    right.set_ylim(bottom=0.9)
    rows = [
        {
            "category": c.category,
            "prompts": c.n_prompts,
            "steps": c.n_steps,
            "acceptance_length": c.length.mean,
            "low": c.length.low,
            "high": c.length.high,
        }
        for c in depth.categories
    ]
    table = pd.DataFrame(rows)
    least, most = min(table["acceptance_length"], default=0), max(table["acceptance_length"], default=0)
    alt = f"Acceptance length at spec-{depth.k} by category and by prompt, {least:.2f} to {most:.2f}."
    caption = (
        "Bars are 95% bootstrap intervals over the prompts of a category; a single prompt has none worth the name."
    )
    return Drawing(fig, table, alt, caption)


def _whisker(axes: Axes, interval: Interval, y: int) -> None:
    if interval.mean is None or interval.low is None or interval.high is None:
        axes.annotate("no complete step", (1.0, y), va="center")
        return
    axes.hlines(y, interval.low, interval.high, linewidth=2.5, color=colour_of("ours"))
    axes.plot([interval.mean], [y], marker="o", color=colour_of("ours"))


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
