"""One job on a page, from what it left in its folder; a file that cannot be read costs its own place and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lab.errors import LabError
from lab.figures import MOST_VIEWS, TOKEN_VIEW, Kept, TokenView, shown, tokens_html
from lab.night.experiment import FIGURES_FOLDER, SENTENCE
from lab.night.jobs import PAIR_PARAMETERS, recorded
from lab.night.notebook import EXECUTED_FILE, notebook_parts
from lab.night.summary import job_word
from lab.page.explained import Explanation, explanation_of
from lab.rows.environment import shown_path
from lab.rows.store import JOBS_FOLDER, ROWS_FILE, Row

NOTEBOOKS_FOLDER = "notebooks"
# A page with more rows in one table than this is no longer read; the file beside it holds them all.
MAX_TABLE_ROWS = 200
# What a file that was cut short or edited may raise where it is taken apart.
_DAMAGE = (LabError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

Read = TypeVar("Read")


@dataclass(frozen=True)
class Table:
    """A table of rows for the page."""

    title: str
    columns: list[str]
    cells: list[list[str]]
    n_left_out: int


@dataclass(frozen=True)
class Section:
    """One job on the page.

    Attributes:
        title: the question that its notebook answers. about: its notebook's explanation, HTML; empty where an earlier
            section of the page has it.
        faults: a sentence for each of its files that cannot be read.
        figures: in their order, each with the text of the notebook that goes with it, HTML.
        tokens: prompts token by token, HTML; empty where no row holds any.
        page: its notebook's page, drawn from `parts`; None where there is none.
    """

    id: str
    notebook: str
    title: str
    about: str
    job: dict[str, Any]
    word: str
    faults: list[str]
    sentences: list[str]
    parameters: dict[str, Any]
    traceback: str | None
    figures: list[tuple[str, Kept]]
    tokens: str
    tables: list[Table]
    page: str | None
    parts: list[dict[str, Any]]
    executed: str | None
    rows_file: str | None
    repros: list[str]


def section_of(
    run_dir: Path,
    job: dict[str, Any],
    rows: list[Row],
    gates: list[dict[str, Any]],
    faults: list[str],
    explained: set[str],
) -> Section:
    """A job with its rows, its figures and its notebook.

    Args:
        faults: what is known to be damaged already.
        explained: texts of notebooks that the page has already; what this section adds is added to it.
    """
    folder, faults = run_dir / JOBS_FOLDER / job["id"], list(faults)
    own = [row for row in rows if row.job == job["id"]]
    content, why = recorded(folder)
    faults += [why] if why else []
    drawings = sorted((folder / FIGURES_FOLDER).glob("*.json"))
    kept = [figure for path in drawings if (figure := _read(path, _figure, faults)) is not None]
    executed, stored = folder / EXECUTED_FILE, folder / ROWS_FILE
    parts = _read(executed, notebook_parts, faults) if executed.exists() else None
    words = _read(executed, lambda path: explanation_of(job["notebook"], path), []) or Explanation()
    about = "" if words.about in explained else words.about
    explained.add(words.about)
    parameters = content["parameters"] if content else {}
    return Section(
        id=job["id"],
        notebook=job["notebook"],
        title=words.question,
        about=about,
        job=job,
        word=job_word(job, gates),
        faults=faults,
        sentences=[str(row.values.get("text", "")) for row in own if row.kind == SENTENCE],
        parameters={
            key: shown_path(value) if isinstance(value, str) else value
            for key, value in parameters.items()
            if key not in PAIR_PARAMETERS
        },
        traceback=content["outcome"].get("traceback") if content else None,
        figures=[(words.before(each.name, explained), each) for each in sorted(kept, key=lambda each: each.order)],
        tokens=tokens_html(_views(own, faults), f"tokens-{job['id']}"),
        tables=tables_of(own),
        page=f"{NOTEBOOKS_FOLDER}/{job['id']}.html" if parts is not None else None,
        parts=parts or [],
        executed=executed.relative_to(run_dir).as_posix() if executed.exists() else None,
        rows_file=stored.relative_to(run_dir).as_posix() if stored.exists() else None,
        repros=[path.relative_to(run_dir).as_posix() for path in sorted(folder.glob("repro/*/repro.py"))],
    )


def _read(path: Path, read: Callable[[Path], Read], faults: list[str]) -> Read | None:
    try:
        return read(path)
    except _DAMAGE as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        faults.append(f"{path.name} cannot be shown: {first}")
        return None


def _figure(path: Path) -> Kept:
    figure = Kept.load(path)
    if figure.is_drawn and not figure.svg.endswith("</svg>"):  # what follows on the page would become part of it
        raise ValueError(f"its drawing {path.stem}.svg is cut short")
    return figure


def _views(rows: list[Row], faults: list[str]) -> list[TokenView]:
    """The first token views of a job; one that is damaged, or is larger than a view may be, is left out and named."""
    views = []
    for row in [row for row in rows if row.kind == TOKEN_VIEW and row.status == "measured"][:MOST_VIEWS]:
        try:
            views.append(TokenView.of_row(row.values))
        except ValueError as error:
            faults.append(f"the tokens of {row.name} cannot be shown: {str(error).splitlines()[0]}")
    return views


def tables_of(rows: list[Row]) -> list[Table]:
    """One table for each kind of row; samples stay in the file; gates, sentences and machine have their own places."""
    kinds = dict.fromkeys(row.kind for row in rows if row.kind not in ("gate", "environment", SENTENCE))
    return [_table(kind, [row for row in rows if row.kind == kind]) for kind in kinds]


def _table(kind: str, rows: list[Row]) -> Table:
    grid = list(dict.fromkeys(key for row in rows for key in row.parameters))
    values = list(
        dict.fromkeys(key for row in rows for key, value in row.values.items() if not isinstance(value, list))
    )
    any_left_out = any(row.status != "measured" for row in rows)
    columns = ["name", *grid, *values, *(["not measured because"] if any_left_out else [])]
    cells = []
    for row in rows[:MAX_TABLE_ROWS]:
        line = [row.name, *(_cell(row.parameters, key) for key in grid), *(_cell(row.values, key) for key in values)]
        why = "" if row.status == "measured" else f"{row.status}: {row.reason}"
        cells.append([*line, why] if any_left_out else line)
    return Table(kind, columns, cells, max(0, len(rows) - MAX_TABLE_ROWS))


def _cell(values: dict[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else ""
