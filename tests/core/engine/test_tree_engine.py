"""Trees change no token: static choices and dynamic trees give the target's own greedy output, in any company."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import static_trees
from tiny_engines import (
    Pair,
    accepted_counts,
    drafting_engine,
    is_empty,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import ConfigError
from eagle3core.trees import StaticTree, most_dynamic_nodes

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17, 30]


@pytest.fixture(scope="module")
def baseline(pair: Pair) -> list[list[int]]:
    return plain_tokens(pair, random_prompts(LENGTHS), 20)


@st.composite
def dynamic_settings(draw: st.DrawFn) -> dict[str, Any]:
    k, depth = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    nodes = draw(st.integers(depth + 1, max(depth + 1, min(most_dynamic_nodes(k, depth), 40))))
    return {
        "use_dynamic_tree": True, "dynamic_tree_max_top_k": k, "num_speculative_tokens": depth,
        "max_decoding_tokens": nodes,
    }  # fmt: skip


CHOICES, N_SLOTS = static_trees(max_nodes=12, max_rank=5), st.integers(1, 4)


@settings(max_examples=5)
@given(CHOICES, N_SLOTS)
def test_any_choices_give_the_tokens_of_plain_decoding(
    pair: Pair, baseline: list[list[int]], tree: StaticTree, n_slots: int
) -> None:
    check_choices(pair, baseline, tree, n_slots)


@pytest.mark.slow
@settings(max_examples=6)
@given(CHOICES, N_SLOTS)
def test_more_choices_give_the_tokens_of_plain_decoding(
    pair: Pair, baseline: list[list[int]], tree: StaticTree, n_slots: int
) -> None:
    check_choices(pair, baseline, tree, n_slots)


def check_choices(pair: Pair, baseline: list[list[int]], tree: StaticTree, n_slots: int) -> None:
    """Tokens of plain decoding, and the tree of every step as it was given."""
    settings = {"choices": tree.paths, "max_non_leaves_per_layer": 16}
    engine = drafting_engine(pair, settings, max_batch_size=n_slots, collect_draft_ranks=True)
    responses = engine.generate(random_prompts(LENGTHS), new_tokens(20))
    assert tokens_of(responses) == baseline
    assert is_empty(engine)
    for response in responses:
        for step in response.req_metrics.steps:
            assert step.tree is not None
            assert (step.tree.parents, step.tree.ranks) == (tree.parents, tree.ranks)


@settings(max_examples=5)
@given(dynamic_settings(), N_SLOTS)
def test_any_dynamic_tree_gives_the_tokens_of_plain_decoding(
    pair: Pair, baseline: list[list[int]], tree: dict[str, Any], n_slots: int
) -> None:
    check_dynamic_tree(pair, baseline, tree, n_slots)


@pytest.mark.slow
@settings(max_examples=6)
@given(dynamic_settings(), N_SLOTS)
def test_more_dynamic_trees_give_the_tokens_of_plain_decoding(
    pair: Pair, baseline: list[list[int]], tree: dict[str, Any], n_slots: int
) -> None:
    check_dynamic_tree(pair, baseline, tree, n_slots)


def check_dynamic_tree(pair: Pair, baseline: list[list[int]], tree: dict[str, Any], n_slots: int) -> None:
    """Tokens of plain decoding, and no request left behind."""
    engine = drafting_engine(pair, tree, max_batch_size=n_slots)
    assert tokens_of(engine.generate(random_prompts(LENGTHS), new_tokens(20))) == baseline
    assert is_empty(engine)


def test_a_step_says_what_its_tree_was_and_which_nodes_were_accepted(pair: Pair) -> None:
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 12}
    responses = drafting_engine(pair, tree, collect_draft_ranks=True).generate(random_prompts(LENGTHS), new_tokens(20))
    assert accepted_counts(responses) >= {0, 1, 2}
    for response in responses:
        for step in response.req_metrics.steps:
            assert step.tree is not None
            assert len(step.tree.accepted) == step.n_accepted
            taken = [step.tree.tokens[node - 1] for node in step.tree.accepted]
            assert taken[: step.n_committed] == response.token_ids[step.start :][: step.n_accepted]


def test_more_candidates_than_the_draft_has_tokens_are_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="takes 10 candidates a node, the draft has 6"):
        drafting_engine(pair, {"use_dynamic_tree": True})


def test_end_tokens_and_budgets_cut_an_accepted_path(tmp_path_factory: pytest.TempPathFactory) -> None:
    ending = write_tiny_pair(tmp_path_factory.mktemp("ending"), eos=[3])
    prompts, budgets = random_prompts(LENGTHS), [new_tokens(n) for n in (1, 2, 3, 9, 40)]
    plain = tiny_engine(ending, None).generate(prompts, budgets)
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 4, "max_decoding_tokens": 20}
    responses = drafting_engine(ending, tree).generate(prompts, budgets)
    assert tokens_of(responses) == tokens_of(plain)
    assert [r.finish_reason for r in responses] == [r.finish_reason for r in plain]
