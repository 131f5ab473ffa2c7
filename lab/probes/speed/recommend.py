"""Which depth to choose at which batch: what a step costs there, times what it commits.

Expected tokens a second = batch * L(k) / step(k, batch). L comes from an acceptance share, or from measured shares of
each drafted position; a depth beyond the measured positions is not recommended. A choice is by ratios within one group
of engines, so that no drift between measurements decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.errors import ExperimentError
from lab.probes.speed.curves import best_of, is_clear
from lab.probes.speed.rows import PointSpeed
from lab.rows.store import read_rows


@dataclass(frozen=True)
class Acceptance:
    """How much of a chain is accepted.

    Attributes:
        name: for people.
        by_position: share of steps that accept the first, second, ... drafted token, never rising.
    """

    name: str
    by_position: tuple[float, ...]

    def length(self, k: int) -> float | None:
        """Tokens a step of k drafts, bonus included; None beyond what is known."""
        return 1.0 + sum(self.by_position[:k]) if k <= len(self.by_position) else None

    @classmethod
    def of_share(cls, share: float, deepest: int, name: str = "") -> Acceptance:
        """Every drafted token is accepted with chance `share` given those before it."""
        if not 0.0 <= share <= 1.0:
            raise ExperimentError(f"acceptance share {share}", "0 to 1", "correct shares")
        return cls(name or f"share {share:.2f}", tuple(share ** (i + 1) for i in range(deepest)))


def measured_acceptance(path: Path) -> Acceptance:
    """By position, from the deepest row of 31_acceptance's rows.

    Raises:
        ExperimentError: the file holds none.
    """
    found = [row for row in read_rows(path) if row.kind == "acceptance" and row.status == "measured"]
    shares = [one for row in found if isinstance(one := row.values.get("acceptance_by_position"), list)]
    if not shares:
        raise ExperimentError(
            f"{path.name} has no acceptance by position", "rows of 31_acceptance", "run it, and name its rows.jsonl"
        )
    return Acceptance(f"{path.parent.name}, as measured", tuple(float(share) for share in max(shares, key=len)))


@dataclass(frozen=True)
class Choice:
    """The best setting at one point.

    Attributes:
        k: drafts a step; 0 is plain decoding. speedup: expected, over plain decoding.
        tokens_per_s: expected of the whole batch, by depth.
        is_clear: it stays the best at the edges of the rounds' spread.
    """

    context: int
    batch: int
    k: int
    speedup: float
    next_k: int | None
    advantage: float
    is_clear: bool
    tokens_per_s: dict[int, float]
    lengths: dict[int, float]


def choices(points: Sequence[PointSpeed], acceptance: Acceptance) -> list[Choice]:
    """The best depth of every point that has a baseline."""
    found = []
    for point in points:
        lengths = {k: length for k in point.depths if (length := acceptance.length(k)) is not None}
        if 0 not in lengths or len(lengths) < 2:
            continue
        best = best_of(point.over_base, lengths)
        clear = is_clear({k: point.depths[k].over_base for k in lengths}, lengths)
        rates = {k: 1e3 * point.batch * length / point.depths[k].step_ms for k, length in lengths.items()}
        found.append(
            Choice(point.context, point.batch, best.k, best.speedup, best.next_k, best.advantage, clear, rates, lengths)
        )
    return found


def break_even_batch(found: Sequence[Choice]) -> int | None:
    """The least batch from which on no depth beats plain decoding; None if the largest still gains."""
    least = None
    for choice in sorted(found, key=lambda one: -one.batch):
        if choice.k != 0:
            return least
        least = choice.batch
    return least


def advice(found: Sequence[Choice], acceptance: Acceptance) -> str:
    """One sentence: the best setting of every batch, and where speculation stops paying."""
    if not found:
        return f"With {acceptance.name} there is nothing to choose from."
    by_context: dict[int, list[Choice]] = {}
    for choice in found:
        by_context.setdefault(choice.context, []).append(choice)
    parts = [f"context {context}: {_of_context(ones)}" for context, ones in by_context.items()]
    return f"The best depth with {acceptance.name}, {'; '.join(parts)}."


def _of_context(found: Sequence[Choice]) -> str:
    words = []
    for choice in found:
        name = f"spec-{choice.k}, {choice.speedup:.2f} times plain decoding" if choice.k else "no drafts"
        words.append(f"batch {choice.batch} {name}{'' if choice.is_clear else ' (another may be as good)'}")
    border = break_even_batch(found)
    end = (
        ""
        if len(found) < 2
        else "; drafts pay at all of these"
        if border is None
        else f"; no gain from batch {border} on"
    )
    return ", ".join(words) + end


@dataclass(frozen=True)
class Prediction:
    """Expected against measured tokens a second of one depth at one point.

    Attributes:
        at_dial: expected with the acceptance the pair was planted for; None for a trained one.
        at_measured: expected with the acceptance that was measured: what is left is the formula's own error.
    """

    point: str
    k: int
    measured: float
    at_dial: float | None
    at_measured: float

    @property
    def error(self) -> float:
        """Of the formula, a share."""
        return self.at_measured / self.measured - 1


def predictions(points: Sequence[PointSpeed]) -> list[Prediction]:
    """Of every depth whose speed was measured."""
    found = []
    for point in points:
        for k, depth in sorted(point.depths.items()):
            if depth.length is None:
                continue
            rate = 1e3 * point.batch / depth.step_ms
            at_dial = None if depth.dial_length is None else rate * depth.dial_length
            found.append(Prediction(point.name, k, depth.tokens_per_s, at_dial, rate * depth.length))
    return found


def prediction_line(found: Sequence[Prediction]) -> str:
    """How far the formula was off, at the acceptance that was measured and at the planted one."""
    if not found:
        return "No speed was measured to compare with."
    worst = max(found, key=lambda one: abs(one.error))
    where = f"{worst.point}, spec-{worst.k}"
    text = f"At the acceptance measured, expected speed is off by at most {abs(worst.error):.1%} ({where})"
    planted = [one.at_dial / one.measured - 1 for one in found if one.at_dial is not None]
    if planted:
        text += f"; at the planted one by at most {max(map(abs, planted)):.1%}, the chance of a few rounds included"
    return f"{text}; {len(found)} settings."
