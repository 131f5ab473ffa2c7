"""Draws a run from its stored rows, figures and summary: one self-contained page, one a notebook, and the index.

The pages load nothing from anywhere, hold no script, follow the reader's light or dark setting, and print. Reading and
drawing need neither torch nor a GPU, so an old run renders on any laptop.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lab import figures
from lab.errors import LabError, RunFailed
from lab.figures import shown
from lab.night.notices import notices_of
from lab.night.progress import duration
from lab.page import facts, first_screen
from lab.page.all_runs import PAGE, filters_of, listed_runs
from lab.page.findings.finding import Finding, Night
from lab.page.findings.remedies import remedy_of
from lab.page.findings.rules import findings_of, headline_of
from lab.page.marks import MARKS, coded, is_numeric, mark, moment, sparkline, still
from lab.page.runbook import sections_for
from lab.page.sections import NOTEBOOKS_FOLDER, Section, section_of
from lab.rows.runs import left_out_words, read_environment, read_plan, read_whole_summary, runs_under
from lab.rows.store import JOBS_FOLDER, ROWS_FILE, Row, read_rows
from lab.rows.stored.moments import is_to_come
from lab.rows.values import percent


def render(run_dir: Path) -> Path:
    """As `render_all`; gives the run's page alone."""
    return render_all(run_dir)[0]


def render_all(run_dir: Path) -> list[Path]:
    """Writes the run's pages from what is stored in it, and rebuilds the index above it.

    Gives every file that it wrote: the run's page, those of its notebooks, the index.

    Raises:
        ExperimentError: the folder holds no finished run.
        RunFailed: the file system refused a page.
    """
    summary, plan = read_whole_summary(run_dir), read_plan(run_dir)
    machine = read_environment(run_dir)
    rows, faults = _rows(run_dir)
    explained: set[str] = set()
    sections = [
        section_of(run_dir, job, rows, summary["gates"], faults.get(job["id"], []), explained)
        for job in summary["jobs"]
    ]
    notebooks = [_render_notebook(run_dir, section) for section in sections if section.page is not None]
    summary_ids = {job["id"] for job in plan["jobs"] if job.get("reads_run")}
    sections.sort(key=lambda section: section.id not in summary_ids)  # the summary's figures come first
    figures_of = {section.id: [figure.name for _, figure in section.figures if figure.is_drawn] for section in sections}
    night = Night(summary, rows, figures_of)
    found = findings_of(night)
    content = {
        "headline": headline_of(summary["word"], found),
        "found": found,
        "numbers": first_screen.numbers(night),
        "picture": first_screen.picture(night, found, [job for job in figures_of if job in summary_ids]),
        "remedies": {gate["name"]: remedy_of(gate["name"]) for gate in summary["gates"] if gate["word"] != "pass"},
        "runbook": sections_for(_anchors(summary, found)),
        "machine": machine,
        "sections": sections,
        "pairs": facts.pairs_measured(run_dir, plan, rows),
        "counts": facts.counts(rows),
        "notices": [*faults.get("", []), *summary.get("clock", []), *notices_of(rows)],
    }
    page = page_text(
        "run.html",
        summary=summary,
        telling=telling_parameters([*summary["since"]["changes"], *summary.get("nights", [])]),
        **content,
    )
    write_page(run_dir / PAGE, page)
    return [run_dir / PAGE, *notebooks, render_index(run_dir.parent)]


def _anchors(summary: dict[str, Any], found: list[Finding]) -> set[str]:
    """Sections of the runbook that the page leads to."""
    red = {remedy_of(gate["name"]).anchor for gate in summary["gates"] if gate["word"] != "pass"}
    return red | {finding.remedy.anchor for finding in found if finding.remedy}


def _rows(run_dir: Path) -> tuple[list[Row], dict[str, list[str]]]:
    """All rows of a run that can be read, and what cannot: by job, the night's own under no name."""
    rows: list[Row] = []
    faults: dict[str, list[str]] = {}
    for job, path in [("", run_dir), *((path.name, path) for path in sorted((run_dir / JOBS_FOLDER).glob("*")))]:
        try:
            rows += read_rows(path / ROWS_FILE)
        except LabError as error:
            faults[job] = [error.what]
    return rows, faults


def render_index(reports: Path) -> Path:
    """Rebuilds the list of all runs of a reports folder, newest first; those that cannot be read are named below it."""
    runs = runs_under(reports)
    listed, left_out = listed_runs(runs)
    notices = [*left_out_words(left_out), *_from_the_future(runs.found)]
    filters = filters_of(listed)
    write_page(reports / PAGE, page_text("index.html", runs=listed, filters=filters, notices=notices))
    return reports / PAGE


def _from_the_future(found: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    """A sentence for each run that says it is still to begin."""
    moments = [(path.name, summary["started_at"]) for path, summary in found]
    return [
        f"run {name} says that it began at {at}, which is still to come: a clock was moved"
        for name, at in moments
        if is_to_come(at)
    ]


def telling_parameters(changes: list[dict[str, Any]]) -> dict[str, set[str]]:
    """By notebook, the parameters that tell its rows apart: those that are not the same in all of them."""
    seen: dict[str, dict[str, set[str]]] = {}
    for change in changes:
        own = seen.setdefault(change["notebook"], {})
        for name, value in change["parameters"].items():
            own.setdefault(name, set()).add(str(value))
    return {book: {name for name, values in own.items() if len(values) > 1} for book, own in seen.items()}


def _render_notebook(run_dir: Path, section: Section) -> Path:
    folder = run_dir / NOTEBOOKS_FOLDER
    if folder.is_symlink():  # of a run that came from elsewhere: its pages are written into it and nowhere else
        raise RunFailed(
            f"{folder.name} in {run_dir.name!r} is a link",
            "a folder of the run",
            f"remove it, then draw {run_dir.name}",
        )
    folder.mkdir(exist_ok=True)
    page = page_text("notebook.html", run=run_dir.name, section=section, parts=section.parts)
    write_page(folder / f"{section.id}.html", page)
    return folder / f"{section.id}.html"


def page_text(template: str, **content: Any) -> str:
    """A page from its template, with the style and the filters that every page has."""
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
        "coded": coded,
        "still": still,
        "sign": lambda word: MARKS.get(word, "·"),
        "percent": percent,
        "numeric": is_numeric,
        "sparkline": sparkline,
    }
    style = (folder / "style.css").read_text(encoding="utf-8")
    css = Markup(figures.colour_css() + style)
    return templates.get_template(template).render(css=css, **content)


def write_page(path: Path, text: str) -> None:
    """A whole page or none; a link in its place is replaced, never followed."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("x", encoding="utf-8") as stream:
            stream.write(text)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunFailed(
            f"{path.name} could not be written: {error.strerror or error}",
            "a file system with room for the page; the rows are stored and safe",
            f"free some space, then draw {path.parent.name or path.name} again with the same command",
        ) from error
