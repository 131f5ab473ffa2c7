"""Acceptance, coverage and the head's time against the size of the draft's vocabulary: pictures and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lab.figures import Drawing, look_of
from lab.vocabulary.heads import HeadTime
from lab.vocabulary.measure import VocabularyReport

_LOOKS = ("ours", "other", "expected", "plain")  # of the lists of frequencies, in order


def lengths(report: VocabularyReport) -> Drawing:
    """Acceptance length by size, with its interval over prompts; beside it what the tokens cover."""
    from matplotlib import pyplot as plt

    table = _lengths_table(report)
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.4), sharex=True)
    for counted, name in zip(report.lists, _LOOKS, strict=False):
        part, look = table[table["counted"] == counted], look_of(name)
        left.plot(part["size"], part["length"], label=f"by {counted}", **look)
        left.fill_between(part["size"], part["low"], part["high"], color=look["color"], alpha=0.15, linewidth=0)
        right.plot(part["size"], part["answers_coverage"], label=f"by {counted}", **look)
    left.set(title="acceptance length", ylabel="tokens a verify step", ylim=(0.9, None))
    right.set(title="coverage of the answers", ylabel="share of the tokens", ylim=(0, 1))
    for axes in (left, right):
        _size_axis(axes, sorted(set(table["size"])))
    left.legend(fontsize=8.5, loc="lower right")
    words = " ".join(report.verdict(counted) for counted in report.lists)
    caption = (
        f"The rightmost point is the whole head. Shaded: 95% over {report.whole.measured.n_prompts} prompts. Which "
        "tokens are kept was counted elsewhere, not on these answers."
    )
    return Drawing(fig, table, f"Acceptance length and coverage by size of the draft vocabulary. {words}", caption)


def head_times(times: Sequence[HeadTime], title: str, caption: str) -> Drawing:
    """The head's time by size, a line a width, and under each what its bytes alone take."""
    from matplotlib import pyplot as plt

    columns = [(t.width, t.size, t.us, t.floor_us, t.machine) for t in times]
    table = pd.DataFrame(columns, columns=["width", "size", "us", "bytes_alone_us", "machine"])
    fig, axes = plt.subplots()
    for (width, part), name in zip(table.groupby("width"), ("ours", "plain", "expected", "other"), strict=False):
        axes.plot(part["size"], part["us"], label=f"width {width}", **look_of(name))
        axes.plot(part["size"], part["bytes_alone_us"], **{**look_of("bound"), "marker": ""})
    axes.plot([], [], label="bytes alone", **{**look_of("bound"), "marker": ""})
    axes.set(title=title, ylabel="microseconds a row", yscale="log")
    least, most = table["bytes_alone_us"].min(), table["us"].max()
    steps = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    ticks = [step for step in steps if least / 2 <= step <= 2 * most]
    axes.set_yticks(ticks, [f"{tick}" for tick in ticks])
    _size_axis(axes, sorted(set(table["size"])))
    axes.legend(fontsize=8.5)
    words = "; ".join(_ratio(part) for _, part in table.groupby("width"))
    return Drawing(fig, table, f"Time of a head by the size of its vocabulary. {words}.", caption)


def _ratio(part: pd.DataFrame) -> str:
    """What the smallest size takes of the largest one's time, in words."""
    least, most = part.loc[part["size"].idxmin()], part.loc[part["size"].idxmax()]
    return (
        f"Width {least['width']}: {most['us']:.1f} us at {most['size']} tokens, {least['us']:.1f} us at "
        f"{least['size']}, {most['us'] / least['us']:.1f} times less for {most['size'] / least['size']:.1f} times fewer"
    )


def _lengths_table(report: VocabularyReport) -> pd.DataFrame:
    """One row a list and size, the whole head's in each list."""
    rows = []
    for counted in report.lists:
        for one in report.of(counted):
            length = one.measured.length
            rows.append({
                "counted": counted, "size": one.size, "length": length.mean, "low": length.low, "high": length.high,
                "outside_loops": one.measured.outside_loops.mean, "length_change": one.change.mean,
                "answers_coverage": one.measured.coverage, "counted_coverage": one.counted_coverage,
                "steps": one.measured.n_steps,
            })  # fmt: skip
    return pd.DataFrame(rows)


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens the draft chooses among")
    axes.set_xticks(sizes, [f"{size}" for size in sizes], rotation=45, fontsize=8.5)
    axes.minorticks_off()
