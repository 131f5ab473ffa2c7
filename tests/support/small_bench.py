"""A bench over one point of the nano pair, with drafts and without."""

from __future__ import annotations

from collections.abc import Iterable

from lab.options.values import Point
from lab.probes.bench.scenario import Scenario
from lab.rows.store import Row

K = 3
SCENARIO = Scenario(
    geometry="nano", pair="planted", points=(Point(20, 2),), ks=(0, K), share=0.8, tokens=24, rounds=2, warmup=0,
    dtype="float32",
)  # fmt: skip


def rows_by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """Rows of a bench, each under its name."""
    return {row.name: row for row in rows}
