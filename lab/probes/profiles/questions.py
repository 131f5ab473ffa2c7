"""The questions to a trace that ship as Perfetto SQL (`queries/*.sql`), and their answers without Perfetto.

Perfetto's interface and its trace processor take the files as they are. Here the same text runs over a table of slices
in SQLite, which Perfetto's own engine is built on, with the columns that a trace in Chrome's format has there.
Source: google/perfetto, table `slice` and function `EXTRACT_ARG` of the trace processor, Apache-2.0.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUERIES = "queries"  # the folder of the files, here and beside a trace
FOLDER = Path(__file__).parent / QUERIES
# In the order in which one asks.
ORDER = ("time_by_stage", "cards", "launches", "gaps", "waits")
_COLUMNS = (
    "id INTEGER PRIMARY KEY, ts INTEGER, dur INTEGER, track_id INTEGER, category TEXT, name TEXT, arg_set_id INTEGER"
)


@dataclass(frozen=True)
class Question:
    """One file.

    Attributes:
        name: the file's. sentence: what it asks, its first line. sql: its whole text.
    """

    name: str
    sentence: str
    sql: str


def questions() -> list[Question]:
    """All that ship."""
    texts = {name: (FOLDER / f"{name}.sql").read_text(encoding="utf-8") for name in ORDER}
    return [Question(name, text.split("\n", 1)[0].removeprefix("-- "), text) for name, text in texts.items()]


def copy_questions(folder: Path) -> list[Path]:
    """Puts the files into `folder`, beside a trace."""
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(FOLDER / f"{name}.sql", folder / f"{name}.sql")) for name in ORDER]


class Slices:
    """A trace's slices as Perfetto's importer has them: nanoseconds, a track a line, arguments by key.

    Args:
        events: `traceEvents` of Chrome's format.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._arguments: list[dict[str, Any]] = []
        self._tables = sqlite3.connect(":memory:")
        self._tables.create_function("EXTRACT_ARG", 2, self._argument, deterministic=True)
        self._tables.execute(f"CREATE TABLE slice ({_COLUMNS})")
        tracks: dict[tuple[int, int], int] = {}
        for event in events:
            if event.get("ph") != "X":
                continue
            track = tracks.setdefault((event.get("pid", 0), event.get("tid", 0)), len(tracks))
            self._arguments.append({f"args.{key}": value for key, value in event.get("args", {}).items()})
            begin, length = (int(float(event.get(name, 0)) * 1e3) for name in ("ts", "dur"))
            row = (begin, length, track, event.get("cat"), event["name"], len(self._arguments) - 1)
            self._tables.execute(
                "INSERT INTO slice (ts, dur, track_id, category, name, arg_set_id) VALUES (?, ?, ?, ?, ?, ?)", row
            )

    def _argument(self, arg_set_id: int, key: str) -> Any:
        return self._arguments[arg_set_id].get(key)

    def answer(self, question: Question) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows."""
        found = self._tables.execute(question.sql)
        return [column[0] for column in found.description], [list(row) for row in found]
