"""Fixed trees: what their paths have to be, what is counted, and that kernels of dynamic trees grow them exactly."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import static_trees
from tree_arrays import paths_of

from eagle3core.errors import ConfigError
from eagle3core.kernels.tree.growth import grow_tree_reference, new_growth, pool_size
from eagle3core.kernels.tree.select_tree import select_tree_reference
from eagle3core.step.tree import FlatTree
from eagle3core.trees import StaticTree, beam_scores, most_dynamic_nodes, read_choices

pytestmark = pytest.mark.reference

# Of the public list, sorted by length and then by path, as JSON without spaces.
PUBLISHED_SHA256 = "7e63acaa76293e94e5a2f3f383aa198ebed44299056717e735e538d6f0d12807"


def published() -> StaticTree:
    tree = read_choices("mc_sim_7b_63")
    assert tree is not None
    return tree


def test_the_published_list_has_63_nodes_in_4_levels_and_42_leaves() -> None:
    tree = published()
    assert (len(tree.paths), tree.n_nodes, tree.depth, tree.most_rank, tree.top_k) == (63, 64, 4, 10, 10)
    assert Counter(map(len, tree.paths)) == {1: 10, 2: 28, 3: 23, 4: 2}
    assert tree.non_leaves_by_depth == (1, 10, 10, 1)
    assert len(paths_of(FlatTree(tree.parents))) == 42
    canonical = json.dumps(tree.paths, separators=(",", ":")).encode()
    assert hashlib.sha256(canonical).hexdigest() == PUBLISHED_SHA256


def test_nodes_are_sorted_by_level_then_by_path_and_ranks_may_have_gaps() -> None:
    tree = StaticTree(((0, 2), (3,), (0,), (3, 1), (0, 2, 5)))
    assert tree.paths == ((0,), (3,), (0, 2), (3, 1), (0, 2, 5))
    assert tree.parents == (-1, 0, 0, 1, 2, 3)
    assert (tree.depth, tree.most_rank, tree.non_leaves_by_depth, tree.top_k) == (3, 6, (1, 2, 1), 6)
    assert FlatTree(tree.parents).max_depth == 3


def test_lists_are_as_good_as_tuples_and_give_an_equal_tree() -> None:
    lists: Any = [[1], [0]]
    assert StaticTree(lists) == StaticTree(((0,), (1,)))
    assert hash(StaticTree(lists)) == hash(StaticTree(((0,), (1,))))


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        ([], "choices are []"),
        (5, "choices are 5"),
        ("00", "choices are '00'"),
        ([[]], "a path of the choices is []"),
        ([0, 1], "a path of the choices is 0"),
        ([["0"]], "has the rank '0'"),
        ([[True]], "has the rank True"),
        ([[0.0]], "has the rank 0.0"),
        ([[-1]], "has the rank -1"),
        ([[16]], "has the rank 16"),
        ([[0], [0]], "path [0] stands twice"),
        ([[0], [1, 0]], "path [1, 0] of the choices has no parent [1]"),
        ([[0] * n for n in range(1, 10)], "a path of the choices has 9 ranks"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_path(paths: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StaticTree(paths)
    assert named in caught.value.what


def test_a_level_with_more_non_leaves_than_a_beam_has_places_is_refused() -> None:
    one = [(a,) for a in range(2)]
    two = [(a, b) for a in range(2) for b in range(9)]
    three = [(*path, 0) for path in two]
    assert StaticTree((*one, *two, *three[:16])).non_leaves_by_depth == (1, 2, 16)
    with pytest.raises(ConfigError, match="a level of the choices has 17 nodes with children"):
        StaticTree((*one, *two, *three[:17]))


def grown_by_the_kernels(tree: StaticTree, top_k: int) -> None:
    """That growing by the tree's scores and choosing the best gives exactly its nodes, each with its own token."""
    scores = beam_scores(tree, top_k)
    assert scores.shape == (tree.depth, top_k, top_k)
    assert scores.dtype == torch.float32
    # Every candidate has a token of its own: level, place of the parent in the beam, rank.
    ids = torch.arange(scores.numel(), dtype=torch.int32).view(scores.shape)
    growth = new_growth(1, top_k, tree.depth, torch.device("cpu"))
    for level in range(tree.depth):
        rows = 1 if level == 0 else top_k
        growth = grow_tree_reference(growth, scores[None, level, :rows], ids[None, level, :rows], None, level)
    assert growth.scores.isfinite().all()
    roots = torch.tensor([-5], dtype=torch.int32)
    chosen = select_tree_reference(growth.scores, growth.tokens, growth.parents, roots, tree.n_nodes)
    assert chosen.parents[0].tolist() == list(tree.parents)
    places = {}
    for path in sorted({path[:-1] for path in tree.paths}):
        places[path] = sum(len(other) == len(path) for other in places)
    expected = [int(ids[len(path) - 1, places[path[:-1]], path[-1]]) for path in tree.paths]
    assert chosen.tokens[0].tolist() == [-5, *expected]
    assert sum(growth.scores[0].gt(-2).tolist()) == len(tree.paths), "no other candidate is near"


@settings(max_examples=100)
@given(static_trees(), st.integers(0, 3))
def test_its_scores_make_the_kernels_grow_exactly_this_tree_in_order(tree: StaticTree, extra: int) -> None:
    grown_by_the_kernels(tree, min(tree.top_k + extra, 16))


@pytest.mark.parametrize("top_k", [10, 16])
def test_the_published_tree_is_grown_by_the_kernels_too(top_k: int) -> None:
    grown_by_the_kernels(published(), top_k)


def test_a_chain_and_a_tree_at_every_limit_are_grown_too() -> None:
    grown_by_the_kernels(StaticTree(tuple((0,) * n for n in range(1, 9))), 1)
    wide = [(rank,) for rank in range(16)]
    deep = [(*path, *[15] * n) for path in wide for n in range(1, 8)]
    grown_by_the_kernels(StaticTree((*wide, *deep)), 16)


def test_fewer_candidates_than_the_tree_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 10, which the choices need"):
        beam_scores(published(), 9)


@given(st.integers(1, 16), st.integers(1, 8))
def test_the_largest_dynamic_tree_is_all_that_the_kernels_score_and_the_root(k: int, levels: int) -> None:
    assert most_dynamic_nodes(k, levels) == pool_size(k, levels) + 1
