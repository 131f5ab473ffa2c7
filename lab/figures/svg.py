"""A drawn figure as an `<svg>` element: text stays text, colours follow the page, ids are its own."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from lab.figures.looks import INK, SERIES, colour_css

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_NAMESPACES = ' xmlns="http://www.w3.org/2000/svg"'


def to_svg(fig: Figure, prefix: str) -> str:
    """`fig` as an `<svg>` element for a page: no fixed size, ids under `prefix`, page colours, no outside address.

    The figure is closed.
    """
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    part_ticks(fig)
    stream = io.StringIO()
    empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        fig.savefig(stream, format="svg", transparent=True, metadata=empty)
    plt.close(fig)
    return with_unique_ids(with_page_colours(_inline(stream.getvalue())), prefix)


def n_marks(fig: Figure) -> int:
    """Points, bars and cells that a figure shows; words, lines of reference and curves of one point do not count."""
    return sum(
        sum(_points_of(line, axes) for line in axes.lines)
        + sum(bool(patch.get_window_extent().width > 0.5) for patch in axes.patches)
        + sum(len(each.get_paths()) for each in axes.collections)
        + 2 * len(axes.images)
        for axes in fig.axes
    )


def _points_of(line: Line2D, axes: Axes) -> int:
    import numpy as np

    if line.get_transform() != axes.transData:  # drawn across the axes: a threshold, no point
        return 0
    n = int(np.isfinite(np.asarray(line.get_xydata(), dtype=float)).all(axis=1).sum())
    is_curve = line.get_linestyle() not in ("None", "none", " ", "")
    return 0 if is_curve and n == 1 else n


def undrawn(fig: Figure) -> str:
    from matplotlib import pyplot as plt

    plt.close(fig)
    return ""


def part_ticks(fig: Figure) -> None:
    """Turns the labels of any x axis on which they would lie over each other."""
    fig.draw_without_rendering()
    for axes in fig.axes:
        boxes = [
            label.get_window_extent() for label in axes.get_xticklabels() if label.get_text() and label.get_visible()
        ]
        shown = sorted((box for box in boxes if box.width), key=lambda box: box.x0)
        if any(left.x1 > right.x0 - 1 for left, right in pairwise(shown)):
            axes.tick_params(axis="x", labelrotation=35)
            for label in axes.get_xticklabels():
                label.set(horizontalalignment="right", rotation_mode="anchor")


def _inline(text: str) -> str:
    """Only the `<svg>` element: no XML header, document type, metadata, namespaces or fixed size."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    view = re.search(r'viewBox="([^"]*)"', head)
    size = f' viewBox="{view.group(1)}"' if view else ""
    return f'<svg{size} preserveAspectRatio="xMinYMin meet">{rest.strip()}'


def with_page_colours(text: str) -> str:
    """Ink and plain black become the page's text colour; series colours become CSS variables."""
    text = re.sub(rf"{INK}\b|#000000\b", "currentColor", text)
    for index, (light, _) in enumerate(SERIES, start=1):
        text = text.replace(light, f"var(--series-{index}, {light})")
    # Text without a fill of its own is black by SVG's rule; on a dark page it must follow the page.
    return re.sub(r"<svg\b", '<svg fill="currentColor"', text, count=1)


def with_unique_ids(text: str, prefix: str) -> str:
    """Every id, and every reference to one, under `prefix`, so that many figures live on one page."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix)
    text = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{stem}-{found.group(1)}"', text)
    text = re.sub(r'\b(?:xlink:)?href="#([^"]+)"', lambda found: f'href="#{stem}-{found.group(1)}"', text)
    return re.sub(r"url\(#([^)]+)\)", lambda found: f"url(#{stem}-{found.group(1)})", text)


def standalone(svg: str) -> str:
    """An inline `<svg>` as a file of its own: with its namespace and the colours a page would give it."""
    css = (
        f"<style>svg{{color:#1c1f23;font-family:sans-serif}}{colour_css().replace(':root', 'svg')}"
        "@media (prefers-color-scheme:dark){svg{color:#e8e6e1}}</style>"
    )
    head, rest = svg.split(">", 1)
    return f"{head.replace('<svg', '<svg' + _NAMESPACES, 1)}>{css}{rest}\n"


def embedded(text: str) -> str:
    """The reverse of `standalone`."""
    text = text.replace(_NAMESPACES, "", 1)
    return re.sub(r"<style>svg\{color.*?</style>", "", text, count=1, flags=re.DOTALL).strip()
