"""Controls as values: what may be chosen, and what is chosen at first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.errors import ExperimentError

Value = str | int | float


@dataclass(frozen=True)
class Slider:
    """A number between two others; whole numbers where `step` is one.

    Raises:
        ExperimentError: it could not be moved, or does not start between its ends.
    """

    label: str
    low: float
    high: float
    start: float
    step: float = 1

    def __post_init__(self) -> None:
        if not (self.low <= self.start <= self.high and self.low < self.high and self.step > 0):
            raise ExperimentError(
                f"slider {self.label!r} starts at {self.start} and goes from {self.low} to {self.high} by {self.step}",
                "a start between its ends, which differ, and a step above 0",
                "correct its numbers, or leave it out where there is one value alone",
            )

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.start, self.step))


@dataclass(frozen=True)
class Picker:
    """One of some values.

    Attributes:
        is_ordered: whether they lie on a line, so that a slider may go from one to the next.

    Raises:
        ExperimentError: there is none, one is there twice, or the first choice is none of them.
    """

    label: str
    options: tuple[Value, ...]
    start: Value
    is_ordered: bool = False

    def __post_init__(self) -> None:
        if self.start not in self.options or len(set(self.options)) < len(self.options):
            raise ExperimentError(
                f"choice {self.label!r} starts at {self.start!r}, of {list(self.options)}",
                "options that all differ, the start one of them",
                "tell equal ones apart, and start at one that there is",
            )


Control = Slider | Picker


def starts(controls: Mapping[str, Control]) -> dict[str, Value]:
    """What is chosen at first, by the controls' names."""
    return {name: control.start for name, control in controls.items()}
