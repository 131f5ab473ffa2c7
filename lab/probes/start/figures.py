"""First requests drawn part after part, a line a kind of start; and the limits that they are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from lab.figures import HATCHES, SERIES, Drawing
from lab.night.experiment import Experiment
from lab.probes.start.measure import EMPTY, FILE, KIND
from lab.probes.start.parts import PARTS
from lab.rows.committed import newest_committed
from lab.rows.store import Row, read_rows

NO_ROWS = f"no reports/reference/*/{FILE}; make one: eagle3lab startup --out {FILE}"
_LEAST_SHARE = 0.01  # of the longest start: shorter parts are in the table alone


def chosen(path: Path | None) -> list[Row]:
    """The rows of starts in a file, else in the newest committed one; of several of one kind the last."""
    found = path or newest_committed(FILE)
    rows = [row for row in read_rows(found) if row.kind == KIND] if found is not None else []
    return list({row.name: row for row in rows}.values())


def parts_of(row: Row) -> dict[str, float]:
    """Seconds of each part of a measured start, in order."""
    return {part: seconds for part in PARTS if (seconds := row.number(f"part_s.{part}")) is not None}


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """One line a start: when its tokens came, its parts, what was compiled; seconds."""
    return pd.DataFrame(
        {
            "start": row.name, "first token": row.number("first_token_s"), "second token": row.number("second_token_s"),
            **parts_of(row), "kernels compiled": row.number("n_compiled"),
        }
        for row in rows
    )  # fmt: skip


def waterfall(rows: Sequence[Row], source: str) -> Drawing:
    """Starts, measured ones, as lines of parts that follow each other.

    Args:
        source: where the rows come from, for the caption.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(7.2, 1.9 + 0.5 * len(rows)))
    longest = max(sum(parts_of(row).values()) for row in rows)
    shown = [part for part in PARTS if any(parts_of(row).get(part, 0.0) >= _LEAST_SHARE * longest for row in rows)]
    for y, row in enumerate(rows):
        at = 0.0
        for part, seconds in parts_of(row).items():
            if part in shown:
                look = shown.index(part)
                hatch = HATCHES[look // len(SERIES)]
                axes.barh(y, seconds, left=at, height=0.6, color=SERIES[look % len(SERIES)][0], hatch=hatch)
            at += seconds
        axes.annotate(
            f"{row.number('first_token_s'):.1f} s", (at, y), xytext=(4, 0), textcoords="offset points", va="center"
        )
    for look, part in enumerate(shown):
        axes.barh([0], [0], color=SERIES[look % len(SERIES)][0], hatch=HATCHES[look // len(SERIES)], label=part)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds since the process was asked for")
    axes.set_title("From nothing to the first token")
    fig.legend(fontsize=8.5, loc="outside lower center", ncols=5)
    words = words_of(rows)
    return Drawing(
        fig, table_of(rows), f"Parts of {len(rows)} first requests, one after the other. {words}", f"{words} {source}."
    )


def words_of(rows: Sequence[Row]) -> str:
    """The longest start and what it is made of, in a sentence."""
    slowest = max(rows, key=lambda row: row.number("first_token_s") or 0.0)
    parts = parts_of(slowest)
    most = sorted(parts, key=lambda part: parts[part], reverse=True)[:2]
    named = " and ".join(f"{parts[part]:.1f} s of {part}" for part in most)
    return f"{slowest.name} has its first token after {slowest.number('first_token_s'):.1f} s, {named} among it."


def write_gates(exp: Experiment, rows: Sequence[Row], limits: Mapping[str, float]) -> None:
    """The moment of the first token of every start against its limit, seconds; 0 sets none.

    Args:
        limits: of "plain" and "drafts" with no kernels stored, and of "stored", with a cache or an archive.
    """
    for row in rows:
        drafts = "drafts" if row.parameters.get("k") else "plain"
        limit = limits[drafts] if row.parameters.get("kernels") == EMPTY else limits["stored"]
        if limit > 0:
            value = row.number("first_token_s")
            passed = None if value is None else value <= limit
            exp.gate(f"first token, {row.name}", passed, value=value, threshold=limit, detail=row.reason or "")
    if not rows and any(limit > 0 for limit in limits.values()):
        exp.gate("first token", None, detail="no start was measured")
