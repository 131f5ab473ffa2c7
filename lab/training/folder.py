"""The folder of a training run: whose it is, which stages are finished, and where unfinished work lies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError

RUN_FILE = "run.json"


class RunFolder:
    """A folder that one run owns; another run, or anything else that lies there, is never touched.

    Args:
        path: the folder, made when it does not exist.
        settings: JSON values that say which run it is.
        resume: keep finished stages and saved states of the same run; else it starts anew.

    Raises:
        ExperimentError: the folder is a file, holds another run, or holds something that is no run.
    """

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool = True) -> None:
        self.path, self.work = path, path / "work"
        self.settings = dict(json.loads(json.dumps(settings)))
        self.finished: dict[str, Any] = {}
        if path.exists() and not path.is_dir():
            raise ExperimentError(f"{path} is a file", "a folder, new or of the same run", "give another --out")
        if (path / RUN_FILE).exists():
            written = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
            self._require_same(written["settings"])
            self.finished = written["finished"] if resume else {}
        elif path.is_dir() and any(path.iterdir()):
            raise ExperimentError(
                f"{path} is not empty and holds no training run",
                f"a new or empty folder, or one with the {RUN_FILE} of the same run",
                "give another --out",
            )
        if not resume:
            self.clear_work()
        path.mkdir(parents=True, exist_ok=True)
        self._write()

    def is_finished(self, stage: str) -> bool:
        """Whether a stage needs no more work."""
        return stage in self.finished

    def finish(self, stage: str, outcome: dict[str, Any]) -> None:
        """Record a stage's outcome."""
        self.finished[stage] = outcome
        self._write()

    def clear_work(self) -> None:
        """Remove saved states."""
        if self.work.exists():
            shutil.rmtree(self.work)

    def _require_same(self, written: dict[str, Any]) -> None:
        differing = [key for key in self.settings if self.settings[key] != written.get(key)]
        if differing:
            shown = "; ".join(f"{key}: {written.get(key)} there, {self.settings[key]} now" for key in differing)
            raise ExperimentError(
                f"{self.path} holds another run ({shown})",
                "the same options and text as before, to finish or repeat that run",
                "give another --out, or the options it was started with",
            )

    def _write(self) -> None:
        partial = self.path / (RUN_FILE + ".partial")
        text = json.dumps({"settings": self.settings, "finished": self.finished}, indent=1) + "\n"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.path / RUN_FILE)
