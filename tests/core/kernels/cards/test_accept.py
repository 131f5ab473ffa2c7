"""Greedy acceptance keeps the longest path the target agrees with, against a slow walk in plain Python."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import trees

from eagle3core.kernels.tree.accept import Commit, accept_reference, argmax_reference
from eagle3core.step.tree import FlatTree, chain_tree

pytestmark = pytest.mark.reference

Row = list[int]


def walk(tree: FlatTree, tokens: Row, choices: Row) -> Row:
    """Longest root path on which each token equals the choice after its parent; the earliest node among equals."""
    best = [0]
    for node in range(tree.n_nodes):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        agreed = all(tokens[b] == choices[a] for a, b in itertools.pairwise(path))
        if agreed and len(path) > len(best):
            best = path
    return best


def accept(tree: FlatTree, tokens: list[Row], choices: list[Row]) -> Commit:
    """The op under test: the same tree for every sequence, all of them alive, no end tokens."""
    batch, none = len(tokens), torch.empty(0, dtype=torch.int32)
    parents = torch.tensor(tree.parents, dtype=torch.int32).expand(batch, -1)
    depths, alive = tree.depths.int().expand(batch, -1), torch.ones(batch, dtype=torch.bool)
    nodes, chosen = (torch.tensor(values, dtype=torch.int32) for values in (tokens, choices))
    return accept_reference(nodes, chosen, parents, depths, alive, none, tree.max_depth + 1)


def rows(tree: FlatTree, batch: int) -> st.SearchStrategy[list[Row]]:
    """Tokens of three kinds, so that agreement and equal siblings are common."""
    row = st.lists(st.integers(0, 2), min_size=tree.n_nodes, max_size=tree.n_nodes)
    return st.lists(row, min_size=batch, max_size=batch)


@given(st.data(), trees(), st.integers(1, 3))
def test_the_accepted_path_is_that_of_a_plain_walk(data: st.DataObject, tree: FlatTree, batch: int) -> None:
    tokens, choices = data.draw(rows(tree, batch)), data.draw(rows(tree, batch))
    got = accept(tree, tokens, choices)
    width = tree.max_depth + 1
    for b in range(batch):
        path = walk(tree, tokens[b], choices[b])
        padding = [-1] * (width - len(path))
        assert got.path[b].tolist() == path + padding
        assert int(got.n_accepted[b]) == len(path) - 1
        assert int(got.bonus[b]) == choices[b][path[-1]]
        assert got.tokens[b].tolist() == [tokens[b][node] for node in path[1:]] + [choices[b][path[-1]]] + padding


@given(st.data(), st.integers(0, 8))
def test_a_chain_accepts_its_common_prefix_with_the_target(data: st.DataObject, k: int) -> None:
    tokens, choices = data.draw(rows(chain_tree(k), 1)), data.draw(rows(chain_tree(k), 1))
    agreed = [draft == choice for draft, choice in zip(tokens[0][1:], choices[0], strict=False)]
    n_accepted = [*agreed, False].index(False)
    assert accept(chain_tree(k), tokens, choices).tokens[0, : n_accepted + 1].tolist() == choices[0][: n_accepted + 1]


def test_of_two_equal_siblings_the_one_with_the_longer_agreement_is_taken() -> None:
    tree = FlatTree((-1, 0, 0, 2))
    got = accept(tree, [[9, 5, 5, 7]], [[5, 7, 7, 8]])
    assert got.path.tolist() == [[0, 2, 3]]
    assert got.tokens.tolist() == [[5, 7, 8]]


def test_a_match_below_a_rejected_node_counts_for_nothing() -> None:
    got = accept(FlatTree((-1, 0, 1)), [[9, 4, 6]], [[5, 6, 1]])
    assert (got.n_accepted.tolist(), got.tokens.tolist()) == ([0], [[5, -1, -1]])


def test_the_argmax_of_ties_is_the_lowest_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [float("-inf"), -5.0, -5.0, float("-inf")]])
    assert argmax_reference(logits).tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_argmax_of_any_dtype_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.randint(0, 5, (50, 3, 40)).to(dtype)  # many ties
    expected = [[row.index(max(row)) for row in rows] for rows in logits.tolist()]
    assert argmax_reference(logits).tolist() == expected
