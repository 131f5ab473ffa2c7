"""Pictures of trees say what their tables say, and a reader's choice of budget hides what the budget leaves out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3core.metrics import StepRecord
from eagle3core.trees import StepTree
from lab.acceptance import tree_figures
from lab.acceptance.intervals import Interval
from lab.acceptance.paths import BestTree, best_tree, count_paths
from lab.acceptance.shapes import fixed_shape, shape_named
from lab.acceptance.tree_counts import ChainsInside, ShapeAcceptance
from lab.acceptance.trees import TreeReport
from lab.figures import Kept

pytestmark = [pytest.mark.reference, pytest.mark.usefixtures("page_style")]

PARENTS = (-1, 0, 0, 1, 1, 2)
TOKENS = (7, 8, 9, 7, 5)


def report() -> TreeReport:
    """Three steps of one tree, and what a best tree of four nodes gave."""
    steps = [
        StepRecord(0, 5, len(way), len(way) + 1, cut=False, tree=StepTree.of(TOKENS, PARENTS, way))
        for way in ((7, 9), (7,), (8, 5))
    ]
    counts = count_paths(steps)
    best = best_tree(counts, 4, max_depth=2, most_ranks=2)
    plain = ShapeAcceptance(shape_named("plain"), 1, 0, 1, 9, 8, 0, Interval(1.0, 1.0, 1.0), (8,), 0, None)
    dynamic = ShapeAcceptance(
        shape_named("dynamic-6/1/2"), 6, 2, 1, 9, 3, 0, Interval(8 / 3, 2.0, 3.0), (0, 1, 2), 0, None,
        paths=counts, chains=ChainsInside(3, 9, 1, 2.0),
    )  # fmt: skip
    own = ShapeAcceptance(
        fixed_shape("best-4", best.choices(4)), 4, 2, 1, 9, 4, 0, Interval(2.0, 1.5, 2.5), (1, 2, 1), 0, None,
        expected=best.expected_length(4), paths=counts, chains=ChainsInside(4, 8, 1, 1.8),
    )  # fmt: skip
    return TreeReport("float64", [plain, dynamic, own], [], dynamic.name, counts, best)


def test_cells_give_share_and_counts_and_say_which_were_offered_seldom() -> None:
    counts = report().counts
    assert counts is not None
    figure, table, *_ = tree_figures.cells(counts, "dynamic", few=3)
    rows = table.to_dict("records")
    assert [(r["depth"], r["rank"], r["offered"], r["accepted"]) for r in rows] == [
        (1, 1, 3, 2), (1, 2, 3, 1), (2, 1, 3, 2), (2, 2, 2, 0)
    ]  # fmt: skip
    assert [r["few"] for r in rows] == [False, False, False, True]
    hatched = [patch for patch in figure.axes[0].patches if patch.get_hatch()]
    assert len(hatched) == 1
    assert "67%\n2/3" in {text.get_text() for text in figure.axes[0].texts}


def test_every_shape_has_a_bar_and_the_best_ones_what_was_expected() -> None:
    figure, table, *_ = tree_figures.lengths(report())
    assert list(table["shape"]) == ["plain", "dynamic-6/1/2", "best-4"]
    assert list(table["nodes"]) == [1, 6, 4]
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([1.0, 8 / 3, 2.0])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "plain (1 node)", "dynamic-6/1/2 (6 nodes)", "best-4 (4 nodes)"
    ]  # fmt: skip
    [expected] = figure.axes[0].lines
    assert list(expected.get_xdata()) == pytest.approx([1 + 2 / 3 + 1 / 3 + 1 / 3])


def test_the_expected_line_grows_by_the_share_of_each_node() -> None:
    figure, table, *_ = tree_figures.budgets(report())
    expected = table[table["what"] == "expected"]
    assert list(expected["nodes"]) == [1, 2, 3, 4]
    assert list(expected["acceptance_length"]) == pytest.approx([1, 5 / 3, 2, 7 / 3])
    assert set(table["what"]) == {"expected", "plain", "dynamic-6/1/2", "best-4"}
    assert len(figure.axes[0].lines) == 3


@given(st.data())
def test_a_node_stands_in_the_row_of_its_likeliest_child_and_no_two_leaves_share_one(data: st.DataObject) -> None:
    paths: list[tuple[int, ...]] = [(0,)]
    for _ in range(data.draw(st.integers(0, 15))):
        child = (*data.draw(st.sampled_from([(), *paths])), data.draw(st.integers(0, 3)))
        paths += [child] if child not in paths else []
    rows = tree_figures.rows_of(paths)
    leaves = [path for path in paths if not any(other[:-1] == path for other in paths)]
    assert sorted(rows[leaf] for leaf in leaves) == list(range(len(leaves)))
    for path in ((), *paths):
        children = [other for other in paths if other[:-1] == path and other != path]
        if children:
            assert rows[path] == rows[min(children)]


def test_a_budget_shows_its_own_nodes_and_hides_the_rest() -> None:
    best = BestTree(((0,), (0, 0), (1,), (0, 1)), (0.6, 0.4, 0.2, 0.1))
    drawing = tree_figures.drawn_tree(best, {2: "2 nodes", 4: "4 <nodes>", 5: "5 nodes"})
    assert list(drawing.table["path"]) == ["1", "1.1", "2", "1.2"]
    kept = Kept.of(drawing, name="tree", prefix="job", order=1)
    groups = set(re.findall(r'id="job-tree-step-(\d)-node-([\d-]+)-dot"', kept.svg))
    assert groups == {("1", "0"), ("2", "0-0"), ("2", "1"), ("3", "0-1")}
    markup = kept.html()
    assert re.findall(r'type="radio" [^>]*?(checked)?>', markup) == ["", "", "checked"]
    assert "4 &lt;nodes&gt;" in markup
    [style] = re.findall(r"<style>(.*?)</style>", markup)
    hidden = re.findall(r'\[id="([\w-]+)-(\d)"\]:checked~\.drawing \[id\*="step-(\d)-"\]', style)
    assert [(chosen, group) for _, chosen, group in hidden] == [("1", "2"), ("1", "3"), ("2", "3")]
    assert {stem for stem, _, _ in hidden} == {re.findall(r'name="([\w-]+)"', markup)[1]}


@pytest.mark.slow
def test_a_browser_hides_the_nodes_that_the_chosen_budget_leaves_out(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    best = BestTree(((0,), (0, 0), (1,)), (0.6, 0.4, 0.2))
    drawing = tree_figures.drawn_tree(best, {2: "2 nodes", 3: "3 nodes", 4: "4 nodes"})
    markup = Kept.of(drawing, name="tree", prefix="32_trees", order=1).html()
    # A page of our own without the report's content policy, so that a script can read what style makes of it.
    asking = """
    const dots = [...document.querySelectorAll('[id$="-dot"]')], told = [];
    for (const chosen of document.querySelectorAll('input')) {
      chosen.checked = true;
      told.push(dots.filter(dot => getComputedStyle(dot).opacity > 0.5).length);
    }
    document.title = told.join(' ');"""
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>t</title>{markup}<script>{asking}</script>", encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<title>1 2 3</title>" in dom


def test_a_figure_with_a_choice_is_stored_and_read_again(tmp_path: Path) -> None:
    best = BestTree(((0,), (1,)), (0.6, 0.2))
    drawing = tree_figures.drawn_tree(best, {2: "2 nodes", 3: "3 nodes"})
    kept = Kept.of(drawing, name="tree", prefix="job", order=1)
    kept.save(tmp_path)
    loaded = Kept.load(tmp_path / "tree.json")
    assert loaded.html() == kept.html()


def test_budgets_to_choose_from_end_with_the_largest_tree() -> None:
    steps = tree_figures.budget_steps(report())
    assert list(steps) == [2, 4]
    assert steps[4] == "4 nodes: 2.33"
    assert tree_figures.budget_steps(TreeReport("float64")) == {}
