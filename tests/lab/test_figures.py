"""Figures follow the page's colours, keep their ids to themselves, and carry their words and their table."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from places import ROOT

from lab.figures import INK, MEANINGS, SERIES, Drawing, Kept, depth_look, shown, table_cells, table_html, to_svg
from lab.figures.svg import n_marks, part_ticks

pytestmark = [pytest.mark.reference, pytest.mark.usefixtures("page_style")]


def drawn(prefix: str = "job-one") -> str:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots()
    for number in range(3):
        axes.plot([1, 2, 3], [number, 2, 1], label=f"series {number}")
    axes.legend()
    axes.set_title("A title that stays text")
    return to_svg(figure, prefix)


def kept(name: str = "one") -> Kept:
    return Kept(name=name, alt="a < b", caption="c & d", order=1, columns=["k"], rows=[[1]], svg=drawn(name))


def test_text_stays_text_and_ink_follows_the_page() -> None:
    svg = drawn()
    assert ">A title that stays text<" in svg
    assert INK not in svg
    assert "#000000" not in svg
    assert "currentColor" in svg
    for index in (1, 2, 3):
        assert f"var(--series-{index}, {SERIES[index - 1][0]})" in svg


def test_nothing_is_loaded_and_no_date_is_kept_so_the_same_figure_has_the_same_bytes() -> None:
    svg = drawn()
    assert "http" not in svg
    assert "<metadata" not in svg
    assert svg == drawn()


@pytest.mark.parametrize(
    ("xs", "is_drawn"), [([], False), ([1.0], False), ([1.0, math.nan], False), ([1.0, 2.0], True)]
)
def test_a_figure_of_nothing_or_of_a_single_point_is_a_line_of_words_with_its_table(
    tmp_path: Path, xs: list[float], is_drawn: bool
) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots()
    axes.plot(xs, xs)
    axes.axhline(1.0)  # a threshold is no point
    axes.axvline(2.0)
    table = pd.DataFrame({"x": [*xs, 7.0]})
    made = Kept.of(Drawing(figure, table, "One point, 1.", "c"), name="few", prefix="p", order=1)
    made.save(tmp_path)
    loaded = Kept.load(tmp_path / "few.json")
    assert (loaded.alt, loaded.is_drawn, bool(loaded.svg)) == (made.alt, is_drawn, is_drawn)
    assert (tmp_path / "few.svg").exists() is loaded.is_drawn is is_drawn
    markup = loaded.html("figure-p-few")
    assert ("<svg" in markup) is is_drawn
    assert (": One point, 1.</p>" in markup) is not is_drawn
    assert ">7<" in markup


@pytest.mark.parametrize(("bars", "n"), [([0.0, 0.0], 0), ([0.0, 2.0], 1), ([1.0, 2.0], 2)])
def test_bars_without_length_are_no_marks(bars: list[float], n: int) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots()
    axes.barh(["a", "b"], bars)
    assert n_marks(figure) == n
    plt.close(figure)


def test_labels_that_would_lie_over_each_other_are_turned_and_others_stay() -> None:
    from matplotlib import pyplot as plt

    for names, angle in (([f"a long label {i}" for i in range(9)], 35.0), (["a", "b", "c"], 0.0)):
        figure, axes = plt.subplots()
        axes.plot(range(len(names)), range(len(names)))
        axes.set_xticks(range(len(names)), names)
        part_ticks(figure)
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {angle}
        plt.close(figure)


def test_colours_have_one_meaning_each_and_no_figure_takes_one_by_its_number() -> None:
    assert sorted(MEANINGS.values()) == list(range(len(SERIES)))
    places = [*(ROOT / "lab").glob("**/*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    taken = [path.name for path in places if re.search(r"SERIES\[\d", path.read_text(encoding="utf-8"))]
    assert not taken
    assert depth_look(3) == depth_look(3)
    assert len({depth_look(k)["color"] for k in range(1, 7)}) == 6


def test_a_narrow_screen_may_enlarge_a_figure_and_reads_its_table_as_cards() -> None:
    markup = kept().html("figure-job-one")
    assert '<input type="checkbox" class="large" id="figure-job-one-large">' in markup
    assert '<label class="large" for="figure-job-one-large">' in markup
    assert '<td class="num" data-label="k">1</td>' in markup.replace("class=num", 'class="num"')
    assert "large" not in kept().html(), "a notebook's own output has no page around it"


def test_two_figures_on_one_page_share_no_id_and_every_reference_has_its_target() -> None:
    def ids(svg: str) -> set[str]:
        return set(re.findall(r'\bid="([^"]+)"', svg))

    one, two = drawn("job-one"), drawn("job-two")
    assert ids(one)
    assert not ids(one) & ids(two)
    wanted = set(re.findall(r'href="#([^"]+)"', one)) | set(re.findall(r"url\(#([^)]+)\)", one))
    assert wanted
    assert wanted <= ids(one)


def test_series_differ_by_marker_and_dash_as_well_as_by_colour() -> None:
    cycle = list(mpl.rcParams["axes.prop_cycle"])
    assert len({style["marker"] for style in cycle}) == len(cycle)
    assert len({str(style["linestyle"]) for style in cycle}) == len(cycle)


def contrast(one: str, two: str) -> float:
    """Contrast of two colours. Source: WCAG 2.2, relative luminance and contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_each_series_colour_has_a_contrast_of_three_on_its_page() -> None:
    css = (ROOT / "lab" / "page" / "templates" / "style.css").read_text()
    papers = re.findall(r"--paper:(#[0-9a-f]{6})", css)
    for light, dark in SERIES:
        assert contrast(light, papers[0]) >= 3, light
        assert contrast(dark, papers[1]) >= 3, dark


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_markup_has_the_alternative_text_a_caption_and_the_table_beneath() -> None:
    seen = _Seen()
    seen.feed(kept().html())
    (svg,) = [attributes for tag, attributes in seen.tags if tag == "svg"]
    assert svg["role"] == "img"
    assert svg["aria-label"] == "a < b"
    tags = [tag for tag, _ in seen.tags]
    assert tags.index("figcaption") < tags.index("details") < tags.index("table")


def test_a_stored_figure_comes_back_and_its_file_stands_alone(tmp_path: Path) -> None:
    figure = kept()
    figure.save(tmp_path)
    assert Kept.load(tmp_path / "one.json") == figure
    root = ElementTree.fromstring((tmp_path / "one.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme:dark" in (tmp_path / "one.svg").read_text()


def test_a_table_keeps_a_named_index_and_escapes_what_it_holds() -> None:
    frame = pd.DataFrame({"x": [np.float32(0.5), None]}, index=pd.Index(["<b>", "c"], name="stage"))
    columns, rows = table_cells(frame)
    assert columns == ["stage", "x"]
    assert rows[0] == ["<b>", 0.5]
    assert "&lt;b&gt;" in table_html(columns, rows)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (3, "3"),
        (3.0, "3"),
        (0.123456, "0.1235"),
        (12345.6, "12346"),
        (1.5e-7, "1.5e-07"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        ("a", "a"),
    ],
)
def test_a_value_is_shown_with_the_digits_a_reader_can_use(value: object, text: str) -> None:
    assert shown(value) == text
