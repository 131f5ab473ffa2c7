"""On a GPU the captured step is profiled: its kernels are its launches, and the parts are the whole."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from lab import cli
from lab.probes.speed import rows
from lab.probes.speed.waterfall import parts_of
from lab.rows.store import read_rows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speed") / rows.FILE
    options = ["--geometry", "nano", "--at", "100x2", "--spec", "0,3", "--tokens", "48", "--rounds", "1"]
    assert cli.run(["speed", *options, "--out", str(path)]) == 0
    return path


def test_stages_of_the_captured_step_sum_to_it_and_are_split(measured: Path) -> None:
    found = [row for row in read_rows(measured) if row.kind == "stage"]
    assert {row.status for row in found} == {"measured"}, [row.reason for row in found if row.reason]
    kernels: dict[object, int] = defaultdict(int)
    for row in found:
        assert row.timer == "cupti"
        assert row.values["sums_to_step"] is True
        kernels[row.parameters["spec_k"]] += int(row.values["n_kernels"])  # type: ignore[arg-type]
    assert kernels[3] > kernels[0] > 3 * 6, "six kernels a layer, and more with drafts"


def test_no_part_of_a_stage_is_negative_and_the_time_between_steps_comes_last(measured: Path) -> None:
    [point] = rows.read_speed(measured).points
    for stages in point.stages.values():
        assert stages.is_split
        assert stages.costs[-1].stage == "between steps"
        for cost in stages.costs:
            parts = parts_of(cost)
            assert parts is not None
            assert sum(parts) == pytest.approx(cost.own_us)
            assert min(parts) >= 0
