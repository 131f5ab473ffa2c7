"""The figure of gates can be read: no text lies over another or beyond the edge, and every gate has a mark."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt
from places import ROOT

from lab.probes.gates.night import GateRuns, gates_table, room
from lab.rows.gates import GateResult, Word, gates_of
from lab.rows.store import read_rows

pytestmark = [pytest.mark.reference, pytest.mark.usefixtures("page_style")]

STORED = ROOT / "reports" / "reference" / "h200" / "night-8b" / "jobs" / "42_perf_gates-micro" / "rows.jsonl"


def stored_results() -> tuple[GateResult, ...]:
    """The gates of a real run, one of them made to fail."""
    results = gates_of([row for row in read_rows(STORED) if row.kind == "gate"])
    failed = GateResult("a gate that failed", "fail", 0.6, "at least 0.9", "", "42_perf_gates-micro")
    return (*results, failed)


def test_no_text_of_the_figure_lies_over_another_or_beyond_its_edge() -> None:
    figure, table, *_ = room(gates_table(GateRuns(results=stored_results())), "stored")
    figure.canvas.draw()
    whole, last = figure.bbox, figure.axes[-1]
    assert len(figure.axes) == 3, "a panel a mode, and one for what is of no mode"
    texts = [text for axes in figure.axes for text in (*axes.get_yticklabels(), *axes.texts, axes._left_title)]  # type: ignore[attr-defined]
    texts += [*last.get_xticklabels(), last.xaxis.label]
    boxes = {f"{i} {text.get_text()}": text.get_window_extent() for i, text in enumerate(texts) if text.get_text()}
    names = list(boxes)
    assert len(names) > 20
    for i, name in enumerate(names):
        box = boxes[name]
        assert box.x0 >= whole.x0, f"{name} is cut"
        assert box.x1 <= whole.x1, f"{name} is cut"
        over = [other for other in names[i + 1 :] if box.overlaps(boxes[other])]
        assert not over, f"{name} lies over {over}"
    marks = [line for axes in figure.axes for line in axes.lines if line.get_marker() in ("o", "s")]
    shown = table["room"].notna()
    assert sorted(float(line.get_xdata()[0]) for line in marks) == pytest.approx(sorted(table[shown]["room"]))
    assert all(line.get_markersize() >= 4 for line in marks), "room of a tenth of a per cent is seen too"
    plt.close(figure)


def test_a_gate_that_failed_looks_unlike_those_that_hold() -> None:
    figure, *_ = room(gates_table(GateRuns(results=stored_results())), "stored")
    marks = [line for axes in figure.axes for line in axes.lines if line.get_marker() in ("o", "s")]
    assert [line.get_marker() for line in marks].count("s") == 1
    [failed] = [axes for axes in figure.axes if any(line.get_marker() == "s" for line in axes.lines)]
    assert failed.texts[-1].get_text() == "0.6 (at least 0.9), fail"
    plt.close(figure)


@pytest.mark.parametrize(
    ("word", "value", "threshold", "expected"),
    [
        ("missing", None, None, None), ("fail", 0.5, "at least 1 and at most 2", 0.5),
        ("fail", 4.0, "at least 1 and at most 2", 0.5), ("pass", 1.6, "at least 1 and at most 2", 1.25),
        ("pass", 2.0, 4, 2.0), ("pass", 0, "at most 0", None),
    ],
)  # fmt: skip
def test_the_room_of_a_gate_is_that_of_its_nearest_bound_and_a_missing_gate_has_none(
    word: Word, value: float | None, threshold: str | None, expected: float | None
) -> None:
    table = gates_table(GateRuns(results=(GateResult("a gate", word, value, threshold, "", "job"),)))
    assert table["verdict"].tolist() == [word]
    assert [None if room != room else room for room in table["room"]] == [expected]
