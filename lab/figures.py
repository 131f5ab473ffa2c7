"""Figures that read well on a light page, a dark page, paper, and aloud.

A figure is an inline SVG whose text stays text, whose ink is the page's own text colour, whose series take colours from
CSS variables with a light and a dark value, plus its alternative text, its caption and the table it was drawn from.
Series differ by marker and dash as well as by colour, so hue is never the only carrier.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lab.errors import ExperimentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Cell = str | int | float | bool | None

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
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)))
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
MOST_STEPS = 16


def colour_css() -> str:
    """The CSS variables that the figures of a page need."""
    light = "".join(f"--series-{index}:{pair[0]};" for index, pair in enumerate(SERIES, start=1))
    dark = "".join(f"--series-{index}:{pair[1]};" for index, pair in enumerate(SERIES, start=1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


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


def to_svg(fig: Figure, prefix: str) -> str:
    """`fig` as an `<svg>` element for a page: no fixed size, ids under `prefix`, page colours, no outside address.

    The figure is closed.
    """
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    stream = io.StringIO()
    empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        fig.savefig(stream, format="svg", transparent=True, metadata=empty)
    plt.close(fig)
    return with_unique_ids(with_page_colours(_inline(stream.getvalue())), prefix)


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


class Kept(BaseModel):
    """A figure as it is stored and shown: `<name>.svg` beside `<name>.json`.

    Attributes:
        steps: labels of a choice that the reader has, each of which shows more of the drawing than the one before: what
            has an id with `step-2-` belongs to the second and later ones, and is faint at the first.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    alt: str
    caption: str
    order: int
    columns: list[str]
    rows: list[list[Cell]]
    steps: Annotated[list[str], Field(max_length=MOST_STEPS)] = []
    svg: str = ""

    @classmethod
    def make(
        cls,
        fig: Figure,
        *,
        name: str,
        alt: str,
        caption: str,
        table: DataFrame,
        prefix: str,
        order: int,
        steps: Sequence[str] = (),
    ) -> Kept:
        """A drawn figure with its words and its table.

        Raises:
            ExperimentError: the alternative text, caption or table is empty.
        """
        for label, text in (("alt", alt), ("caption", caption)):
            if not text.strip():
                raise ExperimentError(
                    f"figure {name!r} has no {label}",
                    "a sentence",
                    "say what the figure shows, and how it was measured",
                )
        if table.empty:
            raise ExperimentError(
                f"figure {name!r} has an empty table", "the numbers it was drawn from", "pass the data frame you drew"
            )
        columns, rows = table_cells(table)
        svg = to_svg(fig, prefix)
        return cls(
            name=name, alt=alt, caption=caption, order=order, columns=columns, rows=rows, steps=list(steps), svg=svg
        )

    def save(self, folder: Path) -> None:
        """Writes `<name>.svg` (stands alone, light and dark) and `<name>.json` (words and table)."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.svg").write_text(standalone(self.svg), encoding="utf-8")
        words = self.model_dump_json(exclude={"svg"}, indent=1)
        (folder / f"{self.name}.json").write_text(words + "\n", encoding="utf-8")

    @classmethod
    def load(cls, words: Path) -> Kept:
        """The figure whose `.json` is `words`."""
        kept = cls.model_validate_json(words.read_text(encoding="utf-8"))
        kept.svg = _embedded(words.with_suffix(".svg").read_text(encoding="utf-8"))
        return kept

    def html(self, anchor: str = "") -> str:
        """`<figure>` with the drawing, its caption, and its table folded beneath.

        Args:
            anchor: its id on a page, where a narrow screen may then enlarge it.
        """
        label = html.escape(self.alt, quote=True)
        caption, name = html.escape(self.caption), html.escape(self.name, quote=True)
        place = f' id="{html.escape(anchor, quote=True)}"' if anchor else ""
        if self.svg:
            drawing = self.svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
            shown = f'{_choice(self)}{_enlarge(anchor)}<div class="drawing" style="max-width:52rem">{drawing}</div>'
        else:
            shown = f"<p>{html.escape(self.alt)}</p>"
        return (
            f'<figure class="plot"{place} data-name="{name}">{shown}'
            f"<figcaption>{caption}</figcaption>"
            f'<details class="data"><summary>Table of this figure</summary>'
            f'<div class="scroll">{table_html(self.columns, self.rows)}</div></details></figure>'
        )


def _choice(figure: Kept) -> str:
    """One button a step, before the drawing that they govern by style alone; nothing where there are no steps."""
    if not figure.steps:
        return ""
    first = re.search(r'\bid="([A-Za-z0-9_-]+)"', figure.svg)  # under this figure's own prefix, so unique on its page
    stem = f"{first.group(1) if first else 'figure'}-choice"
    buttons, rules, n = [], [], len(figure.steps)
    for i, label in enumerate(figure.steps, start=1):
        state = " checked" if i == n else ""
        buttons.append(f'<input type="radio" name="{stem}" id="{stem}-{i}"{state}>')
        buttons.append(f'<label for="{stem}-{i}">{html.escape(label)}</label> ')
        # By attribute: the name of a job, with which ids begin, may start with a digit, and `#3...` is no selector.
        later = (f'[id="{stem}-{i}"]:checked~.drawing [id*="step-{j}-"]' for j in range(i + 1, n + 1))
        rules.append(",".join(later) + "{opacity:.08}" if i < n else "")
    return f"<style>{''.join(rules)}</style>{''.join(buttons)}"


def _enlarge(anchor: str) -> str:
    """A switch that a narrow screen shows before the drawing that it enlarges, by style alone."""
    if not anchor:
        return ""
    switch = html.escape(f"{anchor}-large", quote=True)
    return f'<input type="checkbox" class="large" id="{switch}"><label class="large" for="{switch}">Enlarge</label>'


_NAMESPACES = ' xmlns="http://www.w3.org/2000/svg"'


def standalone(svg: str) -> str:
    """An inline `<svg>` as a file of its own: with its namespace and the colours a page would give it."""
    css = (
        f"<style>svg{{color:#1c1f23;font-family:sans-serif}}{colour_css().replace(':root', 'svg')}"
        "@media (prefers-color-scheme:dark){svg{color:#e8e6e1}}</style>"
    )
    head, rest = svg.split(">", 1)
    return f"{head.replace('<svg', '<svg' + _NAMESPACES, 1)}>{css}{rest}\n"


def _embedded(text: str) -> str:
    """The reverse of `standalone`."""
    text = text.replace(_NAMESPACES, "", 1)
    return re.sub(r"<style>svg\{color.*?</style>", "", text, count=1, flags=re.DOTALL).strip()


def table_cells(table: DataFrame) -> tuple[list[str], list[list[Cell]]]:
    """Columns and rows of a data frame as plain values; a named or non-trivial index becomes the first column."""
    from pandas import RangeIndex

    if not (isinstance(table.index, RangeIndex) and table.index.name is None):
        table = table.reset_index()
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False, name=None)]
    return [str(column) for column in table.columns], rows


def _cell(value: Any) -> Cell:
    if hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def table_html(columns: list[str], rows: list[list[Cell]]) -> str:
    """A plain HTML table; numbers are right-aligned by class."""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    labels = [html.escape(column, quote=True) for column in columns]
    body = "".join(f"<tr>{''.join(map(_td, labels, row))}</tr>" for row in rows)
    return f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _td(label: str, value: Cell) -> str:
    """A cell, with its column's name for screens on which a row becomes a card."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f'<td{" class=num" if number else ""} data-label="{label}">{html.escape(shown(value))}</td>'


def shown(value: Any) -> str:
    """A value for people: four significant digits, thousands kept whole, yes and no, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value == int(value) if value == value and abs(value) < 1e15 else False:
            return f"{int(value)}"
        return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return str(value)


def show(markup: str) -> None:
    """Displays HTML in the notebook; outside one it does nothing visible."""
    from IPython.display import HTML, display

    display(HTML(markup))  # type: ignore[no-untyped-call]
