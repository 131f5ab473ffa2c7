"""JupyterLab on a folder of copies, in a real browser: opened, all cells run, looked at.

Needs JupyterLab, ipywidgets, playwright (the extras `jupyter` and `browser`) and a Chromium; `absent` says what is not
there. Nothing of this machine's own Jupyter settings is read or written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from places import ROOT

NEEDS = ("jupyterlab", "ipywidgets", "playwright")
START_S, RUN_S, STEP_S, STARTS = 180.0, 420.0, 90.0, 10  # generous: a machine of shared cores may be busy
# All cells stay in the page, those out of sight as well; nothing is asked of the network or of the reader.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
RAISED = '[data-mime-type="application/vnd.jupyter.error"]'


def chromium() -> str | None:
    """The browser of this machine, if it has one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def absent() -> str:
    """Why no notebook can be opened in a browser here; empty where one can."""
    lacking = [name for name in NEEDS if find_spec(name) is None]
    if lacking:
        return f"without {' and '.join(lacking)} (the extras jupyter and browser)"
    return "" if chromium() else "no Chromium on this machine"


@contextmanager
def jupyterlab(copies: Path, scratch: Path) -> Iterator[str]:
    """A server on a folder; gives its address. It and its kernels end with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    environ = os.environ | {f"JUPYTER_{name}": str(scratch / name.lower()) for name in places}
    environ |= {
        "JUPYTERLAB_WORKSPACES_DIR": str(scratch / "workspaces"), "JUPYTERLAB_SETTINGS_DIR": str(scratch / "settings"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(scratch / "ipython"),
    }  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", f"--port={port}",
               "--IdentityProvider.token=", str(copies)]  # fmt: skip
    for plugin, chosen in SETTINGS.items():
        written = scratch / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(chosen), encoding="utf-8")
    with (scratch / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(server, port, scratch / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start: {log.read_text(errors='replace')[-2000:]}")


@contextmanager
def browser_page(*, dark: bool = False) -> Iterator[Any]:
    """A page of Chromium, 1440 wide."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 1100}, color_scheme="dark" if dark else "light")
        page.set_default_timeout(STEP_S * 1000)
        try:
            yield page
        finally:
            browser.close()


def open_notebook(page: Any, address: str, name: str) -> None:
    """Opens a notebook alone on the page, and waits for its kernel."""
    page.goto(f"{address}/lab/tree/{name}?reset", timeout=START_S * 1000)
    page.wait_for_selector(".jp-Notebook", timeout=START_S * 1000)
    page.wait_for_selector(".jp-StatusBar-TextItem:has-text('| Idle')", timeout=START_S * 1000)


def run_all(page: Any) -> None:
    """Runs every cell, as the menu does, and waits until the kernel has done the last.

    Raises:
        RuntimeError: a cell raised, or JupyterLab asks something; what it said.
    """
    for _ in range(STARTS):  # what is asked of a kernel that is not yet connected is forgotten without a word
        page.click(".lm-MenuBar-itemLabel:has-text('Run')")
        page.click(".lm-Menu-item:has-text('Run All Cells') >> nth=0")
        page.wait_for_timeout(3000)
        if page.locator("dialog.jp-Dialog").count():
            raise RuntimeError(page.locator("dialog.jp-Dialog").first.inner_text())
        if page.locator(".jp-CodeCell .jp-InputPrompt", has_text=re.compile(r"\[[*\d]")).count():
            break
    page.wait_for_function(
        f"""() => {{
          const shown = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent);
          return document.querySelector('{RAISED}') || (shown.length && shown.every(text => /\\[\\d+\\]/.test(text)));
        }}""",
        timeout=RUN_S * 1000,
    )
    raised = page.locator(RAISED)
    if raised.count():
        raise RuntimeError(raised.first.inner_text())


def use_theme(page: Any, name: str) -> None:
    """Chooses a theme of JupyterLab by its name in the menu."""
    page.click(".lm-MenuBar-itemLabel:has-text('Settings')")
    page.hover(".lm-Menu-item:has-text('Theme')")
    page.click(f".lm-Menu-item:has-text('{name}')")
    page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{'false' if 'Dark' in name else 'true'}'")
