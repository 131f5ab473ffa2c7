"""Tells a person where a night stands: one live line on a terminal, plain lines in a log. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class NightProgress:
    """Jobs done of all, the running one's last milestone, and the time left where earlier runs tell it.

    Args:
        seconds: how long each job took before, or is expected to take, by job id; others are counted beside the time.
    """

    def __init__(self, job_ids: list[str], seconds: dict[str, float], console: Console | None = None) -> None:
        self._ids, self._seconds = job_ids, seconds
        self._console = console or Console(stderr=True, file=sys.stderr, highlight=False)
        self._live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),  # a notebook's words may hold brackets
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} jobs"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=len(job_ids))
        self._n_done = 0

    def __enter__(self) -> NightProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def left(self) -> str:
        """How long the jobs that are not done took before, or are expected to take, and how many are not known."""
        known = [self._seconds[job] for job in self._ids[self._n_done :] if job in self._seconds]
        n_new = len(self._ids) - self._n_done - len(known)
        about = [f"about {duration(sum(known))}"] if known else []
        new = [f"{n_new} job{'' if n_new == 1 else 's'} not timed before"] if n_new and known else []
        return f", {' and '.join(about + new)} left" if about else ""

    def began(self, job_id: str) -> None:
        """A job starts."""
        about = self.left()
        self._line(f"[{self._n_done + 1}/{len(self._ids)}] {job_id} starts{about}")
        self._bar.update(self._task, description=f"{job_id}{about}")

    def event(self, job_id: str, event: dict[str, Any]) -> None:
        """A cell or a milestone of the running job."""
        if event["event"] == "say":
            self._line(f"    {event['text']}")
            self._bar.update(self._task, description=f"{job_id}: {event['text']}")
        elif event["event"] == "cell":
            self._bar.update(self._task, description=f"{job_id}: cell {event['n_started']} of {event['n_cells']}")

    def ended(self, job_id: str, words: str, seconds: float) -> None:
        """A job is over."""
        self._n_done += 1
        self._line(f"[{self._n_done}/{len(self._ids)}] {job_id}: {words} ({duration(seconds)})")
        self._bar.update(self._task, completed=self._n_done)

    def _line(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._console.print(f"{stamp} {text}", markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time span for people: `0.4 s`, `38 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
