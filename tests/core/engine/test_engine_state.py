"""What a step leaves behind: caches and pending entries that a fresh prefill of the true sequence would make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import ancestors, trees
from tiny_engines import N_VOCAB, Pair, new_tokens, random_prompts, tiny_engine, tokens_of

from eagle3core import Engine
from eagle3core.decode.expand import extend_pending
from eagle3core.decode.kvcache import PagedCache, blocks_for
from eagle3core.decode.prefill import prefill
from eagle3core.decode.slots import active_slots, release_slot
from eagle3core.decode.step import commit, decode_step, reserve, verify
from eagle3core.errors import InvariantViolated
from eagle3core.kernels.tree.accept import accept_greedy_reference, argmax_reference
from eagle3core.step.tree import FlatTree, chain_tree
from eagle3core.trace import RecordingTrace, Trace

pytestmark = pytest.mark.reference

QUIET = Trace()


def start(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Prefill one slot a prompt; the sequences so far, first sampled token included."""
    sequences = []
    for slot, prompt in enumerate(prompts):
        first = prefill(engine.target, engine.draft, engine.state, slot, torch.tensor(prompt), 8, QUIET)
        sequences.append([*prompt, first])
    return sequences


def advance(engine: Engine, sequences: list[list[int]]) -> list[int]:
    """One step; appends what each slot committed, and gives the accepted lengths."""
    result = decode_step(engine.target, engine.draft, engine.state, QUIET)
    for slot, tokens in zip(result.slots.tolist(), result.tokens.tolist(), strict=True):
        sequences[slot] += [token for token in tokens if token >= 0]
    return [int(n) for n in result.n_accepted]


def rows(cache: PagedCache, slot: int, n_tokens: int) -> torch.Tensor:
    """Keys and values `[2 * layers, n_tokens, K, D]` of a slot."""
    view = cache.view(torch.tensor([slot]))
    return torch.stack([tensor for layer in range(len(cache.k)) for tensor in view.read(layer, 0, n_tokens)])


def assert_state_is_true(engine: Engine, fresh: Engine, sequences: list[list[int]]) -> None:
    """Every slot's caches and pending taps are those of a fresh prefill of its sequence."""
    state = engine.state
    assert state.draft_cache is not None
    for slot, sequence in enumerate(sequences):
        n_cached, n_read = int(state.lengths[slot]), int(state.draft_lengths[slot])
        n_pending = int(state.pending_counts[slot])
        assert (n_cached, int(state.roots[slot])) == (len(sequence) - 1, sequence[-1])
        assert n_read + n_pending == n_cached
        trace = RecordingTrace()
        prefill(fresh.target, fresh.draft, fresh.state, 0, torch.tensor(sequence[:-1]), 64, trace)
        assert fresh.state.draft_cache is not None
        close(rows(state.target_cache, slot, n_cached), rows(fresh.state.target_cache, 0, n_cached))
        close(rows(state.draft_cache, slot, n_read), rows(fresh.state.draft_cache, 0, n_read))
        close(state.pending_taps[slot, :n_pending], trace.tensors["prefill/target.taps"][n_read:])
        assert state.pending_tokens[slot, :n_pending].tolist() == sequence[n_read + 1 :]
        release_slot(fresh.state, 0)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of fp64 sums of another order."""
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_caches_hold_true_target_states_after_every_step(pair: Pair, k: int) -> None:
    engine, fresh = tiny_engine(pair, k), tiny_engine(pair, k)
    sequences = start(engine, random_prompts([7, 1, 13]))
    assert_state_is_true(engine, fresh, sequences)
    accepted: set[int] = set()
    for _ in range(8):
        accepted |= set(advance(engine, sequences))
        assert_state_is_true(engine, fresh, sequences)
    assert min(accepted) == 0 < max(accepted)


def test_a_step_frees_every_block_past_what_it_kept(pair: Pair) -> None:
    engine = tiny_engine(pair, 8, block_size=2, prefill_chunk=2)
    sequences = start(engine, random_prompts([7, 2, 12]))
    state = engine.state
    assert state.draft_cache is not None
    for _ in range(4):
        advance(engine, sequences)
        for slot in range(3):
            assert len(state.target_cache.held[slot]) == blocks_for(int(state.lengths[slot]), 2)
            assert len(state.draft_cache.held[slot]) == blocks_for(int(state.draft_lengths[slot]), 2)


def test_company_changes_no_draft(pair: Pair) -> None:
    prompts = random_prompts([7, 1, 13])
    together, alone = tiny_engine(pair, 4), [tiny_engine(pair, 4) for _ in prompts]
    start(together, prompts)
    for engine, prompt in zip(alone, prompts, strict=True):
        start(engine, [prompt])
    lengths = set()
    for _ in range(8):
        both = decode_step(together.target, together.draft, together.state, QUIET)
        each = [decode_step(engine.target, engine.draft, engine.state, QUIET) for engine in alone]
        assert both.drafts.tolist() == [result.drafts[0].tolist() for result in each]
        assert both.tokens.tolist() == [result.tokens[0].tolist() for result in each]
        lengths.add(tuple(both.n_accepted.tolist()))
    assert any(len(set(accepted)) > 1 for accepted in lengths), "sequences of one batch accepted different lengths"


@st.composite
def guesses(draw: st.DrawFn) -> tuple[FlatTree, list[list[int]], list[list[bool]]]:
    """A tree of depth at most 3, a random token for each node of two slots, and which nodes are told the truth."""
    tree = draw(trees(max_nodes=12).filter(lambda tree: tree.max_depth == 3))
    tokens = [[draw(st.integers(0, N_VOCAB - 1)) for _ in range(tree.n_nodes)] for _ in range(2)]
    told = [[draw(st.booleans()) for _ in range(tree.n_nodes)] for _ in range(2)]
    return tree, tokens, told


@given(guesses())
@settings(max_examples=25)
def test_a_branching_tree_is_verified_in_one_pass_and_decoding_goes_on_from_its_best_path(
    pair: Pair, case: tuple[FlatTree, list[list[int]], list[list[bool]]]
) -> None:
    tree, guessed, told = case
    prompts = random_prompts([6, 9])
    baseline = tokens_of(tiny_engine(pair, None).generate(prompts, new_tokens(16)))
    engine, fresh = tiny_engine(pair, 3), tiny_engine(pair, 3)
    sequences = start(engine, prompts)
    state = engine.state
    state.tree = tree
    slots = active_slots(state.active)
    reserve(state, slots)
    assert engine.draft is not None
    extend_pending(engine.draft, state, slots, QUIET)
    nodes = [
        [answers[int(tree.depths[i])] if i == 0 or knows[i] else guess[i] for i in range(tree.n_nodes)]
        for answers, guess, knows in zip(baseline, guessed, told, strict=True)
    ]
    output = verify(engine.target, state, slots, torch.tensor(nodes), QUIET)
    assert output.logits is not None
    acceptance = accept_greedy_reference(
        torch.tensor(nodes), argmax_reference(output.logits), torch.tensor(tree.parents), tree.depths
    )
    commit(state, slots, acceptance, output, QUIET)
    for slot in range(2):
        truth = [baseline[slot][int(depth)] for depth in tree.depths]
        agreed = [all(nodes[slot][a] == truth[a] for a in ancestors(tree, i)) for i in range(tree.n_nodes)]
        longest = max(int(tree.depths[i]) for i in range(tree.n_nodes) if agreed[i])
        assert int(acceptance.n_accepted[slot]) == longest
        sequences[slot] += [token for token in acceptance.tokens[slot].tolist() if token >= 0]
    assert_state_is_true(engine, fresh, sequences)
    state.tree = chain_tree(3)
    while min(len(sequence) - len(prompt) for sequence, prompt in zip(sequences, prompts, strict=True)) < 12:
        advance(engine, sequences)
    for sequence, prompt, tokens in zip(sequences, prompts, baseline, strict=True):
        generated = sequence[len(prompt) :][:16]
        assert generated == tokens[: len(generated)]


def test_logits_of_a_tree_node_are_those_of_its_own_path_alone(pair: Pair) -> None:
    tree = FlatTree((-1, 0, 0, 1, 2, 2))
    prompt, tokens = random_prompts([9])[0], [3, 1, 4, 1, 5, 2]
    engine = tiny_engine(pair, None)
    start(engine, [prompt])
    engine.state.tree = tree
    slots = active_slots(engine.state.active)
    reserve(engine.state, slots)
    logits = verify(engine.target, engine.state, slots, torch.tensor([tokens]), QUIET).logits
    assert logits is not None
    for node in range(tree.n_nodes):
        path = [tokens[i] for i in tree.mask[node].nonzero()[:, 0].tolist()]
        alone = tiny_engine(pair, None)
        trace = RecordingTrace()
        prefill(alone.target, None, alone.state, 0, torch.tensor(prompt + path), 64, trace)
        close(logits[0, node], trace.tensors["prefill/target.head"][-1])


def test_an_acceptance_outside_the_tree_is_an_error(pair: Pair) -> None:
    engine = tiny_engine(pair, 2)
    start(engine, random_prompts([5]))
    slots = active_slots(engine.state.active)
    reserve(engine.state, slots)
    tokens = torch.tensor([[1, 2, 3]])
    output = verify(engine.target, engine.state, slots, tokens, QUIET)
    good = accept_greedy_reference(tokens, tokens, torch.tensor([-1, 0, 1]), chain_tree(2).depths)
    bad = good._replace(n_accepted=torch.tensor([3]))
    with pytest.raises(InvariantViolated, match=r"accepted lengths \[3\]\n  allowed: 0\.\.2"):
        commit(engine.state, slots, bad, output, QUIET)


def test_a_second_step_of_the_same_batch_keeps_every_buffer_where_it_was(pair: Pair) -> None:
    engine = tiny_engine(pair, 3)
    sequences = start(engine, random_prompts([5, 9]))
    state = engine.state
    assert state.draft_cache is not None
    buffers = [state.target_cache.k, state.target_cache.v, state.draft_cache.k, state.draft_cache.v]
    buffers += [state.roots, state.lengths, state.pending_taps, state.pending_tokens, state.target_cache.block_tables]
    addresses = [buffer.data_ptr() for buffer in buffers]
    for _ in range(3):
        advance(engine, sequences)
    now = [state.target_cache.k, state.target_cache.v, state.draft_cache.k, state.draft_cache.v]
    now += [state.roots, state.lengths, state.pending_taps, state.pending_tokens, state.target_cache.block_tables]
    assert [buffer.data_ptr() for buffer in now] == addresses


@pytest.mark.parametrize("k", [None, 3])
def test_what_an_earlier_request_left_in_the_caches_cannot_reach_a_later_one(pair: Pair, k: int | None) -> None:
    prompts = random_prompts([5, 21, 2, 9])
    expected = tokens_of(tiny_engine(pair, None).generate(prompts, new_tokens(12)))
    engine = tiny_engine(pair, k)
    for cache in (engine.state.target_cache, engine.state.draft_cache):
        if cache is not None:
            cache.k.fill_(float("nan"))  # as a request that overflowed would leave it
            cache.v.fill_(float("inf"))
    assert tokens_of(engine.generate(prompts, new_tokens(12))) == expected
