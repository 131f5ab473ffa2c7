"""Sliders and choices beside a figure.

A control is a value (`Slider`, `Picker`); what is drawn is a pure function from the controls' values to HTML, the same
one that draws the static figure of a night. `show` is the only part that knows ipywidgets. Any room above may offer
such functions; this one imports figures alone. To add a control: write the function beside its figure, and pass it to
`Experiment.explore`.
"""

from lab.widgets.controls import Control, Picker, Slider, starts
from lab.widgets.live import NEEDS, missing, show

__all__ = ["NEEDS", "Control", "Picker", "Slider", "missing", "show", "starts"]
