"""Everybody can read a report: axe-core finds nothing serious on a page, and no page is large or asks a network."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from chromium import dom_of, framed
from places import ROOT
from stored_runs import nights
from test_report import Page

from lab import cli
from lab.page.report import render, render_index

pytestmark = pytest.mark.reference

STORED = ROOT / "reports" / "reference" / "h200"
AXE = "axe_playwright_python"  # of the extra `browser`; its copy of axe-core alone is used
SERIOUS = ("serious", "critical")
# In the frame, so that what is looked at is as wide as a phone or a screen; the answer is text in the outer page.
LOOKING = """
const page = frame.contentDocument, program = page.createElement('script');
program.textContent = AXE;
page.head.append(program);
frame.contentWindow.axe.run(page, {resultTypes: ['violations', 'passes']}).then(found => {
  const told = document.createElement('pre');
  told.id = 'told';
  told.textContent = JSON.stringify({passes: found.passes.length, violations: found.violations.map(
    each => ({id: each.id, impact: each.impact, where: each.nodes.slice(0, 3).map(node => node.html.slice(0, 160))}))});
  document.body.append(told);
});
"""


def axe_core() -> str:
    """The program as text; without it the test is skipped with that reason."""
    found = importlib.util.find_spec(AXE)
    if found is None or found.origin is None:
        pytest.skip("no axe-core on this machine: pip install '.[browser]'")
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def serious(page: Path, folder: Path, width: int, scheme: str) -> list[dict[str, object]]:
    """What axe-core calls serious or worse on a page."""
    quoted = json.dumps(axe_core()).replace("</", "<\\/")  # a script ends at the first such letters
    outer = framed(page, folder, width, LOOKING.replace("AXE", quoted))
    dom = dom_of(outer, folder / "profile", scheme=scheme, budget_ms=120_000)
    answer = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
    assert answer is not None, "axe-core gave no answer"
    told = json.loads(html.unescape(answer.group(1)))
    assert told["passes"] > 10, "axe-core looked at nothing"
    return [each for each in told["violations"] if each["impact"] in SERIOUS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width", "scheme"), [("night-8b", 390, "dark"), ("night", 1440, "light")])
def test_axe_core_finds_nothing_serious_on_a_report(tmp_path: Path, name: str, width: int, scheme: str) -> None:
    shutil.copytree(STORED / name, tmp_path / "reports" / name)
    assert serious(render(tmp_path / "reports" / name), tmp_path, width, scheme) == []


@pytest.mark.slow
def test_axe_core_finds_nothing_serious_on_the_index_and_the_page_of_two_runs(tmp_path: Path) -> None:
    reports = nights(tmp_path / "reports", 8)[0].parent
    two = reports / "two.html"
    cli.main(["compare", str(reports / "night-00"), str(reports / "night-06"), "--html", str(two)])
    assert serious(render_index(reports), tmp_path, 390, "light") == []
    assert serious(two, tmp_path, 1440, "dark") == []


@pytest.mark.slow
def test_axe_core_finds_what_was_made_unreadable(tmp_path: Path) -> None:
    page = nights(tmp_path / "reports", 1)[0] / "index.html"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</main>", '<p style="color:#eee;background:#fff">pale</p><img src="data:,"></main>'))
    assert {"color-contrast", "image-alt"} <= {str(each["id"]) for each in serious(page, tmp_path, 390, "light")}


@pytest.mark.parametrize("name", ["night-8b", "night"])
def test_a_stored_night_makes_pages_under_3_mb_that_ask_no_network(tmp_path: Path, name: str) -> None:
    shutil.copytree(STORED / name, tmp_path / "reports" / name)
    render(tmp_path / "reports" / name)
    pages = list((tmp_path / "reports").rglob("*.html"))
    assert len(pages) >= 2
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert len(text.encode()) < 3_000_000, path.name
        page = Page(text)
        sources = [value for _, has in page.tags for key, value in has.items() if key in ("src", "srcset", "poster")]
        assert not [value for value in sources if value and not value.startswith("data:")], path.name
        assert not page.all("script") + page.all("link") + page.all("iframe"), path.name
        assert not re.search(r"@import|url\((?!#|[\"']?data:)", text), path.name
