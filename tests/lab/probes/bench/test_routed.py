"""Rows of a target with experts: how many of them its steps read, and floors that take what was counted."""

from __future__ import annotations

import pytest

from lab.cli import run
from lab.errors import EXIT_PASSED
from lab.pairs.planted import find_geometry
from lab.probes.bench.floors import Routing, step_floor
from lab.probes.bench.routed import ExpertCount
from lab.probes.gates.bounds import floor_of
from lab.rows.store import Row, read_rows

pytestmark = [pytest.mark.reference, pytest.mark.slow]

SPEED = ["--at", "16x1", "--spec", "0,3", "--tokens", "24", "--rounds", "1", "--peers", "plain-torch"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Of one call of the command."""
    out = tmp_path_factory.mktemp("speed") / "speed.jsonl"
    words = ["speed", "--geometry", "nano-experts", "--repeated", "0.6", *SPEED, "--out", str(out)]
    assert run(words) == EXIT_PASSED
    return read_rows(out)


def test_a_row_says_how_many_experts_were_read_and_how_many_were_expected(rows: list[Row]) -> None:
    plain, spec = (row for row in rows if row.kind == "bench" and row.parameters["who"] == "engine")
    experts = find_geometry("nano-experts").target.block.experts
    assert experts is not None
    assert (plain.values["experts_read"], plain.values["experts_expected"]) == (4.0, 4.0)
    assert spec.parameters["repeated_experts"] == 0.6
    share = float(spec.parameters["share"] or 0.0)
    assert spec.values["experts_expected"] == pytest.approx(experts.n_read(4, repeated=0.6 * share), rel=1e-3)
    assert spec.values["experts_read"] == pytest.approx(spec.values["experts_expected"], rel=0.3), "of a few steps"
    assert spec.values["n_wrong_requests"] == 0


def test_floors_of_the_row_and_of_its_stages_take_what_was_counted(rows: list[Row]) -> None:
    [spec] = [row for row in rows if row.kind == "bench" and row.number("experts_read") not in (None, 4.0)]
    made, read = find_geometry("nano-experts"), spec.number("experts_read")
    assert read is not None
    floor = step_floor(
        made.target, made.draft, k=3, batch=1, cached=16 + 24 / 2, itemsize=4, routing=Routing(measured={4: read})
    )
    ceiling = spec.number("ceiling_gb_per_s")
    assert ceiling is not None
    assert spec.values["floor_ms"] == pytest.approx(floor.ms(ceiling))
    known = floor_of(spec)
    assert known is not None
    assert known.stages == floor.stages
    [mlp] = [row for row in rows if row.name == f"{spec.name}/target.mlp"]
    assert mlp.values["floor_us"] == pytest.approx(floor.stage_us("target.mlp", ceiling))


def test_a_peer_without_experts_says_so(rows: list[Row]) -> None:
    reasons = {row.reason for row in rows if row.name.endswith("/plain-torch")}
    assert reasons == {"ExperimentError: a target with experts beside a peer"}


def test_a_count_without_a_pass_of_its_rows_is_none() -> None:
    assert ExpertCount(3).mean is None
