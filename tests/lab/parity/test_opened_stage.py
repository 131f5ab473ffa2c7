"""A stage opened shows the worst of its errors, where they lie, and which stages feed it."""

from __future__ import annotations

import math

import matplotlib as mpl
import pytest
import torch
from torch import Tensor

from lab.errors import ExperimentError
from lab.figures import Kept
from lab.parity.judge import Place, StageCell, Triple, judge_stage
from lab.parity.opened import MOST_ELEMENTS, fed_by, open_stage, stage_controls
from lab.parity.stages import Sides, StageReport

pytestmark = pytest.mark.reference

ALLOWED = 1e-3
PASSES = {
    "prefill": ("target.embed", "target.0.attn", "target.0.mlp", "target.1.attn", "target.1.mlp", "target.taps",
                "target.norm", "target.head"),
    "step0/extend": ("draft.tokens", "draft.positions", "draft.taps", "draft.fc", "draft.concat", "draft.qkv",
                     "draft.rope", "draft.attn", "draft.feedback", "draft.norm", "draft.head"),
}  # fmt: skip


def report(**wrong: Tensor) -> StageReport:
    """One prompt whose stages are all [4, 8] and off by a little; `wrong` adds to a stage (dots as underscores)."""
    torch.manual_seed(0)
    cells: list[StageCell] = []
    ours: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for pass_name, stages in PASSES.items():
        for stage in stages:
            name, is_id = f"{pass_name}/{stage}", stage in ("draft.tokens", "draft.positions")
            expected[name] = torch.arange(4) if is_id else torch.randn(4, 8)
            error = torch.zeros(4, dtype=torch.long) if is_id else 1e-6 * torch.randn(4, 8)
            ours[name] = expected[name] + error + wrong.get(stage.replace(".", "_"), 0)
            triple = Triple(ours[name], expected[name], expected[name])
            cells.append(judge_stage(Place(0, pass_name, stage, len(cells)), triple, ALLOWED / 2, torch.float32))
    return StageReport(cells, "float32", "Hugging Face", sides=(Sides(ours, expected),))


def one_off(row: int, column: int, by: float) -> Tensor:
    """Zeros but for one element."""
    error = torch.zeros(4, 8)
    error[row, column] = by
    return error


def fed(stage: str, given: StageReport) -> list[str]:
    [cell] = [cell for cell in given.cells if cell.stage == stage]
    return [other.stage for other in fed_by(cell, given.cells)]


def test_the_first_stage_that_fails_is_opened_first_and_else_the_tightest() -> None:
    good = stage_controls(report())["stage"]
    bad = stage_controls(report(draft_fc=one_off(1, 2, 0.5), draft_norm=one_off(0, 0, 0.5)))["stage"]
    tightest = max(report().cells, key=lambda cell: cell.ratio or 0.0)
    assert good.start == f"{tightest.kind}: {tightest.stage}"
    assert bad.start == "extend: draft.fc (fail)"
    assert len(bad.options) == len(good.options) == sum(map(len, PASSES.values()))  # type: ignore[union-attr]
    assert stage_controls(StageReport([], "float32", "nobody")) == {}


def test_the_worst_elements_come_with_their_place_and_both_values() -> None:
    mpl.use("agg")
    given = report(draft_fc=one_off(1, 2, 0.5))
    drawing = open_stage(given, stage="extend: draft.fc (fail)")
    worst = drawing.table.iloc[0]
    assert len(drawing.table) == MOST_ELEMENTS
    assert worst["element"] == "1, 2"
    assert worst["error"] == pytest.approx(0.5, abs=1e-4)
    assert worst["ours"] - worst["expected"] == pytest.approx(0.5, abs=1e-4)
    assert worst["over_tolerance"] > 1 > drawing.table.iloc[1]["over_tolerance"]
    bars = drawing.fig.axes[0].patches
    assert sum(bar.get_height() for bar in bars) == 32, "every element is in a bar"
    assert "over the tolerance" in drawing.caption
    assert "Fed by draft.taps (passed)" in drawing.caption
    assert Kept.of(drawing, name="opened", prefix="p", order=1).is_drawn


def test_what_is_not_finite_and_ids_that_differ_are_opened_too() -> None:
    given = report(draft_norm=one_off(3, 7, math.inf), draft_tokens=torch.tensor([0, 0, 5, 0]))
    infinite = open_stage(given, stage="extend: draft.norm (fail)")
    assert (infinite.table.iloc[0]["element"], infinite.table.iloc[0]["error"]) == ("3, 7", math.inf)
    ids = open_stage(given, stage="extend: draft.tokens (fail)")
    assert [bar.get_width() for bar in ids.fig.axes[0].patches] == [3, 1]
    assert (ids.table.iloc[0]["element"], ids.table.iloc[0]["ours"]) == ("2", 7)


def test_a_stage_that_was_not_recorded_is_its_reason_alone() -> None:
    given = report()
    lost = StageReport([Place(0, "step0/extend", "draft.qkv", 0).cell("missing", "not recorded by the engine")],
                       "float32", "Hugging Face", sides=given.sides)  # fmt: skip
    del lost.sides[0].ours["step0/extend/draft.qkv"]  # type: ignore[attr-defined]
    drawing = open_stage(lost, stage="extend: draft.qkv (missing)")
    assert drawing.table.to_dict("records")[0]["reason"] == "not recorded by the engine"
    assert not Kept.of(drawing, name="opened", prefix="p", order=1).is_drawn
    with pytest.raises(ExperimentError, match="no stage 'extend: draft"):
        open_stage(lost, stage="extend: draft.fc")


def test_stages_are_fed_by_those_they_are_computed_from_and_wrong_ones_are_pointed_at() -> None:
    given = report(draft_fc=one_off(0, 0, 0.5), draft_concat=one_off(0, 0, 0.5))
    assert fed("target.0.attn", given) == ["target.embed"]
    assert fed("target.1.attn", given) == ["target.0.mlp"]
    assert fed("target.1.mlp", given) == ["target.1.attn"]
    assert fed("target.taps", given) == ["target.0.mlp", "target.1.mlp"]
    assert fed("target.norm", given) == ["target.1.mlp"]
    assert fed("draft.concat", given) == ["draft.tokens", "draft.fc"]
    assert fed("draft.rope", given) == ["draft.qkv", "draft.positions"]
    assert fed("draft.tokens", given) == ["target.head"], "what was recorded before it, of another pass"
    assert fed("target.embed", given) == []
    caption = open_stage(given, stage="extend: draft.concat (fail)").caption
    assert "draft.fc (fail); look there first" in caption
