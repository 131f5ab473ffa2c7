"""Draft trees side by side: no shape changes a token, no chain inside a tree reaches further, best trees really run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trees import ancestors, trees
from tiny_engines import random_prompts, write_tiny_pair

from eagle3core.errors import ConfigError, InvariantViolated
from eagle3core.metrics import RequestMetrics, StepRecord
from eagle3core.request import Response
from eagle3core.step.tree import FlatTree
from eagle3core.trees import StepTree, read_choices
from lab.acceptance.shapes import SHAPES, shape_named
from lab.acceptance.tree_counts import Difference, agreed_drafts, check_chains, count_shape, differences, first_children
from lab.acceptance.tree_words import sentences
from lab.acceptance.trees import TreeReport, measure_trees
from lab.errors import ExperimentError
from lab.pairs.prompts import prompts_from_ids

pytestmark = pytest.mark.reference

# root -> a, b; a -> c, d; b -> e
PARENTS = (-1, 0, 0, 1, 1, 2)
TOKENS = (7, 8, 9, 7, 5)


def one_step(text: list[int], n_accepted: int, *, cut: bool = False) -> Response:
    """A response of the token of prefill, and one step that accepted the first drafts of `text`."""
    tree = StepTree.of(TOKENS, PARENTS, text[:n_accepted])
    step = StepRecord(1, len(TOKENS), n_accepted, len(text), cut, None, tree)
    return Response("", [0, *text], 2, "length", RequestMetrics(None, (step,)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> TreeReport:
    """Trees of a tiny pair, whose draft is often right by luck."""
    folder = tmp_path_factory.mktemp("trees")
    target, draft = write_tiny_pair(folder / "pair")
    choices = folder / "own.json"
    choices.write_text(json.dumps({"choices": [[0], [2], [0, 1], [0, 1, 0]], "format": "paths"}))
    shapes = ["chain-2", "chain-3", str(choices), "mc_sim_7b_63", "dynamic-60/7/10", "dynamic-14/2/4"]
    prompts = prompts_from_ids(random_prompts([3, 9, 2, 17, 30]))
    return measure_trees(
        target, draft, prompts, shapes, (3, 9, 500), max_new_tokens=24, dtype="float64", device="cpu", batch=2,
        ignore_eos=True, choices_folder=folder / "choices",
    )  # fmt: skip


def test_every_shape_gives_plain_decodings_tokens(report: TreeReport) -> None:
    assert [s.name for s in report.measured][:3] == ["plain", "chain-2", "chain-3"]
    assert [s.name for s in report.measured][4:] == ["dynamic-14/2/4", "best-3", "best-9"]
    assert {s.n_tokens for s in report.measured} == {5 * 24}
    assert (report.n_different, report.first_difference) == (0, "")


def test_a_shape_that_the_pair_cannot_draft_is_left_out_with_the_reason(report: TreeReport) -> None:
    reasons = {left.name: left.reason for left in report.left_out}
    assert set(reasons) == {"mc_sim_7b_63", "dynamic-60/7/10", "best-500"}
    assert "the draft has 6" in reasons["dynamic-60/7/10"]
    assert reasons["best-500"].startswith("500 nodes by depth 3 and 4 ranks")


def test_lengths_are_one_more_than_what_the_depths_add_up_to(report: TreeReport) -> None:
    assert [s.n_nodes for s in report.measured] == [1, 3, 4, 5, 14, 3, 9]
    for shape in report.measured:
        assert shape.length.mean == pytest.approx(1 + sum(shape.by_depth))
        assert sum(shape.histogram) == shape.n_steps
        if shape.paths is not None:
            assert shape.length.mean == pytest.approx(shape.paths.mean_acceptance_length)
    assert any(s.length.mean and s.length.mean > 1.2 for s in report.trees), "some drafts have to be right"


def test_the_best_trees_were_written_and_are_what_the_engine_ran(report: TreeReport) -> None:
    assert report.counted == "dynamic-14/2/4"
    assert report.best is not None
    for shape in report.best_measured:
        tree = read_choices(report.files[shape.n_nodes])
        assert tree is not None
        assert [list(path) for path in tree.paths] == report.best.choices(shape.n_nodes)
        assert shape.paths is not None
        assert set(shape.paths.offered) <= set(tree.paths), "no other path was offered in its steps"
        assert shape.expected == pytest.approx(report.best.expected_length(shape.n_nodes))


def test_trees_were_held_against_every_chain_inside_them(report: TreeReport) -> None:
    for shape in report.trees:
        chains = shape.chains
        assert chains is not None
        assert chains.n_steps == shape.n_steps + shape.n_cut
        assert chains.first_chain_length is not None
        assert shape.length.mean is not None
        assert chains.first_chain_length <= shape.length.mean
        is_longer = chains.first_chain_length < shape.length.mean
        assert is_longer == (chains.n_longer > 0)
    assert any(shape.chains and shape.chains.n_longer for shape in report.trees), "some side branch has to pay"


def test_the_sentences_name_every_shape_and_what_was_left_out(report: TreeReport) -> None:
    text = " ".join(sentences(report))
    assert "gives plain decoding's own 120 tokens" in text
    assert all(shape.name in text for shape in [*report.measured, *report.left_out])
    assert "chosen and measured on the same prompts" in text


def test_without_a_dynamic_tree_there_is_no_best_one(tmp_path: Path) -> None:
    pair, prompts = write_tiny_pair(tmp_path), prompts_from_ids(random_prompts([3]))
    report = measure_trees(*pair, prompts, ["chain-1"], (4,), max_new_tokens=4, dtype="float64", device="cpu")
    assert [left.name for left in report.left_out] == ["best-4"]
    assert report.left_out[0].reason.startswith("no dynamic tree was measured")
    assert not any("best tree" in text for text in sentences(report)[:-1])


@given(trees(), st.data())
def test_a_chain_agrees_as_far_as_its_tokens_are_the_text(tree: FlatTree, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=tree.n_nodes - 1, max_size=tree.n_nodes - 1))
    text = data.draw(st.lists(st.integers(0, 2), max_size=6))
    agreed = agreed_drafts(StepTree(tuple(tokens), tree.parents, (0,) * tree.n_nodes, ()), text)
    for node in range(tree.n_nodes):
        drafts = [tokens[above - 1] for above in ancestors(tree, node)[1:]]
        naive = 0
        while naive < min(len(drafts), len(text)) and drafts[naive] == text[naive]:
            naive += 1
        assert agreed[node] == naive


@pytest.mark.parametrize("text", [[7, 9, 1], [7, 7, 4], [8, 5, 2]])
def test_a_tree_that_stops_before_a_chain_inside_it_is_found(text: list[int]) -> None:
    checked = check_chains([one_step(text, 2)])
    assert (checked.n_steps, checked.n_chains) == (1, 3)
    right = one_step(text, 2).req_metrics.steps[0]
    short = replace(right, n_accepted=1, n_committed=2)
    wrong = Response("", [0, *text], 2, "length", RequestMetrics(None, (short,)))
    with pytest.raises(InvariantViolated, match=r"prompt 0, step 0: the tree accepted 1 drafts, .* agrees with 2"):
        check_chains([wrong])


def test_a_tree_that_goes_beyond_the_text_is_found_and_a_cut_step_is_not() -> None:
    step = one_step([7, 9, 1], 2).req_metrics.steps[0]
    with pytest.raises(InvariantViolated, match="agrees with 1"):
        check_chains([Response("", [0, 7, 3, 1], 2, "length", RequestMetrics(None, (step,)))])
    cut = replace(step, n_committed=1, cut=True)
    assert check_chains([Response("", [0, 7], 2, "length", RequestMetrics(None, (cut,)))]).n_steps == 1


def test_the_chain_of_first_children_takes_the_likeliest_child_of_each_node() -> None:
    assert first_children(StepTree.of(TOKENS, PARENTS, ())) == 3
    gaps = StepTree(TOKENS, PARENTS, (0, 4, 1, 0, 1, 2), ())
    assert first_children(gaps) == 5, "of the root's children the second is likelier"
    assert check_chains([one_step([7, 9, 1], 2)]).n_longer == 0
    beside = check_chains([one_step([8, 5, 1], 2)])
    assert (beside.n_longer, beside.first_chain_length) == (1, 1.0)


def test_tokens_that_differ_are_counted_and_the_first_is_named() -> None:
    assert differences([[1, 2], [3]], [[1, 2], [3]]) == (0, None)
    n, first = differences([[1, 2, 3], [3]], [[1, 5, 6], [3, 4]])
    assert (n, first) == (3, Difference(0, 1, 2, 5))
    assert str(Difference(0, 1, 2, 5)) == "prompt 0, token 1: 5 where plain decoding gives 2"
    assert differences([[1]], [[1, 9]]) == (1, Difference(0, 1, None, 9))


def test_a_token_unlike_plain_decodings_is_in_the_row_and_the_sentence() -> None:
    shape, plain = shape_named("mc_sim_7b_63"), Response("", [0, 7, 9, 2], 2, "length", RequestMetrics(None, ()))
    counted = count_shape(shape, 64, 4, [one_step([7, 9, 1], 2)], [plain])
    assert counted.row_values()["n_different_tokens"] == 1
    assert counted.row_values()["first_difference"] == "prompt 0, token 3: 1 where plain decoding gives 2"
    assert counted.row_values()["acceptance_length"] == 3.0
    report = TreeReport("float32", [counted])
    assert sentences(report)[0].startswith(
        "1 of 4 generated tokens are not those of plain decoding, the first at mc_sim"
    )


def test_the_shapes_of_the_requirement_have_their_settings() -> None:
    named = {name: shape_named(name) for name in SHAPES}
    assert [shape.kind for shape in named.values()] == ["plain", "chain", "chain", "static", "dynamic"]
    dynamic = named["dynamic-60/7/10"].settings
    wanted = {"num_speculative_tokens": 8, "max_decoding_tokens": 60, "dynamic_tree_max_top_k": 10}
    assert {key: dynamic[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", ["chain-0", "chain-9", "chain", "best-16", "dynamic-60/8/10", "none.json", "tree"])
def test_a_name_that_is_no_shape_is_refused(name: str) -> None:
    with pytest.raises((ExperimentError, ConfigError)) as refused:
        shape_named(name)
    assert refused.value.allowed
    assert refused.value.remedy


@pytest.mark.parametrize("given", [{"budgets": (1,)}, {"max_new_tokens": 1}, {"prompts": []}])
def test_arguments_that_measure_nothing_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"prompts": prompts_from_ids([[1, 2]]), **given}
    with pytest.raises(ExperimentError, match="prompts, max_new_tokens"):
        measure_trees(tmp_path, tmp_path, **arguments)
