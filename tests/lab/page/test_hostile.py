"""A run that came from elsewhere is shown, and nothing in it acts: nothing runs, is fetched, or leads away."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from chromium import dom_of, title_of
from nights_of_rows import GATE, page_of, row
from test_what_a_page_tells import NOTEBOOK, SVG, WORDS

from lab.page.marks import still
from lab.page.report import render

pytestmark = pytest.mark.reference


def attacks(address: str) -> dict[str, str]:
    """By name, each would write its name into the document's title, fetch from `address` or lead there."""
    took = "document.title='{}'"
    return {
        "script": f"<script>{took.format('script')}</script>",
        "SCRIPT": f"<SCRIPT src='{address}/a.js'></SCRIPT>",
        "handler": f'<img src=x onerror="{took.format("handler")}">',
        "onload": f'<svg onload="{took.format("onload")}"><script>{took.format("svg script")}</script></svg>',
        "image": f"<img src='{address}/pixel.png'>",
        "svg image": f"<svg><image href='{address}/pixel.svg' /></svg>",
        "style": f"<style>body{{background:url('{address}/css.png')}}@import '{address}/b.css';</style>",
        "link": f"<link rel=stylesheet href='{address}/c.css'><link rel=prefetch href='{address}/d'>",
        "frame": f"<iframe src='{address}/frame' srcdoc=\"<script>parent.{took.format('frame')}</script>\"></iframe>",
        "object": f"<object data='{address}/o'></object><embed src='{address}/e'>",
        "refresh": f"<meta http-equiv=refresh content='0;url={address}/left'>",
        "base": f"<base href='{address}/'>",
        "form": f"<form action='{address}/form'><input autofocus onfocus=\"{took.format('focus')}\"></form>",
        "video": f"<video src='{address}/v.mp4' autoplay></video><audio src='{address}/a.mp3' autoplay></audio>",
    }


def hostile_run(folder: Path, address: str) -> Path:
    """A finished run whose drawing and notebook hold every attack."""
    page_of(folder, [row("job", "gate", "g", GATE)])
    run, everything = folder / "reports" / "r", "".join(attacks(address).values())
    job = run / "jobs" / "job"
    (job / "figures").mkdir()
    (job / "figures" / "f.svg").write_text(SVG.replace("<text>", f"{everything}<text>"))
    (job / "figures" / "f.json").write_text(json.dumps(WORDS))
    html = {"output_type": "display_data", "metadata": {}, "data": {"text/html": everything}}
    drawn = {"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": f"<svg>{everything}</svg>"}}
    code = NOTEBOOK["cells"][0] | {"outputs": [html, drawn]}  # type: ignore[index]
    words = {"cell_type": "markdown", "id": "b", "metadata": {}, "source": everything}
    (job / "executed.ipynb").write_text(json.dumps(NOTEBOOK | {"cells": [words, code]}))
    render(run)
    return run


def test_tags_that_act_become_text_and_the_policy_forbids_the_rest(tmp_path: Path) -> None:
    run = hostile_run(tmp_path, "http://127.0.0.1:1")
    for page in (run / "index.html", run / "notebooks" / "job.html"):
        text = page.read_text(encoding="utf-8")
        head, _, body = text.partition("<body>")
        assert 'http-equiv="Content-Security-Policy" content="default-src \'none\';' in head
        for tag in ("script", "meta", "base", "iframe", "object", "embed", "link", "form"):
            assert f"<{tag}" not in body.lower(), (page.name, tag)
    assert str(still("<metadata>kept</metadata><p>kept</p>")) == "<metadata>kept</metadata><p>kept</p>"


@pytest.mark.slow
def test_a_browser_runs_and_fetches_nothing_of_a_hostile_run(tmp_path: Path) -> None:
    asked: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        run = hostile_run(tmp_path, address)
        bare = tmp_path / "bare.html"
        bare.write_text(f"<title>t</title><script>document.title='ran'</script><img src='{address}/control.png'>")

        assert title_of(dom_of(bare, tmp_path / "profile")) == "ran"
        assert asked == ["/control.png"], "the listener hears a page that does fetch"
        asked.clear()
        for page in (run / "index.html", run / "notebooks" / "job.html"):
            title = title_of(dom_of(page, tmp_path / "profile"))
            assert title.endswith("eagle3lab"), title
        server.shutdown()
    assert asked == []
