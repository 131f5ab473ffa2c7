"""A page in headless Chromium: what its script makes of it, at a width and in light or dark."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCHEMES = {"dark": 0, "light": 1}


def chromium() -> str:
    """The program's path; without it the test is skipped with that reason."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


def dom_of(page: Path, profile: Path, *, scheme: str = "light", budget_ms: int = 4000) -> str:
    """The document that a browser has made of a page after so much of its own time.

    Args:
        profile: folder of the browser's own files.
    """
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={budget_ms}",
        f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def title_of(dom: str) -> str:
    """What the document's title is by then: where a test's script leaves its answer."""
    return dom[dom.index("<title>") + 7 :].split("</title>")[0]


def framed(page: Path, folder: Path, width: int, script: str) -> Path:
    """A page of ours that shows `page` in a frame of that width, and runs `script` once it is there.

    A window has a least width of its own, a frame has none. The page's policy is taken out, so that a script can read
    what style makes of it.
    """
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    quoted = html.replace("&", "&amp;").replace('"', "&quot;")
    outer = folder / "outer.html"
    outer.write_text(
        f'<!doctype html><title>t</title><iframe id="frame" style="width:{width}px;height:900px;border:0" '
        f'srcdoc="{quoted}"></iframe><script>frame.onload = () => {{{script}}}</script>',
        encoding="utf-8",
    )
    return outer
