"""A lamp: one known cause of low acceptance, its detector, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lab.doctor.draft.case import Case
    from lab.doctor.draft.reading import Reading

Colour = Literal["green", "red", "unknown"]


@dataclass(frozen=True)
class Repair:
    """What would mend a cause, and what that would give.

    Attributes:
        change: the one-line change, as it is to be typed: a key of config.json with its value, a setting, or a command.
        before, after: mean acceptance length, bonus token included, as it is and with the change; for a cause that
            costs time and not acceptance, the speed-up over plain decoding. None where it was not measured.
    """

    change: str
    before: float | None = None
    after: float | None = None

    @property
    def gain(self) -> float:
        """How many more tokens a step commits with the change; 0 where that was not measured."""
        return 0.0 if self.before is None or self.after is None else self.after - self.before

    @property
    def counterfactual(self) -> str:
        """What the change would give, in words; empty where it was not measured."""
        return "" if self.before is None or self.after is None else f"{self.before:.2f} -> {self.after:.2f}"


@dataclass(frozen=True)
class Finding:
    """What one lamp found.

    Attributes:
        lamp: its name. colour: green: looked at and not the cause; red: a cause; unknown: cannot be told.
        said: one sentence with the figures that the colour rests on, and for unknown the reason.
        repair: of a red lamp, and of that alone.
        weight: of a red lamp: how sure the evidence makes it, 0 to 1; it orders causes of like or unmeasured gain.
        values: figures to be stored beside the sentence.
        mended: of a red lamp that found a better reading: the head, read so.
        is_substitute: its change does without the head; such a lamp stands behind those that mend the head.
        failed: it cannot tell because its detector ended with an error, which `said` names.
    """

    lamp: str
    colour: Colour
    said: str
    repair: Repair | None = None
    weight: float = 0.5
    values: tuple[tuple[str, Any], ...] = ()
    mended: Reading | None = field(default=None, compare=False, repr=False)
    is_substitute: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        assert (self.colour == "red") == (self.repair is not None), f"{self.lamp} is {self.colour}: {self.repair}"


@dataclass(frozen=True)
class Lamp:
    """One known cause.

    Attributes:
        name: how rows and the terminal call it, e.g. "tap_layers".
        question: what a reader asks, e.g. "Are the taps those that the head was trained with?".
        look: the detector. It answers "unknown" with the reason where the case lacks what it needs, and raises only for
            its own bugs.
        is_fast: whether it needs no forward pass; all fast lamps together take less than 5 s.
        reads: runs that it shares with other lamps, by their names in `lab.doctor.draft.conditions.Conditions`; of
            several processes each of them is then made by one. One that is not named here is made again.
        is_long: whether it trains, runs engines of its own or tries hundreds of readings: of several processes the
            last should not be left alone with it.
        is_timed: whether it times steps, on a GPU where there is one: nothing may run beside it.
    """

    name: str
    question: str
    look: Callable[[Case], Finding]
    is_fast: bool = False
    reads: tuple[str, ...] = ()
    is_long: bool = False
    is_timed: bool = False
