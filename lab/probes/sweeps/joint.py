"""Orders of sums against the present one, over all regimes at once.

Splits and streams set the order in which a row's sums are added, so an engine has one value of each for every launch
(`kernels.attention.plan.order_of`). No tuned file can hold them: a better order is a change of the source, and of every
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from lab.probes.sweeps.rows import JOINT, Cell


@dataclass(frozen=True)
class JointOrder:
    """One order over all regimes of a head size: geometric mean and worst of its times over the present order's."""

    dim: int
    splits: int
    streams: int
    ratio: float
    worst: float
    worst_regime: str
    n_regimes: int


def joint_orders(rows: Sequence[Cell]) -> list[JointOrder]:
    """Every order that was tried, the fastest first."""
    groups: dict[tuple[int, int, int], list[Cell]] = {}
    for row in rows:
        if row["phase"] == JOINT:
            order = row["setting"]
            groups.setdefault((row["shape"]["dim"], order["splits"], order["streams"]), []).append(row)
    found = []
    for (dim, splits, streams), own in groups.items():
        worst = max(own, key=lambda row: float(row["over_default"]))
        ratio = geometric_mean(row["over_default"] for row in own)
        found.append(JointOrder(dim, splits, streams, ratio, worst["over_default"], worst["regime"], len(own)))
    return sorted(found, key=lambda one: one.ratio)


def joint_table(rows: Sequence[Cell]) -> list[str]:
    """The same in words."""
    return [
        f"order {one.splits}x{one.streams} at head size {one.dim}: {one.ratio:.3f} of the present order's time over "
        f"{one.n_regimes} regimes, worst {one.worst:.3f} ({one.worst_regime})"
        for one in joint_orders(rows)
    ]
