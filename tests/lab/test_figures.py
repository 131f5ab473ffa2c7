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

from lab.figures import INK, SERIES, Kept, shown, table_cells, table_html, to_svg

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
