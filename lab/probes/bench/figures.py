"""Pictures of decoding speed, each with the table it was drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from lab.figures import HATCHES, MEANINGS, Drawing, colour_of
from lab.probes.bench.clocks import SPANS
from lab.probes.bench.decode import DecodeReport, ModeResult
from lab.probes.bench.rounds import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#7a7b7c"


def speed_table(report: DecodeReport) -> pd.DataFrame:
    """One row a mode: medians over rounds."""
    rows = []
    for mode in report.modes:
        speed, step = mode.spread(lambda r: r.decode_tokens_per_s), mode.spread(lambda r: r.step_ms)
        rows.append(
            {
                "mode": mode.name,
                "decode_tokens_per_s": speed.median,
                "p10": speed.p10,
                "p90": speed.p90,
                "with_prefill_tokens_per_s": mode.spread(lambda r: r.tokens_per_s).median,
                "step_ms": step.median,
                "acceptance_length": mode.mean_acceptance_length,
                "speedup": report.speed_up(mode.k).median if mode.k else 1.0,
                "with_prefill_speedup": report.speed_up(mode.k, with_prefill=True).median if mode.k else 1.0,
                "rounds": len(mode.rounds),
            }
        )
    return pd.DataFrame(rows)


def speeds(report: DecodeReport, k: int) -> Drawing:
    """Tokens a second and speed-up of every mode, every round shown; in words, at `k`."""
    from matplotlib import pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 1.6 + 0.4 * len(report.modes)), width_ratios=(3, 2))
    names = [mode.name for mode in report.modes]
    for y, mode in enumerate(report.modes):
        _rounds(left, mode.spread(lambda r: r.decode_tokens_per_s), y, _meaning(mode))
        if mode.k:
            _rounds(right, report.speed_up(mode.k), y, _meaning(mode))
    left.set_yticks(range(len(names)), names)
    right.set_yticks(range(len(names)), [""] * len(names))
    right.axvline(1.0, color=GREY, linestyle=":")
    right.annotate("plain", (1.0, 0), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
    for axes in (left, right):
        axes.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlim(left=0)
    left.set_xlabel("tokens a second, decoding only")
    right.set_xlabel("times plain decoding, in each round")
    left.set_title(f"Decoding speed, {report.dtype}, batch {report.batch}")
    right.set_title("Speed-up, decoding only")
    caption = (
        "Dots are medians over rounds, bars span the 10th to the 90th percentile, ticks are single rounds. A speed-up "
        "is "
        "the median over rounds of the ratio within a round, prefill left out; the table has it with prefill too."
    )
    alt = f"Tokens a second and speed-up by mode. {report.verdict(k)}"
    return Drawing(fig, speed_table(report), alt, caption)


def _meaning(mode: ModeResult) -> str:
    return "ours" if mode.k else "plain"


def _rounds(axes: Axes, spread: Spread, y: int, meaning: str) -> None:
    axes.hlines(y, spread.p10, spread.p90, linewidth=2.5, color=colour_of(meaning))
    axes.plot(spread.samples, [y] * len(spread.samples), linestyle="none", marker="|", color=GREY, markersize=9)
    axes.plot([spread.median], [y], marker="o", color=colour_of(meaning))


def waterfall(report: DecodeReport, k: int) -> Drawing:
    """Time of one decode step by span, in the order of execution: plain decoding above, spec-k below."""
    from matplotlib import pyplot as plt

    shown = [report.modes[0], report.at(k)]
    bars = [[span for span in SPANS if mode.span_ms[span] > 0] for mode in shown]
    fig, panels = plt.subplots(
        2, 1, figsize=(7.2, 1.8 + 0.24 * sum(map(len, bars))), sharex=True, height_ratios=[len(names) for names in bars]
    )
    for axes, mode, names in zip(panels, shown, bars, strict=True):
        _falling(axes, mode, names)
    panels[-1].set_xlabel("milliseconds into an average decode step")
    table = pd.DataFrame(
        [
            {"mode": mode.name, "span": span, "ms_a_step": mode.span_ms[span], "share": mode.span_ms[span] / total}
            for mode in shown
            for total in [sum(mode.span_ms.values())]
            for span in SPANS
        ]
    )
    words = waterfall_words(report, k)
    alt = f"Waterfall of one decode step by span, plain and spec-{k}. {words}"
    return Drawing(fig, table, alt, f"Own time of each span in the order of execution. {words}")


def waterfall_words(report: DecodeReport, k: int) -> str:
    """What the waterfall shows, from the numbers it draws, and how far timing every span slowed the steps."""
    base, mode = report.modes[0], report.at(k)
    ms = [sum(one.span_ms.values()) for one in (base, mode)]
    more = {span: mode.span_ms[span] - base.span_ms[span] for span in SPANS}
    most = sorted(more, key=lambda span: abs(more[span]), reverse=True)[:2]
    longest = max(mode.span_ms, key=lambda span: mode.span_ms[span])
    slowed = [one / timed.spread(lambda r: r.step_ms).median for one, timed in zip(ms, (base, mode), strict=True)]
    differ = " and ".join(f"{span} ({more[span]:+.3g} ms)" for span in most)
    return (
        f"Drawn: a plain step of {ms[0]:.3g} ms and a spec-{k} step of {ms[1]:.3g} ms, {ms[1] / ms[0]:.2f} times as "
        f"long; the longest part of the latter is {longest} with {mode.span_ms[longest]:.3g} ms, and the steps differ "
        f"most in {differ}. Every part was timed on its own here, which made a plain step {slowed[0]:.2f} and a "
        f"spec-{k} step {slowed[1]:.2f} times as long as in the rounds above: the speed-up is that of the rounds."
    )


def _falling(axes: Axes, mode: ModeResult, names: list[str]) -> None:
    start, meaning = 0.0, _meaning(mode)
    for y, span in enumerate(names):
        took = mode.span_ms[span]
        axes.barh(y, took, left=start, color=colour_of(meaning), hatch=HATCHES[MEANINGS[meaning]])
        start += took
        axes.annotate(f"{took:.2g}", (start, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.set_title(f"{mode.name}: {start:.3g} ms a step")
