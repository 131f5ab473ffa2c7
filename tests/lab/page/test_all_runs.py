"""Many nights stay readable: the index of all runs, its filters, and the page of any two runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from chromium import dom_of, framed, title_of
from stored_runs import MACHINES, add_rows, nights
from test_report import Page

from lab import cli
from lab.page.report import render_index
from lab.rows.runs import ENVIRONMENT_FILE

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight nights."""
    return nights(tmp_path_factory.mktemp("few") / "reports", 8)[0].parent


def words(page: Path) -> list[str]:
    return [word for word in Page(page.read_text(encoding="utf-8")).words if word]


def test_the_index_has_a_column_for_machine_pair_speed_and_acceptance(few: Path) -> None:
    told = words(few / "index.html")
    columns = ["Verdict", "Run", "Machine", "Pair", "Speed-up", "So far", "Tokens a step", "Took"]
    start = told.index("Run") - 1
    assert told[start : start + len(columns)] == columns
    assert told.count("NVIDIA H200") == 7
    assert told.count("planted gpt-oss-20b") == 2
    row = told[told.index("night-07") : told.index("night-06")]
    assert {"2.48×", "3.26"} <= set(row), row


def test_a_sparkline_ends_with_its_own_run_and_holds_runs_like_it_alone(few: Path) -> None:
    lines = [tag["aria-label"] or "" for tag in Page((few / "index.html").read_text()).all("svg")]
    # On the H200 with the pair of 8B: nights 0, 1, 3, 6 and 7, of which the third and later have a line.
    assert [line.partition(",")[0] for line in lines] == ["5 nights", "4 nights", "3 nights"]
    assert lines[0].split(",")[1].startswith(" from 2.4")


def test_a_filter_hides_all_that_is_not_of_its_value(few: Path) -> None:
    text = (few / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.all("script")
    assert [tag["for"] for tag in page.all("label") if str(tag["for"]).endswith("-all")] == [
        "machine-all", "pair-all", "verdict-all",
    ]  # fmt: skip
    bodies = page.all("tbody")
    assert len(bodies) == 8
    for name in ("machine", "pair", "verdict"):
        codes = {body[f"data-{name}"] for body in bodies}
        assert codes == {"0", "1"}
        for code in codes:
            assert f'main:has(#{name}-{code}:checked) tbody:not([data-{name}="{code}"]){{display:none}}' in text


def test_a_run_whose_rows_cannot_be_read_keeps_its_line_and_says_why(few: Path, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    shutil.copytree(few, reports)
    (reports / "night-03" / "run.json").write_text("{")
    (reports / "night-05" / ENVIRONMENT_FILE).unlink()
    page = render_index(reports)
    told = words(page)
    assert len(Page(page.read_text()).all("tbody")) == 8
    assert any("'night-03' is not a run folder" in word for word in told)
    assert any("'night-05' has no record of its machine" in word for word in told)
    assert "unknown machine" in told


def test_two_runs_are_overlaid_with_what_moved_and_what_differs(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = few / "pages" / "two.html"
    shutil.copytree(few / "night-01", few / "night-99")
    add_rows(few / "night-99", {"kind": "decode", "name": "spec-1", "values": {"decode_tokens_per_s": 40.0}})
    environment = few / "night-99" / ENVIRONMENT_FILE
    environment.write_text(environment.read_text().replace("2.9.0", "2.9.1"))
    code = cli.main(["compare", str(few / "night-01"), str(few / "night-99"), "--html", str(out)])
    shutil.rmtree(few / "night-99")
    captured = capsys.readouterr()
    assert code == 1
    assert captured.err.splitlines()[-1] == f"Page: {out}"
    page, told = Page(out.read_text(encoding="utf-8")), words(out)
    assert not page.all("script")
    assert page.all("a")[1]["href"] == "../night-01/index.html"
    assert [tag["data-name"] for tag in page.all("figure")] == ["speed", "acceptance"]
    moved = told[told.index("Rows") : told.index("Environment")]
    assert any("spec-1 decode_tokens_per_s" in word for word in moved)
    assert {"slower", "464.01", "40"} <= set(moved)
    differing = told[told.index("Environment") :]
    assert differing[1] == "1 differ"
    place = differing.index("torch")
    assert differing[place : place + 3] == ["torch", "2.9.0", "2.9.1"]


def test_two_machines_are_shown_side_by_side_without_a_word_of_faster(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "two.html"
    assert cli.main(["compare", str(few / "night-03"), str(few / "night-04"), "--html", str(out)]) == 2
    assert "allowed: two runs with the same machine fingerprint" in capsys.readouterr().err
    text = out.read_text(encoding="utf-8")
    told = words(out)
    assert any(word.startswith("No number here is called faster or slower: night-03 ran on") for word in told)
    assert len(Page(text).all("figure")) == 2
    assert set(MACHINES) <= set(told)
    assert "Rows" not in told


@pytest.mark.slow
def test_thirty_nights_fit_a_screen_and_a_phone(tmp_path: Path) -> None:
    reports = nights(tmp_path / "reports", 30)[0].parent
    two = reports / "two.html"
    assert cli.main(["compare", str(reports / "night-18"), str(reports / "night-28"), "--html", str(two)]) == 1
    pages = [reports / "index.html", two, reports / "night-28" / "index.html"]
    assert [path.stat().st_size < limit for path, limit in zip(pages, (100_000, 300_000, 1_000_000), strict=True)] == [
        True, True, True,
    ]  # fmt: skip
    index = Page(pages[0].read_text(encoding="utf-8"))
    links = [str(tag["href"]) for tag in index.all("a") if not str(tag["href"]).startswith("#")]
    assert links == [f"night-{number:02d}/index.html" for number in reversed(range(30))]
    assert all((reports / link).exists() for link in links)
    for width in (1440, 390):
        for page in pages:
            told = asked(page, width, tmp_path)
            assert told["over"] == 0, (page.name, width, told)
            assert told["wide"] == [], (page.name, width, told)
    shown = asked(pages[0], 390, tmp_path)
    assert shown["shown"] == {"machine-0": 6, "machine-1": 24, "pair-0": 10, "pair-1": 20, "verdict-0": 26,
                              "verdict-1": 4}  # fmt: skip


# In a frame of the width asked for, as a window has a least width of its own: what sticks out, what filters leave.
ASKING = """
const page = frame.contentDocument, root = page.documentElement, shown = {}, wide = [];
const isScrolled = one => one.closest('.scroll, .drawing, .aloud, svg');
for (const one of page.body.querySelectorAll('*'))
  if (!isScrolled(one) && !one.matches('.skip') &&
      one.getBoundingClientRect().right > WIDTH + 1) wide.push(one.tagName);
for (const choice of page.querySelectorAll('.filter input:not([id$="-all"])')) {
  choice.checked = true;
  shown[choice.id] = [...page.querySelectorAll('tbody')].filter(body => body.getClientRects().length).length;
  page.getElementById(choice.name + '-all').checked = true;
}
document.title = JSON.stringify({over: Math.max(0, root.scrollWidth - root.clientWidth), wide, shown});
"""


def asked(page: Path, width: int, folder: Path) -> dict[str, object]:
    """What a browser says of a page at a width, in pixels."""
    outer = framed(page, folder, width, ASKING.replace("WIDTH", str(width)))
    told: dict[str, object] = json.loads(title_of(dom_of(outer, folder / "profile")))
    return told
