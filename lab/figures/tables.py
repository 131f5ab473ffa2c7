"""Values and tables as people read them: each figure carries its table, which fits wide and narrow screens."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

Cell = str | int | float | bool | None


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
