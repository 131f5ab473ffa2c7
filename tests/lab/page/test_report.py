"""The report stands alone, says the verdict first, and leaves nobody out."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from places import ROOT
from small_notebooks import PASS, START, write_config, write_notebook

from lab import cli
from lab.nightly import run_night
from lab.options.night import NightOptions
from lab.page.marks import MARKS, TONES, is_numeric, mark, moment
from lab.page.report import render
from lab.page.sections import tables_of
from lab.rows import runs
from lab.rows.store import Row
from lab.rows.values import percent

pytestmark = pytest.mark.reference

DRAW = """\
import pandas as pd
from lab.figures import Drawing
from matplotlib import pyplot as plt
table = pd.DataFrame({"k": [1, 2, 3], "length": [1.5, 2.0, 2.25]})
fig, ax = plt.subplots()
ax.plot(table["k"], table["length"])
exp.figure("lengths", Drawing(fig, table, "Length grows with k.", "Made up <here>."))
exp.write("decode", "spec-3", {"tokens_per_s": 10.0, "tokens_per_s_samples": [9.0, 10.0, 11.0]}, dtype="float32")
exp.missing("decode", "spec-4", "no such depth")
"""
RAISE = "exp.gate('later gate', None, detail='never measured')\nraise ValueError('<b>broken</b>')"


class Page(HTMLParser):
    """Tags with their attributes, and the text in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    good = write_notebook(folder / "nb" / "drawing.ipynb", START, DRAW, PASS)
    bad = write_notebook(folder / "nb" / "broken.ipynb", START, RAISE)
    config = write_config(folder / "night.toml", good, bad, timeout_s=60)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_night(NightOptions(config=config, out=folder / "reports" / "one"))
    return folder / "reports" / "one"


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page((run_dir / "index.html").read_text(encoding="utf-8"))


def pages_of(run_dir: Path) -> list[Path]:
    return [run_dir / "index.html", run_dir.parent / "index.html", *sorted((run_dir / "notebooks").glob("*.html"))]


def test_no_page_loads_anything_from_anywhere_or_runs_a_script(run_dir: Path) -> None:
    pages = pages_of(run_dir)
    assert len(pages) == 4
    for path in pages:
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert not page.all("script")
        assert not page.all("link")
        assert not page.all("iframe")
        for _, attributes in page.tags:
            for name in ("src", "srcset", "href", "xlink:href", "action", "data"):
                assert not re.match(r"(?i)\s*(https?:)?//", attributes.get(name) or ""), attributes
        assert not re.search(r"(?i)url\(\s*['\"]?(https?:)?//|@import", text)


def test_every_link_of_a_page_leads_to_something(run_dir: Path) -> None:
    for path in pages_of(run_dir):
        page = Page(path.read_text(encoding="utf-8"))
        ids = {attributes.get("id") for _, attributes in page.tags}
        for attributes in page.all("a"):
            place, _, fragment = str(attributes["href"]).partition("#")
            assert (path.parent / place).exists() if place else fragment in ids, attributes


def test_the_verdict_comes_first_in_one_sentence_with_a_mark(run_dir: Path, page: Page) -> None:
    sentence = runs.read_summary(run_dir)["sentence"]
    assert sentence.startswith("Incomplete: 1 gate could not be judged: later gate; 1 job of 2 did not finish: broken")
    words = [word for word in page.words if word]
    assert sentence in words
    assert words.index(sentence) < words.index("Gates", words.index(sentence))
    assert "∅" in words[: words.index(sentence)]


def test_the_failure_is_shown_with_its_error_text_escaped(page: Page) -> None:
    assert "ValueError: <b>broken</b>" in page.words
    assert any("raise ValueError('<b>broken</b>')" in word for word in page.words)


def test_every_figure_has_its_alternative_text_its_caption_and_its_table(page: Page) -> None:
    figures = page.all("figure")
    assert len(figures) == 1
    drawings = [attributes for attributes in page.all("svg") if attributes.get("role") == "img"]
    assert [drawing["aria-label"] for drawing in drawings] == ["Length grows with k."]
    assert len(page.all("figcaption")) == len(figures)
    assert "Made up <here>." in page.words
    start = page.tags.index(("figure", figures[0]))
    inside = [tag for tag, _ in page.tags[start : start + 400]]
    assert inside.index("details") < inside.index("table")
    assert "2.25" in page.words


def test_rows_are_shown_with_missing_ones_and_their_reason_but_without_raw_samples(page: Page) -> None:
    assert "missing: no such depth" in page.words
    assert "tokens_per_s" in page.words
    assert "tokens_per_s_samples" not in page.words


def test_a_page_is_in_a_language_fits_a_phone_and_follows_light_and_dark(run_dir: Path) -> None:
    for path in pages_of(run_dir):
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert page.all("html")[0]["lang"] == "en"
        assert any(tag.get("name") == "viewport" for tag in page.all("meta"))
        assert "prefers-color-scheme:dark" in text
        assert "@media print" in text
        for position, (tag, _) in enumerate(page.tags):
            if tag == "table" and path.parent == run_dir:
                assert any((attributes.get("class") or "") == "scroll" for _, attributes in page.tags[:position][-3:])


def test_the_executed_notebook_is_linked_with_code_folded(run_dir: Path, page: Page) -> None:
    hrefs = [attributes["href"] for attributes in page.all("a")]
    assert "notebooks/broken.html" in hrefs
    assert "jobs/broken/executed.ipynb" in hrefs
    text = (run_dir / "notebooks" / "drawing.html").read_text(encoding="utf-8")
    folded = [attributes for attributes in Page(text).all("details") if attributes.get("class") == "code"]
    assert len(folded) >= 4
    assert "Length grows with k." in text


def test_ids_are_unique_on_every_page(run_dir: Path) -> None:
    for path in pages_of(run_dir):
        ids = [attributes["id"] for _, attributes in Page(path.read_text(encoding="utf-8")).tags if "id" in attributes]
        assert len(ids) == len(set(ids))


def test_the_index_lists_the_run_with_its_verdict(run_dir: Path) -> None:
    page = Page((run_dir.parent / "index.html").read_text(encoding="utf-8"))
    assert [attributes["href"] for attributes in page.all("a")] == ["#content", "one/index.html"]
    assert "incomplete" in page.words


RENDER = """
import sys
from pathlib import Path
from lab.page.report import render
print(render(Path(sys.argv[1])))
heavy = [name for name in ("torch", "transformers", "numba", "matplotlib", "eagle3core") if name in sys.modules]
assert not heavy, heavy
"""


def test_a_stored_run_is_drawn_again_to_the_same_page_without_torch(run_dir: Path) -> None:
    before = (run_dir / "index.html").read_text(encoding="utf-8")
    (run_dir / "index.html").unlink()
    subprocess.run([sys.executable, "-c", RENDER, str(run_dir)], cwd=ROOT, check=True, capture_output=True)
    assert (run_dir / "index.html").read_text(encoding="utf-8") == before


def test_report_names_every_file_that_it_writes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for page in pages_of(run_dir):
        page.unlink()
    assert cli.main(["report", str(run_dir)]) == 0
    named = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert named[0] == run_dir / "index.html"
    assert sorted(named) == sorted(pages_of(run_dir))
    assert len(named) == 4


def test_a_figure_of_an_older_page_is_drawn_from_what_is_stored(run_dir: Path) -> None:
    words = run_dir / "jobs" / "drawing" / "figures" / "lengths.json"
    content = json.loads(words.read_text())
    words.write_text(json.dumps(content | {"caption": "Another caption."}))
    render(run_dir)
    assert "Another caption." in (run_dir / "index.html").read_text(encoding="utf-8")


def test_every_word_has_a_mark_and_every_mark_a_tone() -> None:
    assert set(MARKS.values()) <= set(TONES)
    assert str(mark("slower")) == (
        '<span class="word bad"><span class="sign" aria-hidden="true">▼</span> slower</span>'
    )


def test_moments_changes_and_numbers_read_as_people_write_them() -> None:
    assert moment("2026-11-21T10:15:00.000+00:00") == "21 November 2026, 10:15 UTC"
    assert (percent(1.034), percent(0.5), percent(None)) == ("+3.4%", "-50.0%", "")
    assert is_numeric("1.5e-7")
    assert not is_numeric("spec-3")


def test_a_long_table_is_cut_and_says_how_much_is_left() -> None:
    row = {"run": "r", "job": "j", "notebook": "n", "kind": "k", "environment": "e", "recorded_at": "t"}
    (table,) = tables_of([Row(**row, name=str(number), values={"n": number}) for number in range(205)])
    assert (len(table.cells), table.n_left_out) == (200, 5)
