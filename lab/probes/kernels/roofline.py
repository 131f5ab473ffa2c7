"""How close kernels come to the memory's speed, and thresholds on many of them: pure functions, no GPU, no torch.

A memory-bound kernel's floor is its bytes over the machine's read ceiling. A threshold on cells that were not all
measured is missing, which is never the same as held.

Source: docs/kernels.md, "What is asked of the kernels".
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

PASS_US = 1.3  # a kernel that waits for the one before, inside a graph with dependent launch
SLACK = 1.5  # what small kernels may take over bytes and passes
# Marks in a library's name that say it was not given the mask, so that it does less than ours.
UNMASKED = ("no mask", "mask-free", "unmasked", "without mask")

Sense = Literal["at most", "at least"]


@dataclass(frozen=True)
class Cell:
    """One timed shape of one op.

    Attributes:
        us: median time of one call; us_p10, us_p90 its spread over replays.
        floor_us: bytes over the ceiling of that run.
        peers: library time by name; None where a library was not timed.
        quoted: libraries' times from another run; they may only make a claim harder to meet.
        is_complete: the libraries that the row needs were timed in the same run.
        timer: what timed it.
    """

    op: str
    shape: Mapping[str, Any]
    us: float
    floor_us: float
    bytes: int
    flops: int = 0
    dependent_passes: int = 1
    peers: Mapping[str, float | None] = field(default_factory=dict)
    quoted: Mapping[str, float] = field(default_factory=dict)
    is_complete: bool = True
    us_p10: float | None = None
    us_p90: float | None = None
    timer: str | None = None

    @property
    def share(self) -> float:
        """Share of the floor: 1 is as fast as memory."""
        return share_of_floor(self.us, self.floor_us)

    @property
    def gb_per_s(self) -> float:
        """Necessary bytes a second, in 10^9."""
        return self.bytes / self.us / 1e3

    @property
    def best_peer(self) -> str | None:
        """The fastest library that did the same work; None when there is none."""
        timed = {name: us for name, us in self.peers.items() if us is not None and not is_unmasked(name)}
        return min(timed, key=lambda name: timed[name]) if timed else None


@dataclass(frozen=True)
class Proof:
    """What a benchmark run proved of one op before timing it; `reason` says why it is no passed proof."""

    op: str
    passed: bool
    reason: str = ""
    n_cases: int = 0


@dataclass(frozen=True)
class Check:
    """One named threshold; `holds` is None where it cannot be judged, with `detail` as the reason."""

    name: str
    value: float | None
    sense: Sense
    threshold: float
    holds: bool | None
    detail: str
    is_must: bool = True

    def bound(self) -> str:
        """The threshold for people."""
        return f"{self.sense} {self.threshold:g}"

    def line(self) -> str:
        """The check for people."""
        word = {True: "held   ", False: "FAILED ", None: "missing"}[self.holds]
        value = "-" if self.value is None else f"{self.value:.3f}"
        aim = "" if self.is_must else " (aim)"
        return f"{word} {self.name}{aim}: {value}, {self.bound()}; {self.detail}"


def floor_us(n_bytes: float, gb_per_s: float) -> float:
    """Time in us that `n_bytes` take at `gb_per_s` (10^9 bytes a second)."""
    return n_bytes / gb_per_s / 1e3


def share_of_floor(us: float, floor: float) -> float:
    """`floor` over the measured time: 1 is as fast as memory."""
    return floor / us


def allowed_us(n_bytes: float, dependent_passes: int, gb_per_s: float) -> float:
    """Most time in us that a small kernel may take: slack over its bytes and the passes that wait for each other."""
    return SLACK * (floor_us(n_bytes, gb_per_s) + PASS_US * dependent_passes)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive numbers; None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def is_unmasked(peer: str) -> bool:
    """Whether a library's name says that it ran without the mask."""
    return any(mark in peer.lower() for mark in UNMASKED)


def peer_ratio(cell: Cell) -> float | None:
    """Our time over the best library's at the same work; None for an incomplete row, since the best may be missing."""
    best = cell.best_peer
    return cell.us / (cell.peers[best] or math.nan) if best and cell.is_complete else None


def shape_text(shape: Mapping[str, Any]) -> str:
    """A shape as one comparable text, equal before and after a trip through JSON."""
    return json.dumps({key: _plain(value) for key, value in shape.items()}, sort_keys=True)


def case_text(shape: Mapping[str, Any]) -> str:
    """A shape for people, in its own order."""
    return " ".join(f"{key}={_plain(value)}" for key, value in shape.items())


def _plain(value: Any) -> str:
    return str(_listed(value)).removeprefix("torch.")


def _listed(value: Any) -> Any:
    """Lists for tuples, those within others too: as JSON gives them back."""
    return [_listed(one) for one in value] if isinstance(value, tuple | list) else value


def values_of(
    wanted: Sequence[tuple[str, Cell | None]], value: Callable[[Cell], float | None]
) -> dict[str, float | None]:
    """The value of every cell asked for; None where the cell or its value is missing, or is no number."""
    found = {name: value(cell) if cell is not None else None for name, cell in wanted}
    return {name: one if one is not None and math.isfinite(one) else None for name, one in found.items()}


def on_mean(
    name: str,
    values: Mapping[str, float | None],
    sense: Sense,
    threshold: float,
    *,
    is_must: bool = True,
) -> Check:
    """A threshold on the geometric mean, which exists only when every cell was measured."""
    known, lost = _split(values)
    if lost or not known:
        return Check(name, None, sense, threshold, None, _lost(lost, len(values)), is_must)
    value = statistics.geometric_mean(known.values())
    return Check(name, value, sense, threshold, _within(value, sense, threshold), f"{len(known)} cells", is_must)


def on_every_cell(
    name: str,
    values: Mapping[str, float | None],
    sense: Sense,
    threshold: float,
    *,
    is_must: bool = True,
) -> Check:
    """A threshold on every cell: one cell outside fails it, and it holds only when all were measured."""
    known, lost = _split(values)
    if not known:
        return Check(name, None, sense, threshold, None, _lost(lost, len(values)), is_must)
    worst = (max if sense == "at most" else min)(known, key=lambda cell: known[cell])
    within = _within(known[worst], sense, threshold)
    detail = f"{worst} of {len(known)} cells" + (f"; {_lost(lost, len(values))}" if lost else "")
    return Check(name, known[worst], sense, threshold, None if within and lost else within, detail, is_must)


def _split(values: Mapping[str, float | None]) -> tuple[dict[str, float], list[str]]:
    known = {name: value for name, value in values.items() if value is not None}
    return known, [name for name, value in values.items() if value is None]


def _lost(lost: Sequence[str], n_cells: int) -> str:
    if not n_cells:
        return "nothing to measure"
    return f"{len(lost)} of {n_cells} cells not measured, or a library missing: {', '.join(lost[:2])}" + (
        ", ..." if len(lost) > 2 else ""
    )


def _within(value: float, sense: Sense, threshold: float) -> bool:
    return value <= threshold if sense == "at most" else value >= threshold
