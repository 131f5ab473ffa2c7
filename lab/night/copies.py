"""Notebooks to work in: copies, so that the ones that are committed stay without outputs and as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.night.parameters import notebooks_folder


def copy_notebooks(folder: Path) -> list[str]:
    """Copies every notebook into `folder` that is not there yet; a line for each about what was done.

    A copy is never overwritten: it may hold someone's work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for source in sorted(notebooks_folder().glob("*.ipynb")):
        copy = folder / source.name
        if not copy.exists():
            shutil.copy2(source, copy)  # with its time, by which a later look sees whether the source has changed
            lines.append(f"{copy}: copied")
        elif source.stat().st_mtime > copy.stat().st_mtime:
            lines.append(f"{copy}: kept, though its source is newer; delete it and run this again for a fresh copy")
        else:
            lines.append(f"{copy}: kept")
    return lines
