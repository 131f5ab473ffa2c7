"""What notebook 50_profile writes down: the rows it read, the audit's gate, and the trace to open in Perfetto."""

from __future__ import annotations

import html
import shutil
from typing import Any

from lab.figures import table_html
from lab.night.experiment import Experiment
from lab.probes.profiles.capture import chrome_trace, read_chrome_trace
from lab.probes.profiles.figures import n_loud, quiet_words
from lab.probes.profiles.questions import QUERIES, Slices, copy_questions, questions
from lab.probes.profiles.rows import KIND, NO_ROWS, TRACE, ProfileRows
from lab.rows.store import JOBS_FOLDER

_MOST_LINES = 12  # of an answer that a page shows; the query gives them all
PERFETTO = "https://ui.perfetto.dev"


def write_ranges(exp: Experiment, rows: ProfileRows | None) -> None:
    """A row a range, and one for everything that the capture lacks or was not asked for."""
    if rows is None:
        exp.missing(KIND, "every range", NO_ROWS)
        return
    for name, of in rows.ranges.items():
        values: dict[str, Any] = {key: value for key, value in of.items() if key != "level"}
        exp.write(KIND, name, values, level=of["level"], tool=rows.tool, subject=rows.subject)
    for what, reason in rows.missing.items():
        exp.missing(KIND, what, reason, tool=rows.tool, subject=rows.subject)
    for what, reason in rows.not_asked.items():
        exp.not_asked(KIND, what, reason, tool=rows.tool, subject=rows.subject)


def keep_trace(exp: Experiment, rows: ProfileRows | None) -> str:
    """Puts the trace beside the notebook's rows; HTML that links to it and says how to open it."""
    if rows is None or rows.trace is None:
        exp.missing(KIND, "a trace for Perfetto", "no capture lies beside the rows" if rows else NO_ROWS)
        return "<p>No trace lies beside the rows.</p>"
    name = TRACE + (".gz" if rows.trace.suffix == ".gz" else "")
    kept = exp.out / name
    if rows.trace.resolve() != kept.resolve():
        shutil.copyfile(rows.trace, kept)
    copy_questions(exp.out / QUERIES)
    # Pages of a run lie in notebooks/ beside jobs/; by hand there is no page.
    link = name if exp.job == "by-hand" else f"../{JOBS_FOLDER}/{exp.job}/{name}"
    return (
        f'<p><a href="{link}" download>{name}</a>: open it in <a href="{PERFETTO}">Perfetto</a>; {QUERIES}/ beside it '
        "holds questions for its page of SQL.</p>"
    )


def answers(rows: ProfileRows | None) -> str:
    """HTML: what the trace beside the rows answers to every question that ships, as the query's first rows."""
    if rows is None or rows.trace is None:
        return "<p>No trace lies beside the rows.</p>"
    slices = Slices(chrome_trace(read_chrome_trace(rows.trace))["traceEvents"])
    parts = []
    for question in questions():
        columns, lines = slices.answer(question)
        told = table_html(columns, lines[:_MOST_LINES]) if lines else "<p>Nothing.</p>"
        parts.append(f"<p>{html.escape(question.sentence)} ({QUERIES}/{question.name}.sql)</p>{told}")
    return "".join(parts)


def write_gates(exp: Experiment, rows: ProfileRows | None) -> None:
    """On a GPU: ranges wait for nothing. Elsewhere, and with no rows, there is nothing to judge."""
    if rows is not None and rows.on_gpu and rows.tool in ("torch", "nsys"):
        loud = n_loud(rows)
        exp.gate("ranges wait for nothing", loud == 0, value=loud, threshold=0, detail=quiet_words(rows))
