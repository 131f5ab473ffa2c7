"""Shares of the floor are drawn over the batch and held to the least that a night asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.errors import ExperimentError
from lab.night.experiment import Experiment
from lab.probes.speed.batch_shares import batches, by_batch, read_limits, write_gates
from lab.probes.speed.curves import Range
from lab.probes.speed.rows import Depth, PointSpeed, depth_of
from lab.rows import environment

pytestmark = pytest.mark.reference

UNIT = Range(1.0, 1.0, 1.0)


def point(context: int, batch: int, plain: float | None, drafts: float | None) -> PointSpeed:
    """A point whose steps reach these shares."""
    depths = {
        k: Depth(k, 4.0 + k, 100.0, UNIT, share=share, run_share=None if share is None else share - 0.02)
        for k, share in ((0, plain), (3, drafts))
    }
    return PointSpeed(context, batch, depths=depths)


POINTS = [point(512, 1, 0.9, 0.9), point(1024, 64, 0.62, 0.37), point(1024, 1, 0.92, 0.9), point(1024, 16, 0.73, 0.63)]


def test_a_depth_has_both_shares_of_its_row() -> None:
    values = {"step_ms_median": 4.0, "decode_tokens_per_s": 250.0, "share_of_floor": 0.8, "share_of_run_ceiling": 0.78}
    assert (depth_of(0, values).share, depth_of(0, values).run_share) == (0.8, 0.78)
    del values["share_of_run_ceiling"], values["share_of_floor"]
    assert depth_of(0, values).share is depth_of(0, values).run_share is None, "rows of old"


def test_a_depth_of_drafts_has_the_ranges_of_its_row_and_the_length_of_the_dial() -> None:
    of_ratios = {"step_over_base": 1.2, "step_over_base_p10": 1.1, "step_over_base_p90": 1.4}
    of_speed = {"speedup": 2.0, "speedup_p10": 1.9, "speedup_p90": 2.2, "speedup_at_dial": 2.5}
    values = {
        "step_ms_median": 4.0,
        "decode_tokens_per_s": 250.0,
        "step_over_base_bound": 1.15,
        "acceptance_length": 2.4,
    }
    depth = depth_of(3, {**values, **of_ratios, **of_speed})
    assert (depth.over_base, depth.speedup) == (Range(1.2, 1.1, 1.4), Range(2.0, 1.9, 2.2))
    assert (depth.bound, depth.length, depth.dial_length) == (1.15, 2.4, pytest.approx(3.0))


def test_the_context_with_most_batches_is_drawn_by_batch_with_its_limits() -> None:
    shown = batches(POINTS)
    assert [one.name for one in shown] == ["1024x1", "1024x16", "1024x64"]
    drawing = by_batch(shown, 3, read_limits(["1024x16/0=0.82"]), "Rows of a test")
    assert list(drawing.table["share_of_floor"]) == [0.92, 0.9, 0.73, 0.63, 0.62, 0.37]
    assert list(drawing.table["share_of_run_ceiling"]) == pytest.approx([0.9, 0.88, 0.71, 0.61, 0.6, 0.35])
    assert "Least: 37% with 64 requests and 3 drafts a step." in drawing.caption
    [axes] = drawing.fig.axes
    drawn = [list(line.get_ydata()) for line in axes.lines]  # type: ignore[arg-type]
    assert drawn == [[0.92, 0.73, 0.62], [0.82], [0.9, 0.63, 0.37]]
    assert batches([*POINTS, point(4096, 1, 0.9, 0.9), point(4096, 2, 0.9, 0.9)]) == shown, "most batches, not tokens"
    assert batches(POINTS[:2]) == [], "no context has two batches"
    assert batches([point(8, 1, None, None), point(8, 2, None, None)]) == [], "rows of old have no share"


def test_each_limit_is_a_gate_and_a_step_that_was_not_measured_passes_none(tmp_path: Path) -> None:
    exp = Experiment("40_speed", "run", "job", tmp_path, {}, environment.collect())
    write_gates(exp, POINTS, read_limits(["1024x16/0=0.82", "1024x64/3=.37", "1024x32/0=0.77", "1024x16/5=1"]))
    assert {gate["name"]: gate["passed"] for gate in exp.gates} == {
        "share of the floor, 1024x16/spec-0": False,
        "share of the floor, 1024x64/spec-3": True,
        "share of the floor, 1024x32/spec-0": None,
        "share of the floor, 1024x16/spec-5": None,
    }


@pytest.mark.parametrize("texts", [["1024x16=0.8"], ["1024x16/0=1.2"], ["1024x16/0=0.8", "1024x16/0=0.7"], ["x"]])
def test_a_limit_that_says_no_step_or_no_share_is_refused(texts: list[str]) -> None:
    with pytest.raises(ExperimentError, match="CONTEXTxBATCH/DRAFTS=SHARE"):
        read_limits(texts)
