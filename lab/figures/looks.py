"""What colours, marks and dashes mean, the same in every figure, and how a page tells them light from dark."""

from __future__ import annotations

import html
from typing import Any

# Stand-ins drawn by matplotlib and replaced by CSS colours afterwards; odd values that no figure uses by chance.
INK, FAINT = "#010203", "#7a7b7c"
# (light, dark) of each series: Okabe and Ito's hues, shifted so that each has a contrast of 3 or more on its page.
SERIES = (
    ("#0067a5", "#5db4ee"),
    ("#b84a00", "#f19a4b"),
    ("#00735a", "#3fc79f"),
    ("#9a3a7c", "#e39bca"),
    ("#6d5a00", "#d9c03a"),
    ("#4a4fb5", "#a5a9ff"),
)
# What a colour means in every figure: its place among the series. Where the series are depths of speculation they take
# `depth_look`, and where they have no lasting meaning (points, jobs, architectures) the series' own order; no figure
# shows two of the three together.
MEANINGS = {
    "ours": 0,  # measured here: the engine, its steps with drafts, the head; accepted; a gate that holds
    "bad": 1,  # fails, is a bug, or costs more than it has to
    "bound": 2,  # the most or the least there can be: floors, bytes alone, what is allowed
    "expected": 3,  # computed and not measured
    "plain": 4,  # plain decoding, plain torch
    "other": 5,  # other implementations, and what a figure does not set apart
}
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)))
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def colour_css() -> str:
    """The CSS variables that the figures of a page need."""
    light = "".join(f"--series-{index}:{pair[0]};" for index, pair in enumerate(SERIES, start=1))
    dark = "".join(f"--series-{index}:{pair[1]};" for index, pair in enumerate(SERIES, start=1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def notebook_style() -> str:
    """What a page has in its style sheet and JupyterLab has not: colours of its dark theme, which it names in its own
    way, and tables whose words begin at the left."""
    dark = "".join(f"--series-{index}:{pair[1]};" for index, pair in enumerate(SERIES, start=1))
    cells = ".jp-Notebook table.cards :is(th,td){text-align:left;padding:.2rem .6rem;vertical-align:top}"
    numbers = ".jp-Notebook table.cards td.num{text-align:right;font-variant-numeric:tabular-nums}"
    return f'<style>body[data-jp-theme-light="false"]{{{dark}}}{cells}{numbers}</style>'


def banner(title: str, text: str) -> str:
    """A paragraph that is to be seen before what follows it."""
    bad = MEANINGS["bad"]
    edge = f"var(--series-{bad + 1},{SERIES[bad][0]})"
    return (
        f'<p class="banner" role="note" style="border-left:5px solid {edge};padding:.4rem .9rem;margin:.4rem 0;'
        f'max-width:52rem"><strong>{html.escape(title)}</strong> {html.escape(text)}</p>'
    )


def colour_of(meaning: str) -> str:
    """The colour of a meaning, as figures are drawn with it."""
    return SERIES[MEANINGS[meaning]][0]


def look_of(meaning: str) -> dict[str, Any]:
    """Colour, marker and dash of a meaning, for a line."""
    index = MEANINGS[meaning]
    return {"color": SERIES[index][0], "marker": MARKERS[index], "linestyle": DASHES[index]}


def depth_look(k: int) -> dict[str, Any]:
    """Colour, marker and dash of `k` drafts a step, the same in every figure, for a line."""
    index = (k - 1) % len(SERIES)
    return {"color": SERIES[index][0], "marker": MARKERS[index], "linestyle": DASHES[index]}


def use_style() -> None:
    """Sets the look of all figures made from here on in this process."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(
        {
            "figure.figsize": (7.2, 3.8),
            "figure.constrained_layout.use": True,
            "font.size": 10.5,
            "axes.titlesize": 11.5,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": FAINT,
            "grid.alpha": 0.3,
            "grid.linewidth": 0.7,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "lines.markersize": 5.5,
            "svg.fonttype": "none",
            "axes.prop_cycle": cycler(color=[light for light, _ in SERIES])
            + cycler(marker=list(MARKERS))
            + cycler(linestyle=list(DASHES)),
        }
    )
    for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"):
        mpl.rcParams[key] = INK
    mpl.rcParams["hatch.color"] = INK
