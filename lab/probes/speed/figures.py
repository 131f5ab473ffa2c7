"""Pictures of what speculation brings, each with the table it was drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from lab.figures import DASHES, FAINT, MARKERS, SERIES, Drawing, colour_of
from lab.pairs.planted.tokens import expected_length
from lab.probes.speed.curves import best_at, break_even_length, break_even_share, envelope, speedup_line
from lab.probes.speed.recommend import Choice
from lab.probes.speed.rows import Depth, PointSpeed
from lab.widgets import Control, Picker, Slider

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID = 101  # shares drawn
SOME_SHARE = 0.7  # accepted by a trained head, about, where the rows do not say
FEW_BATCHES = 3  # of a context; where there are more, it is a sweep, which the recommendation shows


def curve_points(points: Sequence[PointSpeed]) -> list[PointSpeed]:
    """The points whose curves are drawn: of a sweep over batches the smallest, and only if there is nothing else."""
    by_context: dict[int, list[PointSpeed]] = {}
    for point in points:
        if len(point.depths) > 1 and 0 in point.depths:
            by_context.setdefault(point.context, []).append(point)
    single = [point for ones in by_context.values() if len(ones) <= FEW_BATCHES for point in ones]
    return single or [ones[0] for ones in by_context.values()]


def curve_table(point: PointSpeed) -> pd.DataFrame:
    """One row a depth: its cost, its break-even, its bound, and what was measured."""
    rows = []
    for k, depth in sorted(point.depths.items()):
        if k == 0:
            continue
        over = depth.over_base.median
        even, share = break_even_length(k, over), break_even_share(k, over)
        rows.append(
            {
                "k": k, "step_ms": depth.step_ms, "step_over_base": over, "byte_bound": depth.bound,
                "break_even_tokens": "never" if even is None else even, "break_even_share": share,
                "most_speedup": (k + 1) / over, "measured_tokens": depth.length,
                "measured_speedup": depth.speedup.median if depth.speedup else None,
                "p10": depth.speedup.low if depth.speedup else None,
                "p90": depth.speedup.high if depth.speedup else None,
                "dial_tokens": depth.dial_length,
                "speedup_at_dial": depth.dial_length / over if depth.dial_length else None,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def curve_controls(point: PointSpeed, k: int) -> dict[str, Control]:
    """What may be chosen of `speed_curve`: the depth set apart, and the share of drafts that are accepted."""
    depths = tuple(sorted({depth for depth in (*point.depths, k) if depth}))
    share = Slider("share of drafts accepted", 0.0, 1.0, round(start_share(point), 2), 0.01)
    return {"k": Picker("drafts a step", depths, k, is_ordered=True), "share": share}


def start_share(point: PointSpeed) -> float:
    """The share that the rows were planted with, where they say it."""
    return SOME_SHARE if point.share is None else point.share


def speed_curve(point: PointSpeed, *, k: int, share: float, source: str) -> Drawing:
    """Speed-up over acceptance length for every depth, depth `k` set apart with its byte bound.

    Args:
        share: of drafted tokens accepted, given those before them; a ring marks it on every line.
        source: where the rows come from, for the caption.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(7.2, 4.6))
    for depth in (d for d in point.depths.values() if d.k):
        _line(axes, depth, is_shown=depth.k == k)
        _ring(axes, depth, share, is_shown=depth.k == k)
    deepest = max(point.depths)
    axes.axhline(1.0, color=FAINT, linestyle=":")
    axes.annotate(
        "plain decoding", (deepest + 1, 1.0), xytext=(0, 4), textcoords="offset points", fontsize=8.5, ha="right"
    )
    axes.margins(x=0.08, y=0.1)
    axes.set_xlabel("tokens a step (acceptance length, bonus included)")
    axes.set_ylabel("times plain decoding")
    axes.set_title(f"Speed-up over acceptance, {point.name}")
    if k in point.depths:
        axes.legend(fontsize=8.5, loc="upper left")
    words = f"{curve_words(point, k)} {share_words(point, k, share)}"
    alt = f"Lines of speed-up over tokens a step, one a depth. {words}"
    return Drawing(fig, curve_table(point), alt, f"{words} {source}.")


def _ring(axes: Axes, depth: Depth, share: float, *, is_shown: bool) -> None:
    """The place on a depth's line at a share of accepted drafts; at the depth shown its speed-up beside it."""
    length = expected_length(share, depth.k)
    speed = length / depth.over_base.median
    colour = colour_of("expected" if is_shown else "other")
    label = f"{share:.0%} of drafts accepted" if is_shown else None
    axes.plot(
        [length], [speed], marker="o", markersize=9 if is_shown else 5, color=colour, fillstyle="none",
        linestyle="none", label=label,
    )  # fmt: skip
    if is_shown:
        axes.annotate(f"{speed:.2f} times", (length, speed), xytext=(12, -20), textcoords="offset points", fontsize=10)


def share_words(point: PointSpeed, k: int, share: float) -> str:
    """What a share of accepted drafts gives at depth `k`, and at the depth that is best there."""
    best = best_at(point.over_base, share)
    best_words = f"the best depth there is {best.k}, {best.speedup:.2f} times as fast" if best.k else (
        "the best there is plain decoding")  # fmt: skip
    text = f"With {share:.0%} of drafts accepted, {best_words}"
    if k not in point.depths or k == best.k:
        return f"{text}."
    length = expected_length(share, k)
    return f"{text}; spec-{k} commits {length:.2f} tokens a step, {length / point.over_base[k]:.2f} times as fast."


def _line(axes: Axes, depth: Depth, *, is_shown: bool) -> None:
    (x0, y0), (x1, y1) = speedup_line(depth.k, depth.over_base.median)
    colour, top = colour_of("ours" if is_shown else "other"), y1
    axes.plot([x0, x1], [y0, y1], color=colour, linestyle="-", marker="", linewidth=2.4 if is_shown else 1.2)
    if is_shown:
        ends = speedup_line(depth.k, depth.bound)
        label, top = f"bytes alone, k = {depth.k}", max(y1, ends[1][1])
        axes.plot(*zip(*ends, strict=True), color=colour_of("bound"), linestyle="--", marker="", label=label)
    axes.annotate(
        f"k = {depth.k}", (x1, top), xytext=(0, 5), textcoords="offset points", fontsize=8.5, ha="center", va="bottom"
    )
    if depth.speedup and depth.length:
        gain = depth.speedup
        spread = [[max(gain.median - gain.low, 0.0)], [max(gain.high - gain.median, 0.0)]]
        axes.errorbar(
            depth.length, gain.median, yerr=spread, color=colour, marker=MARKERS[1 if is_shown else 0],
            linestyle="none", capsize=3,
        )  # fmt: skip


def curve_words(point: PointSpeed, k: int) -> str:
    """What the curve says of depth `k`, in a sentence."""
    if k not in point.depths:
        return f"spec-{k} was not measured at {point.name}."
    depth = point.depths[k]
    over = depth.over_base.median
    even = break_even_length(k, over)
    text = f"At {point.name} a step of spec-{k} costs {over:.3f} plain steps (bytes alone: {depth.bound:.3f}); "
    text += "it never breaks even" if even is None else f"it breaks even at {max(even, 1.0):.2f} tokens a step"
    if depth.speedup and depth.length:
        text += f" and was {depth.speedup.median:.2f} times as fast at {depth.length:.2f} measured ones"
    return text + "."


def depth_table(points: Sequence[PointSpeed]) -> pd.DataFrame:
    """One row a point and span of acceptance shares over which one depth is best."""
    rows = []
    for point in points:
        for span in envelope(point.over_base):
            rows.append(
                {
                    "point": point.name, "k": span.k, "from_share": span.low, "to_share": span.high,
                    "speedup_in_the_middle": span.best.speedup, "next_k": span.best.next_k,
                    "ahead_of_next": span.best.advantage, "speedup_at_the_end": best_at(
                        point.over_base, span.high).speedup,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def best_depth(points: Sequence[PointSpeed], source: str) -> Drawing:
    """Over the share of accepted drafts: the best speed-up there is, and the depth that has it.

    Args:
        source: where the rows come from, for the caption.
    """
    from matplotlib import pyplot as plt

    fig, (upper, lower) = plt.subplots(
        2, 1, figsize=(7.2, 3.6 + 0.42 * len(points)), sharex=True, height_ratios=(3.0, 0.5 + 0.42 * len(points))
    )
    shares = [i / (GRID - 1) for i in range(GRID)]
    for i, point in enumerate(points):
        best = [best_at(point.over_base, share).speedup for share in shares]
        colour = SERIES[i % len(SERIES)][0]
        upper.plot(shares, best, color=colour, linestyle=DASHES[i % len(DASHES)], marker="", label=point.name)
        _strip(lower, point, i, colour)
    upper.axhline(1.0, color=FAINT, linestyle=":")
    upper.set_ylabel("times plain decoding")
    upper.set_title("The best depth at every acceptance")
    upper.legend(fontsize=8.5, loc="upper left")
    lower.set_yticks(range(len(points)), [point.name for point in points], fontsize=8.5)
    lower.set_ylim(len(points) - 0.5, -0.5)
    lower.set_xlim(0, 1)
    lower.grid(visible=False)
    lower.set_xlabel("share of drafted tokens accepted (number: drafts a step of the best depth)")
    table = depth_table(points)
    widest = table.loc[(table["to_share"] - table["from_share"]).idxmax()]
    alt = (
        f"Best speed-up over the share of accepted drafts, {len(points)} points, and strips of the depth that has it. "
        "The "
        f"widest span is {widest['point']}: k = {widest['k']} from {widest['from_share']:.2f} to "
        f"{widest['to_share']:.2f}."
    )
    caption = (
        f"Every drafted token is accepted with that chance given those before it; k = 0 is plain decoding. {source}."
    )
    return Drawing(fig, table, alt, caption)


def _strip(axes: Axes, point: PointSpeed, y: int, colour: str) -> None:
    for n, span in enumerate(envelope(point.over_base)):
        axes.barh(y, span.high - span.low, left=span.low, height=0.62, color=colour, alpha=0.14 + 0.2 * (n % 2))
        if span.high - span.low > 0.02:
            axes.text((span.low + span.high) / 2, y, str(span.k), ha="center", va="center", fontsize=8.5)


def choice_table(found: Mapping[str, Sequence[Choice]]) -> pd.DataFrame:
    """One row an acceptance and point."""
    rows = []
    for name, ones in found.items():
        for one in ones:
            best, plain = one.tokens_per_s[one.k], one.tokens_per_s[0]
            rows.append(
                {
                    "acceptance": name, "context": one.context, "batch": one.batch, "best_k": one.k,
                    "tokens_a_step": one.lengths[one.k], "expected_tokens_per_s": best, "plain_tokens_per_s": plain,
                    "speedup": one.speedup, "next_k": one.next_k, "ahead_of_next": one.advantage,
                    "is_clear": one.is_clear,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def recommendation(found: Mapping[str, Sequence[Choice]], source: str) -> Drawing:
    """The best expected speed-up at every batch, a line an acceptance and context, with the depth that has it.

    Args:
        source: how far the formula was off, and where the rows come from, for the caption.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(7.2, 4.4))
    lines = _lines(found)
    for index, (label, at) in enumerate(lines.items()):
        series = index % len(SERIES)
        axes.plot(
            [one.batch for one in at], [one.speedup for one in at], label=label, color=SERIES[series][0],
            linestyle=DASHES[series], marker=MARKERS[series],
        )  # fmt: skip
        for one in at:
            where = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            axes.annotate(str(one.k), (one.batch, one.speedup), fontsize=8.5, **where)
    axes.axhline(1.0, color=FAINT, linestyle=":")
    batches = sorted({one.batch for at in lines.values() for one in at})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.margins(x=0.06, y=0.14)
    axes.set_xlabel("batch (number at a point: drafts a step of the best depth)")
    axes.set_ylabel("times plain decoding, expected")
    axes.set_title("What to choose at which batch")
    fig.legend(fontsize=8.5, loc="outside lower center", ncols=2)
    table = choice_table(found)
    best = table.loc[table["speedup"].idxmax()]
    alt = (
        f"Best expected speed-up by batch. Highest: {best['speedup']:.2f} with k = {best['best_k']} at batch "
        f"{best['batch']}."
    )
    return Drawing(fig, table, alt, f"{source}.")


def _lines(found: Mapping[str, Sequence[Choice]]) -> dict[str, list[Choice]]:
    """Choices by acceptance and context, by batch: contexts at several batches, or all where there is none."""
    lines: dict[str, list[Choice]] = {}
    for name, ones in found.items():
        for one in sorted(ones, key=lambda one: (one.context, one.batch)):
            lines.setdefault(f"{name}, {one.context} tokens", []).append(one)
    return {label: at for label, at in lines.items() if len(at) > 1} or lines
