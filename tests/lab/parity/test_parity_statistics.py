"""The arithmetic of parity: errors, tolerances, classes of tokens, trees; on numbers small enough to check by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import ExperimentError, RunFailed
from lab.figures.svg import n_marks
from lab.parity.figures import divergences, has_room
from lab.parity.hf_target import tree_visibility
from lab.parity.judge import Place, StageCell, Triple, error_values, judge_stage
from lab.parity.names import kind_of, split_name, step_of
from lab.parity.recording import PairUnderTest, Recording, check_prompts
from lab.parity.replay import Replay, walk_tree
from lab.parity.stages import StageReport, compare
from lab.parity.tokens import Judged, TokenReport, TokenRow, classes, judged_from, near_tie_gap
from lab.parity.tolerance import FLOAT64_ROUNDINGS, PlainErrors, plain_errors, rounding_allowance, stage_tolerance

pytestmark = pytest.mark.reference

NO_ERRORS = PlainErrors({}, {})
PLACE = Place(0, "step1/chain1", "draft.fc", 7)


def test_the_rounding_allowance_is_what_one_addition_costs() -> None:
    truth = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    bfloat16_step_at_1000 = 4.0
    assert rounding_allowance(truth, torch.bfloat16) <= bfloat16_step_at_1000
    assert rounding_allowance(truth, torch.float64) < 1e-12
    assert rounding_allowance(torch.empty(0), torch.bfloat16) == 0.0


def test_the_tolerance_is_twice_the_references_error_plus_twice_the_rounding() -> None:
    truth = torch.tensor([0.123456789, -2.5], dtype=torch.float64)
    expected = 2 * 3e-6 + 2 * rounding_allowance(truth, torch.float32)
    assert stage_tolerance(truth, 3e-6, torch.float32) == pytest.approx(expected, rel=1e-12)


def test_the_float64_tolerance_is_a_bound_that_grows_with_the_values() -> None:
    assert stage_tolerance(torch.tensor([0.5]), 1.0, torch.float64) == FLOAT64_ROUNDINGS * 2.0**-53
    assert stage_tolerance(torch.tensor([-8.0]), 0.0, torch.float64) == 8 * FLOAT64_ROUNDINGS * 2.0**-53


def test_error_values_are_those_computed_by_hand() -> None:
    ours, wanted = torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[1.0, 2.0, 5.0]])
    values = error_values(ours, wanted, is_logits=False)
    assert values["max_abs"] == 3.0
    assert values["mean_abs"] == 1.0
    assert values["cosine"] == pytest.approx(15 / (3 * math.sqrt(30)))
    assert values["relative"] == pytest.approx(3 / math.sqrt(30))
    assert "top_k_overlap" not in values


def test_logits_also_get_the_overlap_of_their_largest_entries_and_argmax_agreement() -> None:
    wanted = torch.arange(12, dtype=torch.float32).repeat(2, 1)
    ours = wanted.clone()
    ours[1, 7], ours[1, 0], ours[1, 11] = 0.0, 20.0, 5.0  # of the second row's five largest, 7 and 11 leave
    values = error_values(ours, wanted, is_logits=True)
    assert values["top_k_overlap"] == pytest.approx((1.0 + 0.6) / 2)
    assert values["argmax_agreement"] == 0.5


def test_zero_tensors_agree_with_themselves_only() -> None:
    zero, one = torch.zeros(1, 3), torch.ones(1, 3)
    assert error_values(zero, zero, is_logits=False)["cosine"] == 1.0
    assert error_values(one, zero, is_logits=False)["cosine"] == 0.0


def judge(ours: torch.Tensor, truth: torch.Tensor, error: float = 1e-6) -> str:
    return judge_stage(PLACE, Triple(ours, truth, truth), error, torch.float32).status


def test_a_stage_passes_just_under_its_tolerance_and_fails_just_over_it() -> None:
    truth = torch.linspace(-1, 1, 50, dtype=torch.float64).reshape(5, 10)
    room = stage_tolerance(truth, 1e-6, torch.float32)
    assert judge(truth + 0.99 * room, truth) == "pass"
    assert judge(truth + 1.01 * room, truth) == "fail"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_stage_with_nan_or_infinity_fails(bad: float) -> None:
    truth = torch.ones(2, 2)
    ours = truth.clone()
    ours[1, 1] = bad
    cell = judge_stage(PLACE, Triple(ours, truth, truth), 1e9, torch.float32)
    assert (cell.status, cell.reason) == ("fail", "holds NaN or infinity")


def test_a_stage_of_another_shape_fails_even_if_its_values_agree() -> None:
    cell = judge_stage(PLACE, Triple(torch.ones(2, 3), torch.ones(3, 3), torch.ones(3, 3)), 1.0, torch.float32)
    assert cell.status == "fail"
    assert "(2, 3)" in cell.reason


def test_ids_must_be_equal_and_the_first_difference_is_named() -> None:
    place = Place(0, "step0", "tree.tokens", 3)
    ids, other = torch.tensor([4, 5, 6]), torch.tensor([4, 9, 6])
    assert judge_stage(place, Triple(ids, ids, ids), 0.0, torch.float32).status == "pass"
    cell = judge_stage(place, Triple(ids, other, other), 0.0, torch.float32)
    assert cell.status == "fail"
    assert "entry 1 is 5 where 9" in cell.reason


def one_recording(**tensors: torch.Tensor) -> Recording:
    return Recording({name.replace("__", "/"): tensor for name, tensor in tensors.items()}, 1, 1)


def test_a_stage_missing_on_either_side_does_not_pass() -> None:
    row = torch.ones(1, 2)
    ours = one_recording(prefill__a=row, prefill__extra=row)
    reference = Replay({"prefill/a": row, "prefill/b": row}, stopped="the tokens ran out")
    cells = compare([ours], [reference], [reference], None, NO_ERRORS, dtype=torch.float32)
    assert {cell.stage: cell.status for cell in cells} == {"a": "pass", "b": "missing", "extra": "missing"}
    assert cells[1].reason == "not recorded by the engine"
    assert "the tokens ran out" in cells[2].reason
    report = StageReport(cells, "float32", "Hugging Face")
    assert not report.passed
    assert report.first_divergent is not None
    assert report.first_divergent.stage == "b"


def test_a_report_of_nothing_does_not_pass() -> None:
    row = torch.ones(1, 2)
    recording, replay = one_recording(prefill__a=row), Replay({"prefill/a": row})
    cells = compare([recording], [replay], [replay], None, NO_ERRORS, dtype=torch.float32, stages=["no.such.stage"])
    report = StageReport(cells, "float32", "Hugging Face")
    assert not report.passed
    assert report.verdict == "Nothing was compared, so nothing passed."


def test_an_error_in_the_table_stands_beside_the_tolerance_it_was_judged_by() -> None:
    def cell(prompt: int, error: float, plain: float, tolerance: float) -> StageCell:
        return StageCell(
            prompt, "prefill", "prefill", "a", 0, "pass", max_abs=error, reference_max_abs=plain, tolerance=tolerance,
            ratio=error / tolerance,
        )  # fmt: skip

    ids = StageCell(0, "prefill", "prefill", "ids", 1, "missing")
    cells = [cell(0, 0.9, 0.5, 10.0), cell(1, 0.3, 0.1, 0.5), ids]
    report = StageReport(cells, "float32", "Hugging Face")
    table = report.table().set_index("stage")
    names = ["max_abs", "reference_max_abs", "tolerance", "ratio"]
    assert table.loc["a", names].tolist() == [0.3, 0.1, 0.5, 0.6]
    assert table.loc["ids", names].isna().all()
    assert has_room(report)
    assert not has_room(StageReport([ids], "float32", "Hugging Face"))


def test_plain_torchs_error_is_pooled_over_steps_of_a_kind_of_pass_and_relatively_over_all_passes() -> None:
    ones = torch.ones(1, 2)
    plain = [
        Replay({"step0/chain1/draft.fc": ones + 0.1, "step1/chain1/draft.fc": ones + 0.3, "prefill/draft.fc": ones})
    ]
    truth = [Replay(dict.fromkeys(plain[0].tensors, ones))]
    errors = plain_errors(plain, truth)
    assert errors.absolute == pytest.approx({("chain1", "draft.fc"): 0.3, ("prefill", "draft.fc"): 0.0})
    assert errors.at("chain1", "draft.fc", ones) == pytest.approx(0.3)
    assert errors.at("prefill", "draft.fc", 10 * ones) == pytest.approx(3.0)  # 30% of the row's largest value
    assert errors.at("prefill", "draft.mlp", ones) == 0.0


def test_rows_that_the_engine_does_not_record_count_for_the_relative_error_only() -> None:
    ones = torch.ones(1, 2)
    plain = [Replay({"prefill/target.head": ones}, {"prefill/target.head": torch.tensor([[1.0, 2.0], [1.0, 1.0]])})]
    truth = [Replay({"prefill/target.head": ones}, {"prefill/target.head": torch.ones(2, 2)})]
    errors = plain_errors(plain, truth)
    assert errors.absolute == {("prefill", "target.head"): 0.0}
    assert errors.relative == {"target.head": 1.0}


def test_one_huge_row_does_not_widen_the_tolerance_of_the_others() -> None:
    plain = [Replay({"prefill/draft.fc": torch.tensor([[1001.0, 0.0], [1.0, 0.0]])})]
    truth = [Replay({"prefill/draft.fc": torch.tensor([[1000.0, 0.0], [1.0, 0.0]])})]
    assert plain_errors(plain, truth).at("chain1", "draft.fc", torch.ones(1, 2)) == pytest.approx(1e-3)


def test_recorded_names_say_pass_kind_and_step() -> None:
    assert split_name("step3/chain2/draft.fc") == ("step3/chain2", "draft.fc")
    assert split_name("prompt_ids") == ("", "prompt_ids")
    kinds = ("", "prefill", "step0/extend", "step4/extend", "step4/chain2", "step1/verify", "step1")
    assert [kind_of(name) for name in kinds] == [
        "run", "prefill", "extend", "after acceptance", "chain2", "verify", "step",
    ]  # fmt: skip
    assert [step_of(name) for name in ("prompt_ids", "prefill/x", "step12/verify/y")] == [-1, -1, 12]


def test_short_and_absent_prompts_are_refused_with_their_place() -> None:
    with pytest.raises(ExperimentError, match="no prompts"):
        check_prompts([])
    with pytest.raises(ExperimentError, match=r"prompt 1 has 1 token"):
        check_prompts([[1, 2], [3]])


def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"float8[\s\S]*bfloat16"):
        PairUnderTest(tmp_path, tmp_path, "float8")


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 4))
def test_a_node_sees_the_prefix_its_ancestors_and_itself(choices: list[int], n_prefix: int) -> None:
    parents = [-1, *(min(choice, node) for node, choice in enumerate(choices))]
    visible, depths = tree_visibility(n_prefix + len(parents), parents)
    for node, parent in enumerate(parents):
        ancestors, at = {node}, parent
        while at >= 0:
            ancestors.add(at)
            at = parents[at]
        assert depths[node] == len(ancestors) - 1
        row = visible[n_prefix + node]
        assert bool(row[:n_prefix].all())
        assert set(row[n_prefix:].nonzero().flatten().tolist()) == ancestors
    assert torch.equal(visible[:n_prefix], torch.ones_like(visible).tril()[:n_prefix])


def test_the_walk_follows_the_chosen_child_and_stops_where_there_is_none() -> None:
    nodes, parents = [9, 4, 5, 7, 4], [-1, 0, 0, 2, 2]
    assert walk_tree(nodes, parents, [5, 0, 7, 1, 0]) == [0, 2, 3]
    assert walk_tree(nodes, parents, [8, 0, 0, 0, 0]) == [0]


def test_a_token_is_equal_a_near_tie_or_a_bug_by_its_gap_to_the_best() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [5.0, 4.9, 0.0], [5.0, 4.9, 0.0]], dtype=torch.float64)
    judged = judged_from(logits, torch.tensor([1, 1, 2]), error=0.06)
    gap = near_tie_gap("bfloat16", judged.error)
    assert classes([1, 1, 2], judged, gap) == ["equal", "near-tie", "bug"]
    assert classes([1, 1, 2], judged, near_tie_gap("bfloat16", 0.04)) == ["equal", "bug", "bug"]


def test_in_float64_there_are_no_near_ties() -> None:
    judged = judged_from(torch.tensor([[2.0, 2.0]], dtype=torch.float64), torch.tensor([1]), error=0.5)
    assert near_tie_gap("float64", judged.error) == 0.0
    assert int(judged.best[0]) == 0  # of equal logits the lowest id
    assert classes([1], judged, 0.0) == ["bug"]


def test_a_reference_with_nan_logits_is_no_reference() -> None:
    with pytest.raises(RunFailed, match="NaN"):
        judged_from(torch.tensor([[math.nan, 1.0]]), torch.tensor([1]), 0.0)


def rows(n_near_tie: int, n_bug: int = 0, divergence: str = "equal") -> TokenReport:
    equal = 200 - n_near_tie - n_bug
    first = None if divergence == "equal" else 3
    plain = TokenRow(0, 0, 200, 200, 0, 0, None, "equal")
    return TokenReport([plain, TokenRow(0, 3, 200, equal, n_near_tie, n_bug, first, divergence)], "bfloat16", 0.1)


@pytest.mark.parametrize(("report", "n"), [(rows(0), 0), (rows(1, divergence="near-tie"), 1)], ids=["none", "one"])
def test_where_no_output_leaves_plain_decoding_there_is_nothing_to_draw(report: TokenReport, n: int) -> None:
    from matplotlib import pyplot as plt

    divergences(report)
    assert n_marks(plt.gcf()) == n
    plt.close("all")


@pytest.mark.parametrize(
    ("report", "passed"),
    [
        (rows(0), True),
        (rows(4), True),  # 4 of 400 is 1%
        (rows(5), False),
        (rows(0, n_bug=1), False),
        (rows(1, divergence="near-tie"), True),
        (rows(1, divergence="bug"), False),
        (TokenReport([], "bfloat16", 0.1), False),
    ],
)
def test_a_token_report_passes_without_bugs_and_with_at_most_one_percent_near_ties(
    report: TokenReport, passed: bool
) -> None:
    assert report.passed is passed


def test_the_summary_by_depth_adds_up() -> None:
    table = rows(2, n_bug=1, divergence="bug").by_depth()
    assert table["k"].tolist() == [0, 3]
    assert table["n_equal_outputs"].tolist() == [1, 0]
    assert (table["n_equal"] + table["n_near_tie"] + table["n_bug"]).tolist() == table["n_positions"].tolist()


def test_judged_gaps_are_distances_to_the_largest_logit() -> None:
    judged: Judged = judged_from(torch.tensor([[1.0, 4.0, 3.0]]).double(), torch.tensor([2]), 0.0)
    assert judged.gap.tolist() == [1.0]
