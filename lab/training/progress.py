"""What a training run says while it works: a bar on a terminal, a line at every tenth of a stage elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Reporter:
    """Prints milestones, and the progress of the stage at hand. Use it in a `with` statement.

    Args:
        bar: draw a bar; None asks whether standard output is a terminal.
    """

    def __init__(self, bar: bool | None = None) -> None:
        self._started = time.monotonic()
        self._console = Console(highlight=False) if (sys.stdout.isatty() if bar is None else bar) else None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._tenth = -1

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.finish()

    def say(self, text: str) -> None:
        """One milestone line, with the seconds since the start."""
        line = f"[{time.monotonic() - self._started:7.1f} s] {text}"
        if self._console is not None:
            self._console.print(line, markup=False)
        else:
            print(line, flush=True)

    def start(self, stage: str) -> None:
        """Begin a stage; a running one ends."""
        self.finish()
        self._stage, self._tenth = stage, -1
        if self._console is not None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
            self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            self._progress.start()
            self._task = self._progress.add_task(stage, total=1.0, note="")

    def advance(self, share: float, note: str) -> None:
        """Show how far the stage is.

        Args:
            share: of the stage that is done, 0 to 1.
            note: step, loss, speed.
        """
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=share, note=note)
        elif int(share * 10) > self._tenth:
            self._tenth = int(share * 10)
            self.say(f"{self._stage} {100 * share:3.0f} %  {note}")

    def finish(self) -> None:
        """End the stage at hand."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._task = None, None
