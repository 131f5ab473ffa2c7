"""Which setting a regime gets: the default, unless another is certainly better. Pure functions of rows.

Two phases keep luck out. In the first every setting is timed beside the default, and the fastest of many is partly the
luckiest. It then meets the default alone, in fresh rounds that take turns, and replaces it only if the interval of the
median ratio of these rounds lies below 1. However many settings competed, the second phase is one comparison: with
nothing to gain, at most 1 regime in 100 changes its default
(tests/lab/probes/sweeps/test_sweeps_choose.py, by simulation).

Source: docs/requirements.md R-106, R-111; the interval is that of `lab.rows.verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, geometric_mean, median
from typing import Any

from lab.errors import ExperimentError
from lab.probes.sweeps.rows import DECIDE, SCREEN, Cell
from lab.rows.verdict import FALSE_ALARM, Sample, median_error

WORTH = 1.003  # a gain below this is not worth another kernel to compile
WORTH_OF_PASS = 1.0005  # the same of a whole pass, of which a product is a part
WITHIN = 1.03  # a baked setting's time over that of the best found (docs/requirements.md R-111)
NOT_SLOWER = 1.01  # of any single shape of a regime under a setting that replaces the default
NOT_SLOWER_PASS = 1.001  # of any single step's pass
Setting = Mapping[str, Any]


@dataclass(frozen=True)
class Interval:
    """Median of ratios with its interval of confidence 1 - `FALSE_ALARM`."""

    low: float
    ratio: float
    high: float


@dataclass(frozen=True)
class Choice:
    """What one regime gets.

    Attributes:
        regime, op, key: as in its rows.
        setting: the one chosen. is_default: whether it is what was used before.
        reason: in words.
        default_us, best_us, baked_us: over the regime's shapes, the geometric mean.
        ratio: of the fastest other setting over the default, where they met again.
        shapes: the shapes it was measured on. n_settings: how many competed.
    """

    op: str
    regime: str
    key: Mapping[str, Any]
    setting: Setting
    is_default: bool
    reason: str
    default_us: float
    best_us: float
    baked_us: float
    ratio: Interval | None
    shapes: tuple[Mapping[str, Any], ...]
    n_settings: int

    @property
    def within(self) -> float:
        """Time over that of the best found."""
        return self.baked_us / self.best_us

    @property
    def holds(self) -> bool:
        """Whether it is as near to the best found as a default has to be."""
        return self.within <= WITHIN


def interval(ratios: Sequence[float]) -> Interval:
    """The median of ratios of rounds, and how far it may be off.

    Raises:
        ExperimentError: fewer than three rounds.
    """
    if len(ratios) < 3:
        raise ExperimentError(
            f"{len(ratios)} rounds of two settings", "3 or more; 15 are usual", "measure again without --limit-s"
        )
    middle = median(ratios)
    error = median_error(Sample(middle, samples=tuple(ratios))) or 0.0
    half = NormalDist().inv_cdf(1 - FALSE_ALARM / 2) * error
    return Interval(middle * math.exp(-half), middle, middle * math.exp(half))


def is_certainly_better(ratios: Sequence[float], worth: float = WORTH) -> bool:
    """Whether the rounds leave no doubt that a setting beats the default by more than it is worth."""
    found = interval(ratios)
    return found.high < 1.0 and found.ratio < 1 / worth


def choose_all(rows: Sequence[Cell], op: str) -> tuple[list[Choice], dict[str, str]]:
    """Choices of every regime in the rows, and why there is none for the others."""
    choices, missing = [], {}
    for name in dict.fromkeys(row["regime"] for row in rows if row["op"] == op and row["phase"] == SCREEN):
        own = [row for row in rows if row["op"] == op and row["regime"] == name]
        try:
            choices.append(choose(own))
        except ExperimentError as error:
            missing[name] = error.what
    return choices, missing


def choose(rows: Sequence[Cell]) -> Choice:
    """The choice of one regime.

    Raises:
        ExperimentError: the default, or the decision between it and the fastest other one, was not measured.
    """
    screened = [row for row in rows if row["phase"] == SCREEN]
    default_rows = [row for row in screened if row["is_default"]]
    if not default_rows:
        raise ExperimentError("the default was not measured", "a default for every shape", "measure again")
    best = fastest(screened)
    first, default = screened[0], default_rows[0]["setting"]
    default_us = geometric_mean(row["time_us"] for row in default_rows)
    shapes = tuple(row["shape"] for row in default_rows)

    def made(setting: Setting, reason: str, us: tuple[float, float, float], ratio: Interval | None = None) -> Choice:
        return Choice(
            first["op"], first["regime"], first["key"], setting, setting == default, reason, *us, ratio, shapes,
            len({str(row["setting"]) for row in screened}),
        )  # fmt: skip

    if best == default:
        return made(default, "nothing was faster", (default_us, default_us, default_us))
    decided = [row for row in rows if row["phase"] == DECIDE and row["setting"] == best]
    if {str(row["shape"]) for row in decided} != {str(shape) for shape in shapes}:
        raise ExperimentError(
            f"{best} was the fastest of {first['regime']} and did not meet the default again",
            "a decision on every shape", "run the same command again: it goes on where it stopped",
        )  # fmt: skip
    pooled = [geometric_mean(column) for column in zip(*(row["ratios"] for row in decided), strict=True)]
    found = interval(pooled)
    default_us = geometric_mean(row["default_us"] for row in decided)
    best_us = default_us * found.ratio
    worst = max(median(row["ratios"]) for row in decided)
    worth, not_slower = (WORTH_OF_PASS, NOT_SLOWER_PASS) if "step" in shapes[0] else (WORTH, NOT_SLOWER)
    if is_certainly_better(pooled, worth) and worst <= not_slower:
        return made(best, f"certainly faster: {_words(found)}", (default_us, best_us, best_us), found)
    why = "not certainly faster" if worst <= not_slower else f"slower on one shape ({worst:.3f})"
    return made(default, f"{why}: {_words(found)}", (default_us, min(best_us, default_us), default_us), found)


def fastest(screened: Sequence[Cell]) -> Setting:
    """The setting with the least time over the default's in its own batch, over all shapes; equal bits only.

    The default is 1 by definition.
    """
    shapes = {str(row["shape"]) for row in screened}
    by_setting: dict[str, list[Cell]] = {}
    for row in screened:
        if row["bits_equal"]:
            by_setting.setdefault(str(row["setting"]), []).append(row)
    whole = [rows for rows in by_setting.values() if {str(row["shape"]) for row in rows} == shapes]
    return dict(min(whole, key=over_default)[0]["setting"])


def over_default(rows: Sequence[Cell]) -> float:
    """Geometric mean of a setting's times over the default's."""
    return geometric_mean(1.0 if row["is_default"] else row["over_default"] for row in rows)


def _words(found: Interval) -> str:
    return f"{found.ratio:.4f} of the default's time, {found.low:.4f} to {found.high:.4f}"
