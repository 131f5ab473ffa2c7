"""Controls are checked values and drawing is pure; without ipywidgets the figure stands and the extra is named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lab import widgets
from lab.errors import ExperimentError
from lab.widgets import Picker, Slider, live, starts

pytestmark = pytest.mark.reference

CONTROLS = {"k": Picker("depth", (1, 3, 5), 3, is_ordered=True), "share": Slider("share", 0.0, 1.0, 0.5, 0.25)}


def drawn(*, k: int, share: float) -> str:
    """What the controls choose."""
    if k == 5:
        raise ExperimentError("depth 5 <was> not measured", "1 and 3", "choose one of them")
    return f"<b>{k} at {share}</b>"


class Widget:
    """A widget of a front end that nobody sees: its value can be set, and who observes it is told."""

    def __init__(self, children: Any = None, **given: Any) -> None:
        self.__dict__ |= given | {"children": children}
        self.watching: list[Any] = []

    def observe(self, react: Any, name: str) -> None:
        assert name == "value"
        self.watching.append(react)

    def move(self, value: Any) -> None:
        """As a reader does."""
        self.value = value
        for react in self.watching:
            react({"new": value})

    def _repr_mimebundle_(self) -> dict[str, Any]:
        return {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was displayed, as bundles of forms."""
    import IPython.display

    bundles: list[dict[str, Any]] = []

    def display(given: Any, *, raw: bool = False) -> None:
        bundles.append(given if raw else {"text/html": given.data})

    monkeypatch.setattr(IPython.display, "display", display)
    return bundles


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """ipywidgets with widgets that a test can move; the real ones run in `test_in_jupyterlab`."""
    fake = ModuleType("ipywidgets")
    for name in ("IntSlider", "FloatSlider", "SelectionSlider", "Dropdown", "Layout", "HBox", "VBox"):
        setattr(fake, name, Widget)
    fake.HTML = lambda value: Widget(value=value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ipywidgets", fake)
    monkeypatch.setattr(live, "find_spec", lambda name: SimpleNamespace())


def test_a_control_that_cannot_be_moved_or_begins_outside_is_refused() -> None:
    for low, high, start, step in ((0, 1, 2, 1), (1, 1, 1, 1), (0, 1, 0, 0), (0, 1, -1, 1)):
        with pytest.raises(ExperimentError, match="slider 'x' starts at"):
            Slider("x", low, high, start, step)
    for options, first in (((), "a"), (("a", "b"), "c"), (("a", "a"), "a")):
        with pytest.raises(ExperimentError, match="choice 'x' starts at"):
            Picker("x", options, first)
    assert Slider("x", 0, 3, 1).is_whole
    assert not Slider("x", 0, 1.0, 0.5, 0.1).is_whole
    assert starts(CONTROLS) == {"k": 3, "share": 0.5}


def test_in_a_night_the_figure_of_the_first_values_is_shown_and_nothing_else(
    shown: list[dict[str, Any]], front_end: None, capsys: pytest.CaptureFixture[str]
) -> None:
    widgets.show(drawn, CONTROLS, live=False)
    widgets.show(drawn, CONTROLS, live=False, static="<i>static</i>")
    assert shown == [{"text/html": "<b>3 at 0.5</b>"}, {"text/html": "<i>static</i>"}]
    assert capsys.readouterr().out == ""


def test_without_ipywidgets_the_figure_is_shown_and_the_extra_is_named(
    shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "find_spec", lambda name: None)
    widgets.show(drawn, CONTROLS, live=True)
    assert shown == [{"text/html": "<b>3 at 0.5</b>"}]
    told = capsys.readouterr().out
    assert "ipywidgets, which is not installed" in told
    assert "allowed: " in told
    assert "pip install 'eagle3lab[jupyter]'" in told


def test_a_moved_control_draws_again_and_what_cannot_be_drawn_says_why(
    shown: list[dict[str, Any]], front_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    box = live._box
    monkeypatch.setattr(live, "_box", lambda *given: made.append(box(*given)) or made[-1])
    widgets.show(drawn, CONTROLS, live=True, static="<i>static</i>")
    [bundle] = shown
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html"}
    assert bundle["text/html"] == "<i>static</i>", "for who shows no widgets"
    row, picture = made[0].children
    k, share = row.children
    assert "3 at 0.5" in picture.value
    share.move(0.75)
    assert "3 at 0.75" in picture.value
    k.move(5)
    assert "depth 5 &lt;was&gt; not measured" in picture.value
    k.move(1)
    assert "1 at 0.75" in picture.value
