"""A figure as it is stored and shown: its drawing, alternative text, caption, and the table it was drawn from."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from lab.errors import ExperimentError
from lab.figures.drawing import Drawing
from lab.figures.svg import embedded, n_marks, standalone, to_svg, undrawn
from lab.figures.tables import Cell, table_cells, table_html
from lab.rows.values import slugged

MOST_STEPS = 16


class Kept(BaseModel):
    """A figure as it is stored and shown: `<name>.svg` beside `<name>.json`.

    Attributes:
        steps: labels of a choice that the reader has, each of which shows more of the drawing than the one before: what
            has an id with `step-2-` belongs to the second and later ones, and is faint at the first.
        is_drawn: whether there is a drawing; one of a single point, or of nothing, is left to its words and its table.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    alt: str
    caption: str
    order: int
    columns: list[str]
    rows: list[list[Cell]]
    steps: Annotated[list[str], Field(max_length=MOST_STEPS)] = []
    is_drawn: bool = True
    svg: str = ""

    @classmethod
    def of(cls, drawing: Drawing, *, name: str, prefix: str, order: int) -> Kept:
        """A drawing with its words and its table; its figure is closed.

        Args:
            name: of its files and its place on a page, in letters that both allow. prefix: begins every id, so that
                many figures live on one page. order: its place among those of its job.

        Raises:
            ExperimentError: the alternative text, caption or table is empty.
        """
        for label in ("alt", "caption"):
            if not getattr(drawing, label).strip():
                raise ExperimentError(
                    f"figure {name!r} has no {label}",
                    "a sentence",
                    "say what the figure shows, and how it was measured",
                )
        if drawing.table.empty:
            raise ExperimentError(
                f"figure {name!r} has an empty table",
                "the numbers it was drawn from",
                "pass the data frame you drew",
            )
        columns, rows = table_cells(drawing.table)
        name = slugged(name)
        prefix = f"{prefix}-{name}"
        svg = to_svg(drawing.fig, prefix) if n_marks(drawing.fig) > 1 else undrawn(drawing.fig)
        return cls(
            name=name, alt=drawing.alt, caption=drawing.caption, order=order, columns=columns, rows=rows,
            steps=list(drawing.steps), svg=svg, is_drawn=bool(svg),
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Writes `<name>.json` (words and table) and, if it is drawn, `<name>.svg` (stands alone, light and dark)."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.svg:
            (folder / f"{self.name}.svg").write_text(standalone(self.svg), encoding="utf-8")
        words = self.model_dump_json(exclude={"svg"} if self.svg else {"svg", "steps"}, indent=1)
        (folder / f"{self.name}.json").write_text(words + "\n", encoding="utf-8")

    @classmethod
    def load(cls, words: Path) -> Kept:
        """The figure whose `.json` is `words`."""
        kept = cls.model_validate_json(words.read_text(encoding="utf-8"))
        if kept.is_drawn:
            kept.svg = embedded(words.with_suffix(".svg").read_text(encoding="utf-8"))
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
            shown = f"<p>Not drawn, as there is no more than one point: {html.escape(self.alt)}</p>"
        return (
            f'<figure class="plot"{place} data-name="{name}">{shown}'
            f"<figcaption>{caption}</figcaption>"
            f'<details class="data"><summary>Table of this figure</summary>'
            f'<div class="scroll" tabindex="0">{table_html(self.columns, self.rows)}</div></details></figure>'
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


def show(markup: str) -> None:
    """Displays HTML in the notebook; outside one it does nothing visible."""
    from IPython.display import HTML, display

    display(HTML(markup))  # type: ignore[no-untyped-call]
