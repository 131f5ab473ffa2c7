"""Steps whose tree the draft grows: plain greedy decoding's tokens, at any shape and in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import Pair, decoded, random_prompts, tree_runner, write_tiny_pair

from eagle3core.errors import ConfigError
from eagle3core.kernels.tree.growth import pool_size
from eagle3core.step.run import DeviceRunner
from eagle3core.step.tree import GrownTree, chain_tree

pytestmark = pytest.mark.reference

N_TOKENS = 16
LENGTHS = [5, 9, 3]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def growing(pair: Pair, tree: GrownTree, *, n_slots: int) -> DeviceRunner:
    return tree_runner(pair[0], tree, draft=pair[1], n_slots=n_slots)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    runner = tree_runner(pair[0], chain_tree(0), n_slots=3)
    return decoded(runner, random_prompts(LENGTHS), N_TOKENS)[0]


@st.composite
def shapes(draw: st.DrawFn) -> GrownTree:
    top_k, depth = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    return GrownTree(top_k, depth, draw(st.integers(2, min(pool_size(top_k, depth), 40) + 1)))


@settings(deadline=None, max_examples=6)
@given(shapes(), st.integers(1, 3))
def test_a_grown_tree_of_any_shape_gives_the_tokens_of_plain_decoding(
    pair: Pair, plain: list[list[int]], tree: GrownTree, n: int
) -> None:
    tokens, rows = decoded(growing(pair, tree, n_slots=3), random_prompts(LENGTHS)[:n], N_TOKENS)
    assert tokens == plain[:n]
    assert all(row.n_accepted <= tree.max_depth and not row.fault for row in rows)


def test_a_tree_of_one_child_a_node_accepts_what_the_chain_accepts(pair: Pair) -> None:
    chain = tree_runner(pair[0], chain_tree(3), draft=pair[1], n_slots=3)
    grown = growing(pair, GrownTree(1, 3, 4), n_slots=3)
    both = [decoded(runner, random_prompts(LENGTHS), N_TOKENS) for runner in (chain, grown)]
    assert both[0] == both[1]
    assert {row.n_accepted for row in both[0][1]} >= {0, 1}


@pytest.mark.parametrize(("top_k", "depth", "nodes"), [(2, 3, 12), (0, 3, 2), (2, 0, 2), (2, 3, 1)])
def test_a_tree_that_its_levels_cannot_fill_is_refused(top_k: int, depth: int, nodes: int) -> None:
    with pytest.raises(ConfigError, match="nodes"):
        GrownTree(top_k, depth, nodes)


def test_a_draft_whose_logits_are_no_numbers_costs_its_drafts_and_nothing_else(
    pair: Pair, plain: list[list[int]]
) -> None:
    runner = growing(pair, GrownTree(3, 3, 9), n_slots=3)
    assert runner.draft is not None
    runner.draft.fc.weight[0] = float("nan")
    tokens, rows = decoded(runner, random_prompts(LENGTHS), N_TOKENS)
    assert tokens == plain
    assert not any(row.fault for row in rows)
    assert not torch.stack([torch.tensor(row.drafts) for row in rows]).lt(0).any()
