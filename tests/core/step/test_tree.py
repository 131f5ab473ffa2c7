"""A tree as flat arrays: depths, masks and paths follow from the parents, and the parents from the mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import ancestors, trees
from tree_arrays import paths_of, tree_from_mask

from eagle3core.errors import ConfigError
from eagle3core.step.tree import FlatTree, chain_tree

pytestmark = pytest.mark.reference


@given(trees())
def test_a_row_of_the_mask_shows_the_node_and_its_ancestors(tree: FlatTree) -> None:
    for node in range(tree.n_nodes):
        assert tree.mask[node].nonzero()[:, 0].tolist() == ancestors(tree, node)
        assert int(tree.depths[node]) == len(ancestors(tree, node)) - 1


@given(trees())
def test_the_paths_are_the_ways_to_the_leaves_in_leaf_order(tree: FlatTree) -> None:
    leaves = [node for node in range(tree.n_nodes) if node not in tree.parents]
    assert [[node for node in row if node >= 0] for row in paths_of(tree).tolist()] == [
        ancestors(tree, leaf) for leaf in leaves
    ]
    assert paths_of(tree).shape[1] == tree.max_depth + 1
    for row in paths_of(tree).tolist():  # padding comes last
        assert sorted(row, key=lambda node: node < 0) == row


@given(trees())
def test_the_mask_gives_back_the_tree(tree: FlatTree) -> None:
    assert tree_from_mask(tree.mask) == tree
    assert tree_from_mask(tree.mask.int().tolist()) == tree


@given(trees(), st.data())
def test_a_damaged_mask_is_no_tree_or_another_one(tree: FlatTree, data: st.DataObject) -> None:
    mask = tree.mask.clone()
    row, column = (data.draw(st.integers(0, tree.n_nodes - 1)) for _ in "rc")
    mask[row, column] ^= True
    try:
        other = tree_from_mask(mask)
    except ConfigError:
        return  # refused, as most single flips are
    assert other != tree
    assert torch.equal(other.mask, mask)


def test_a_chain_has_one_child_a_node_and_plain_decoding_none() -> None:
    chain = chain_tree(3)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.depths.tolist() == [0, 1, 2, 3]
    assert torch.equal(chain.mask, torch.ones(4, 4).tril().bool())
    assert paths_of(chain).tolist() == [[0, 1, 2, 3]]
    plain = chain_tree(0)
    assert (plain.n_nodes, plain.max_depth, paths_of(plain).tolist()) == (1, 0, [[0]])


def test_a_hand_counted_tree_has_the_arrays_drawn_on_paper() -> None:
    tree = FlatTree((-1, 0, 0, 1, 1, 2, 5))
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert paths_of(tree).tolist() == [[0, 1, 3, -1], [0, 1, 4, -1], [0, 2, 5, 6]]
    assert tree.mask[6].tolist() == [True, False, True, False, False, True, True]


@pytest.mark.parametrize("parents", [(), (0,), (0, -1), (1, 0)])
def test_a_tree_starts_with_its_root(parents: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="put the root first"):
        FlatTree(parents)


@pytest.mark.parametrize(("parents", "node"), [((-1, -1), 1), ((-1, 1), 1), ((-1, 0, 3, 0), 2)])
def test_parents_come_before_their_children(parents: tuple[int, ...], node: int) -> None:
    with pytest.raises(ConfigError, match=f"node {node} has parent {parents[node]}\n"):
        FlatTree(parents)


@pytest.mark.parametrize("shape", [(0, 0), (2, 3), (4,), (1, 2, 2)])
def test_a_mask_is_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="give one square mask"):
        tree_from_mask(torch.ones(shape))
