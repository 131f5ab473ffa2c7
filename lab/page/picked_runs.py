"""Any two runs picked and laid over each other, for the notebook of the night."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lab.page.overlaid import overlaid
from lab.rows.runs import committed_runs, runs_under
from lab.rows.store import read_run
from lab.widgets import Control, Picker


def known_runs(run_dir: Path) -> dict[str, Path]:
    """Runs that may be picked, by a name each, oldest first: those beside this one, the committed ones, and this."""
    beside = [path for path, _ in runs_under(run_dir.parent).found]
    committed = [path for path, _ in committed_runs()]
    paths = {path.resolve(): path for path in [*committed, *beside, run_dir]}
    names = [path.name for path in paths]
    return {
        path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}": path for path in paths.values()
    }


def run_controls(runs: Mapping[str, Path], before: Path | None, after: Path) -> dict[str, Control]:
    """Both sides, at first these; nothing where there is one run alone.

    Args:
        before: None: the run that comes before `after` in the list.
    """
    names = {path.resolve(): name for name, path in runs.items()}
    if len(names) < 2:
        return {}
    last = names[after.resolve()]
    others = [name for name in runs if name != last]
    first = names.get(before.resolve(), others[-1]) if before else others[-1]
    return {"before": Picker("before", tuple(runs), first), "after": Picker("after", tuple(runs), last)}


def overlaid_html(runs: Mapping[str, Path], *, before: str, after: str) -> str:
    """The curves that two runs share, laid over each other, or why there are none."""
    if before == after:
        return "<p>Both are the same run: pick another one.</p>"
    kept = overlaid((before, read_run(runs[before])), (after, read_run(runs[after])))
    figures = "".join(figure.html() for figure in kept)
    return figures or f"<p>{before} and {after} share no curve of speed or acceptance over two depths.</p>"
