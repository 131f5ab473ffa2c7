"""What a step leaves behind: caches and pending entries that a fresh prefill of the true sequence would make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import ancestors, trees
from stepping import QUIET, admit, advance, assert_state_is_true, close, start
from tiny_engines import N_VOCAB, Pair, new_tokens, plain_tokens, random_prompts, tiny_engine, tokens_of, tree_runner

from eagle3core.step.outcome import RowOutcome
from eagle3core.step.run import DeviceRunner
from eagle3core.step.state import _tensors
from eagle3core.step.tree import FlatTree
from eagle3core.trace import RecordingTrace, Trace

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_caches_hold_true_target_states_after_every_step(pair: Pair, k: int) -> None:
    engine, fresh = tiny_engine(pair, k), tiny_engine(pair, k)
    sequences = start(engine, random_prompts([7, 1, 13]))
    assert_state_is_true(engine, fresh, sequences)
    accepted: set[int] = set()
    for _ in range(8):
        accepted |= {row.n_accepted for row in advance(engine, sequences)}
        assert_state_is_true(engine, fresh, sequences)
    assert min(accepted) == 0 < max(accepted)


def test_company_changes_no_draft(pair: Pair) -> None:
    prompts = random_prompts([7, 1, 13])
    together, alone = tiny_engine(pair, 4), [tiny_engine(pair, 4) for _ in prompts]
    both = start(together, prompts)
    each = [start(engine, [prompt]) for engine, prompt in zip(alone, prompts, strict=True)]
    lengths = set()
    for _ in range(8):
        rows = advance(together, both)
        singles = [advance(engine, sequence)[0] for engine, sequence in zip(alone, each, strict=True)]
        assert [(row.drafts, row.tokens) for row in rows] == [(row.drafts, row.tokens) for row in singles]
        lengths.add(tuple(row.n_accepted for row in rows))
    assert any(len(set(accepted)) > 1 for accepted in lengths), "sequences of one batch accepted different lengths"


Guesses = tuple[FlatTree, list[list[int]], list[list[bool]]]


@st.composite
def guesses(draw: st.DrawFn) -> Guesses:
    """A tree of depth at most 3, a random token for each node of two slots, and which nodes are told the truth."""
    tree = draw(trees(max_nodes=12).filter(lambda tree: tree.max_depth == 3))
    tokens = [[draw(st.integers(0, N_VOCAB - 1)) for _ in range(tree.n_nodes)] for _ in range(2)]
    told = [[draw(st.booleans()) for _ in range(tree.n_nodes)] for _ in range(2)]
    return tree, tokens, told


def step_with(runner: DeviceRunner, tokens: list[list[int]], trace: Trace = QUIET) -> list[RowOutcome]:
    """One step over trees whose node tokens are given, a list a slot."""
    runner.state.step.drafted.copy_(torch.tensor(tokens, dtype=torch.int32).T.flatten())
    runner.enqueue(len(tokens), 0, trace)
    [outcome] = runner.collect(everything=True)
    return outcome.rows


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    """Plain greedy output of the two prompts below."""
    return plain_tokens(pair, random_prompts([6, 9]), 50)


@given(guesses())
@settings(max_examples=8)
def test_a_branching_tree_is_verified_in_one_pass_and_decoding_goes_on_from_its_best_path(
    pair: Pair, plain: list[list[int]], case: Guesses
) -> None:
    check_tree(pair, plain, case)


@pytest.mark.slow
@given(guesses())
@settings(max_examples=25)
def test_more_branching_trees_are_verified_in_one_pass(pair: Pair, plain: list[list[int]], case: Guesses) -> None:
    check_tree(pair, plain, case)


def check_tree(pair: Pair, plain: list[list[int]], case: Guesses) -> None:
    """A tree's accepted path is the longest that agrees with plain decoding, step after step."""
    tree, guessed, told = case
    prompts = random_prompts([6, 9])
    runner = tree_runner(pair[0], tree, n_slots=2)
    made = [[admit(runner, slot, prompt)] for slot, prompt in enumerate(prompts)]
    while min(map(len, made)) < 12:
        right = [tokens[len(ours) - 1 :] for tokens, ours in zip(plain, made, strict=True)]
        nodes = [
            [answers[int(tree.depths[i])] if knows[i] else guess[i] for i in range(tree.n_nodes)]
            for answers, guess, knows in zip(right, guessed, told, strict=True)
        ]
        for row in step_with(runner, nodes):
            truth, tokens = [right[row.slot][int(depth)] for depth in tree.depths], nodes[row.slot]
            agreed = [all(a == 0 or tokens[a] == truth[a] for a in ancestors(tree, i)) for i in range(tree.n_nodes)]
            assert row.n_accepted == max(int(tree.depths[i]) for i in range(tree.n_nodes) if agreed[i])
            made[row.slot] += row.tokens
    assert made == [tokens[: len(ours)] for tokens, ours in zip(plain, made, strict=True)]


def test_logits_of_a_tree_node_are_those_of_its_own_path_alone(pair: Pair) -> None:
    tree = FlatTree((-1, 0, 0, 1, 2, 2))
    prompt, tokens = random_prompts([9])[0], [3, 1, 4, 1, 5, 2]
    runner, trace = tree_runner(pair[0], tree), RecordingTrace()
    tokens[0] = admit(runner, 0, prompt)
    step_with(runner, [tokens], trace)
    for node in range(tree.n_nodes):
        path = [tokens[i] for i in tree.mask[node].nonzero()[:, 0].tolist()]
        alone = RecordingTrace()
        admit(tiny_engine(pair, None).runner, 0, prompt + path, alone)
        close(trace.tensors["verify/target.head"][node], alone.tensors["prefill/target.head"][-1])


def test_a_step_keeps_every_buffer_where_it_was(pair: Pair) -> None:
    engine = tiny_engine(pair, 3)
    sequences = start(engine, random_prompts([5, 9]))
    before = addresses(engine.runner)
    for _ in range(3):
        advance(engine, sequences)
    assert addresses(engine.runner) == before


def addresses(runner: DeviceRunner) -> list[int]:
    """Where the tensors of a runner's state lie."""
    return [tensor.data_ptr() for tensor in _tensors(runner.state)]


@pytest.mark.parametrize("k", [None, 3])
def test_what_an_earlier_request_left_in_the_caches_cannot_reach_a_later_one(pair: Pair, k: int | None) -> None:
    prompts = random_prompts([5, 21, 2, 9])
    expected = plain_tokens(pair, prompts, 12)
    engine = tiny_engine(pair, k)
    earlier = [engine.add_request(prompt, new_tokens(30)) for prompt in random_prompts([20, 20, 20])]
    engine.step()
    state = engine.runner.state
    held = state.tables[state.tables >= 0].long()
    for cache, value in zip(state.pages, (torch.nan, torch.inf) * 2, strict=False):
        cache.index_fill_(cache.dim() - 4, held, value)  # as a request that overflowed would leave it
    while engine.step():
        pass
    assert {handle.finish_reason for handle in earlier} == {"error"}
    assert tokens_of(engine.generate(prompts, new_tokens(12))) == expected
