"""Draws a run from its stored rows, figures and summary: one self-contained page, one a notebook, and the index.

The pages load nothing from anywhere, hold no script, follow the reader's light or dark setting, and print. Reading and
drawing need neither torch nor a GPU, so an old run renders on any laptop.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lab import figures
from lab.errors import RunFailed
from lab.figures import Kept, shown
from lab.night.experiment import FIGURES_FOLDER, SENTENCE
from lab.night.jobs import PAIR_PARAMETERS, recorded
from lab.night.notebook import EXECUTED_FILE, notebook_parts
from lab.night.notices import notices_of
from lab.night.progress import duration
from lab.night.summary import job_word
from lab.page import facts
from lab.rows.environment import Environment, shown_path
from lab.rows.runs import ENVIRONMENT_FILE, read_plan, read_summary, runs_under
from lab.rows.store import JOBS_FOLDER, ROWS_FILE, Row, read_run

PAGE = "index.html"
NOTEBOOKS_FOLDER = "notebooks"
# A page with more rows in one table than this is no longer read; the file beside it holds them all.
MAX_TABLE_ROWS = 200
# Words with a mark each, so that colour is never the only carrier.
MARKS = {
    "pass": "✓",
    "passed": "✓",
    "finished": "✓",
    "fail": "✗",
    "failed": "✗",
    "gate failed": "✗",
    "raised": "✗",
    "died": "✗",
    "timeout": "✗",
    "unusable": "✗",
    "missing": "∅",
    "gate not judged": "∅",
    "incomplete": "∅",
    "not run": "∅",
    "undecided": "?",
    "unsure": "?",
    "faster": "▲",
    "slower": "▼",
    "same": "=",
}
TONES = {"✓": "good", "✗": "bad", "∅": "lost", "?": "open", "▲": "good", "▼": "bad", "=": "calm"}


@dataclass(frozen=True)
class Table:
    """A table of rows for the page."""

    title: str
    columns: list[str]
    cells: list[list[str]]
    n_left_out: int


@dataclass(frozen=True)
class Section:
    """One job on the page."""

    id: str
    notebook: str
    title: str
    job: dict[str, Any]
    word: str
    sentences: list[str]
    parameters: dict[str, Any]
    traceback: str | None
    figures: list[Kept]
    tables: list[Table]
    page: str | None
    executed: str | None
    rows_file: str | None


def render(run_dir: Path) -> Path:
    """Writes the run's pages from what is stored in it, rebuilds the index above it, and gives the run's page.

    Raises:
        ExperimentError: the folder holds no finished run.
        RunFailed: the file system refused a page.
    """
    summary, plan = read_summary(run_dir), read_plan(run_dir)
    machine = Environment.model_validate_json((run_dir / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    rows = read_run(run_dir)
    sections = [_section(run_dir, job, rows, summary["gates"]) for job in summary["jobs"]]
    for section in sections:
        if section.page is not None:
            _render_notebook(run_dir, section)
    summary_ids = {job["id"] for job in plan["jobs"] if job.get("reads_run")}
    sections.sort(key=lambda section: section.id not in summary_ids)  # the summary's figures come first
    content = {
        "machine": machine,
        "sections": sections,
        "pairs": facts.pairs_measured(run_dir, plan, rows),
        "counts": facts.counts(rows),
        "notices": notices_of(rows),
    }
    page = _page(
        "run.html",
        summary=summary,
        telling=telling_parameters([*summary["since"]["changes"], *summary.get("nights", [])]),
        **content,
    )
    _write(run_dir / PAGE, page)
    render_index(run_dir.parent)
    return run_dir / PAGE


def render_index(reports: Path) -> Path:
    """Rebuilds the list of all runs of a reports folder, newest first."""
    runs = [
        {**summary, "folder": path.name, "has_page": (path / PAGE).exists()}
        for path, summary in reversed(runs_under(reports))
    ]
    _write(reports / PAGE, _page("index.html", runs=runs))
    return reports / PAGE


def telling_parameters(changes: list[dict[str, Any]]) -> dict[str, set[str]]:
    """By notebook, the parameters that tell its rows apart: those that are not the same in all of them."""
    seen: dict[str, dict[str, set[str]]] = {}
    for change in changes:
        own = seen.setdefault(change["notebook"], {})
        for name, value in change["parameters"].items():
            own.setdefault(name, set()).add(str(value))
    return {book: {name for name, values in own.items() if len(values) > 1} for book, own in seen.items()}


def _section(run_dir: Path, job: dict[str, Any], rows: list[Row], gates: list[dict[str, Any]]) -> Section:
    folder = run_dir / JOBS_FOLDER / job["id"]
    own = [row for row in rows if row.job == job["id"]]
    content = recorded(folder) or {"parameters": {}, "outcome": {}}
    kept = [Kept.load(path) for path in (folder / FIGURES_FOLDER).glob("*.json")]
    executed, stored = folder / EXECUTED_FILE, folder / ROWS_FILE
    return Section(
        id=job["id"],
        notebook=job["notebook"],
        title=facts.title_of(job["notebook"]),
        job=job,
        word=job_word(job, gates),
        sentences=[str(row.values["text"]) for row in own if row.kind == SENTENCE],
        parameters={
            key: shown_path(value) if isinstance(value, str) else value
            for key, value in content["parameters"].items()
            if key not in PAIR_PARAMETERS
        },
        traceback=content["outcome"].get("traceback"),
        figures=sorted(kept, key=lambda figure: figure.order),
        tables=tables_of(own),
        page=f"{NOTEBOOKS_FOLDER}/{job['id']}.html" if executed.exists() else None,
        executed=executed.relative_to(run_dir).as_posix() if executed.exists() else None,
        rows_file=stored.relative_to(run_dir).as_posix() if stored.exists() else None,
    )


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


def _render_notebook(run_dir: Path, section: Section) -> None:
    parts = notebook_parts(run_dir / JOBS_FOLDER / section.id / EXECUTED_FILE)
    (run_dir / NOTEBOOKS_FOLDER).mkdir(exist_ok=True)
    page = _page("notebook.html", run=run_dir.name, section=section, parts=parts)
    _write(run_dir / NOTEBOOKS_FOLDER / f"{section.id}.html", page)


def _page(template: str, **content: Any) -> str:
    folder = Path(__file__).resolve().parent / "templates"
    templates = Templates(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "shown": shown,
        "duration": duration,
        "moment": moment,
        "mark": mark,
        "sign": lambda word: MARKS.get(word, "·"),
        "percent": percent,
        "numeric": is_numeric,
        "sparkline": sparkline,
    }
    style = (folder / "style.css").read_text(encoding="utf-8")
    css = Markup(figures.colour_css() + style)
    return templates.get_template(template).render(css=css, **content)


def mark(word: str) -> Markup:
    """A word with its mark and tone: `✓ pass`."""
    sign = MARKS.get(word, "·")
    tone = TONES.get(sign, "calm")
    return Markup('<span class="word {}"><span class="sign" aria-hidden="true">{}</span> {}</span>').format(
        tone, sign, word
    )


def moment(text: str) -> str:
    """An ISO moment for people: `21 November 2026, 10:15 UTC`."""
    at = datetime.fromisoformat(text)
    return f"{at.day} {at:%B %Y, %H:%M} UTC"


def percent(ratio: float | None) -> str:
    """A ratio as a signed change: 1.034 is `+3.4%`."""
    return "" if ratio is None else f"{(ratio - 1) * 100:+.1f}%"


def is_numeric(text: str) -> bool:
    """Whether a cell's text is a number, and so belongs to the right."""
    try:
        float(text)
    except ValueError:
        return False
    return True


SPARK_WIDTH, SPARK_HEIGHT, SPARK_ROOM = 160, 28, 3  # of a series in a table, pixels


def sparkline(series: dict[str, Any]) -> Markup:
    """A series over the nights as one small line, its steps as upright marks, with its words for those who hear it."""
    values = [float(value) for value in series["values"]]
    low, high = min(values), max(values)
    across = (SPARK_WIDTH - 2 * SPARK_ROOM) / max(len(values) - 1, 1)
    up = (SPARK_HEIGHT - 2 * SPARK_ROOM) / (high - low or 1.0)
    points = [(SPARK_ROOM + i * across, SPARK_HEIGHT - SPARK_ROOM - (v - low) * up) for i, v in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = [SPARK_ROOM + (step["at"] - 0.5) * across for step in series["steps"]]
    uprights = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{SPARK_HEIGHT}" class="step"/>' for x in marks)
    words = f"{len(values)} nights, from {shown(values[0])} to {shown(values[-1])}, {len(marks)} steps"
    end = f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="2.5"/>'
    return Markup(
        f'<svg class="spark" role="img" aria-label="{words}" width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" '
        f'viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}">{uprights}<polyline points="{line}"/>{end}</svg>'
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFailed(
            f"{path.name} could not be written: {error.strerror or error}",
            "a file system with room for the page; the rows are stored and safe",
            f"free some space, then run `eagle3lab report {path.parent.name}`",
        ) from error
