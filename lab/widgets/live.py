"""Controls in a running notebook: the one file that knows ipywidgets."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lab.errors import ExperimentError, LabError
from lab.figures import show as show_markup
from lab.widgets.controls import Control, Slider, starts

if TYPE_CHECKING:
    from ipywidgets import VBox

NEEDS = ("ipywidgets",)
Draw = Callable[..., str]


def missing() -> ExperimentError | None:
    """What to install before controls can be shown; None where all is there."""
    absent = [name for name in NEEDS if find_spec(name) is None]
    if not absent:
        return None
    return ExperimentError(
        f"the controls of this figure need {' and '.join(absent)}, which is not installed",
        "the figure as it stands, or the extra jupyter: " + " and ".join(NEEDS),
        "pip install 'eagle3lab[jupyter]', or `make jupyter`, then start the kernel again",
    )


def show(draw: Draw, controls: Mapping[str, Control], *, live: bool, static: str | None = None) -> None:
    """Displays what `draw` gives at the controls' first values, and where somebody can move them the controls as well.

    Args:
        draw: HTML from a value for each control, by name; pure, for it is called at every move.
        controls: none: there is nothing to choose.
        live: whether somebody sits before the notebook; else it runs in a night.
        static: shown in place of what `draw` gives where there are no controls.
    """
    reason = missing()
    if live and controls and reason is None:
        _display(_box(draw, controls), static)
        return
    show_markup(draw(**starts(controls)) if static is None else static)
    if live and controls:
        print(reason)


def _box(draw: Draw, controls: Mapping[str, Control]) -> VBox:
    """The controls in a row that wraps, and what they choose below it."""
    import ipywidgets

    made = {name: _widget(control) for name, control in controls.items()}
    shown = ipywidgets.HTML(_as_read(draw(**starts(controls))))

    def redraw(_: Any) -> None:
        try:
            shown.value = _as_read(draw(**{name: widget.value for name, widget in made.items()}))
        except LabError as error:  # an exception in a message from the front end is seen by nobody
            shown.value = f"<pre>{html.escape(str(error))}</pre>"

    for widget in made.values():
        widget.observe(redraw, "value")
    row = ipywidgets.HBox(list(made.values()), layout=ipywidgets.Layout(flex_flow="row wrap"))
    return ipywidgets.VBox([row, shown])


def _as_read(markup: str) -> str:
    """HTML with lines as near as in other outputs; those of a widget are as far apart as a control is high."""
    return f'<div style="line-height:var(--jp-content-line-height,1.5)">{markup}</div>'


def _widget(control: Control) -> Any:
    """A slider tells its value when it is let go: a figure takes longer to draw than a pointer to move on."""
    import ipywidgets

    wide = {"style": {"description_width": "initial"}, "layout": ipywidgets.Layout(width="min(26rem, 100%)")}
    if isinstance(control, Slider):
        kind = ipywidgets.IntSlider if control.is_whole else ipywidgets.FloatSlider
        return kind(
            value=control.start, min=control.low, max=control.high, step=control.step, description=control.label,
            continuous_update=False, **wide,
        )  # fmt: skip
    if control.is_ordered:
        return ipywidgets.SelectionSlider(
            options=control.options, value=control.start, description=control.label, continuous_update=False, **wide
        )
    return ipywidgets.Dropdown(options=control.options, value=control.start, description=control.label, **wide)


def _display(box: VBox, static: str | None) -> None:
    """With the drawing beside it for who shows no widgets: a saved notebook on a page, an exported one."""
    from IPython.display import display

    bundle = box._repr_mimebundle_()
    still = box.children[1].value if static is None else static
    display({**bundle, "text/html": still}, raw=True)  # type: ignore[no-untyped-call]
