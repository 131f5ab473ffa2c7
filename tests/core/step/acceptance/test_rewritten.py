"""Rules that are not lossless, against a plain walk over every tree: what they accept, and what stands behind it."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import trees
from torch import Tensor

from eagle3core.acceptance import AcceptanceRule, ForcedAcceptance, MedusaAcceptance, RelaxedAcceptance
from eagle3core.kernels.slots.slot_state import N_FIELDS, PLAIN, REQUEST_ID
from eagle3core.kernels.tree.accept import ACCEPT, Commit, new_commit
from eagle3core.kernels.tree.mask_words import pack_words
from eagle3core.step.acceptance import Verified, rewrite_choices
from eagle3core.step.acceptance.rewritten import forced_drafts
from eagle3core.step.draw import new_draw_settings
from eagle3core.step.tree import FlatTree, chain_tree

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
V = 7


def verified(tree: FlatTree, seed: int, batch: int = 3, temperature: float = 0.0) -> Verified:
    """Random logits and drafts, siblings all different, after greedy choices; slots in an order of their own."""
    generator = torch.Generator().manual_seed(seed)
    n = tree.n_nodes
    logits = torch.randn(batch * n, V, generator=generator, dtype=torch.float64) * 1.5
    tokens = torch.zeros(batch, n, dtype=torch.int32)
    for row in range(batch):
        for parent in range(n):
            children = [node for node in range(1, n) if tree.parents[node] == parent]
            for node, token in zip(children, torch.randperm(V, generator=generator).tolist(), strict=False):
                tokens[row, node] = token
    draws = new_draw_settings(batch, CPU)
    draws.shares[:, 0] = temperature
    state = torch.zeros(N_FIELDS, batch, dtype=torch.int32)
    state[REQUEST_ID] = torch.randint(100, (batch,), generator=generator)
    slots = torch.randperm(batch, generator=generator).int()
    depths = tree.depths.int().repeat(batch, 1)
    parents = torch.tensor(tree.parents, dtype=torch.int32).repeat(batch, 1)
    choices = logits.argmax(dim=1).int().view(batch, n)
    return Verified(logits, tokens, parents, depths, depths + 20, slots, state, draws, choices)


def followed(at: Verified, tree: FlatTree) -> Commit:
    """What the step's own walk makes of the choices."""
    batch = len(at.tokens)
    out = new_commit(batch, tree.max_depth + 1, CPU)
    words = pack_words(tree.mask).expand(batch, -1, -1).contiguous()
    ends = torch.zeros(0, dtype=torch.int32)
    ACCEPT.call(None, at.tokens, at.choices, at.parents, at.depths, words, ends, out).meaning()
    return out


Accepts = Callable[[list[float], int], bool]


def walked(at: Verified, tree: FlatTree, row: int, accepts: Accepts, choices: Tensor) -> list[int]:
    """The deepest path by a plain walk, of equally deep ones that of the earliest last node."""
    good = {0: [0]}
    for node in range(1, tree.n_nodes):
        parent, token = tree.parents[node], int(at.tokens[row, node])
        law = at.logits[row * tree.n_nodes + parent].softmax(0).tolist()
        if parent in good and (token == int(choices[row, parent]) or accepts(law, token)):
            good[node] = [*good[parent], node]
    return max(good.values(), key=lambda path: (len(path), -path[-1]))


def relaxed(top_n: int, delta: float) -> Accepts:
    def accepts(law: list[float], token: int) -> bool:
        likeliest = sorted(range(V), key=lambda i: (-law[i], i))[:top_n]
        return token in likeliest and log(max(law)) - log(law[token]) <= delta

    return accepts


def typical(epsilon: float, delta: float) -> Accepts:
    def accepts(law: list[float], token: int) -> bool:
        entropy = -sum(p * log(p) for p in law)
        return law[token] > min(epsilon, delta * exp(-entropy))

    return accepts


def check_walk(rule: AcceptanceRule, accepts: Accepts, tree: FlatTree, seed: int, temperature: float) -> None:
    at = verified(tree, seed, temperature=temperature)
    before = at.choices.clone()
    rewrite_choices(rule, at).meaning()
    out = followed(at, tree)
    for row in range(len(at.tokens)):
        path = walked(at, tree, row, accepts, before)
        assert int(out.n_accepted[row]) == len(path) - 1
        assert [int(node) for node in out.path[row] if node >= 0] == path
        # Behind the path stands what the target chose there itself.
        assert int(out.bonus[row]) == int(before[row, path[-1]])


@settings(max_examples=60)
@given(trees(10), st.integers(0, 10_000), st.integers(1, 7), st.sampled_from([0.0, 0.4, 2.0]))
def test_relaxed_acceptance_takes_the_deepest_path_of_tokens_near_the_best(
    tree: FlatTree, seed: int, top_n: int, delta: float
) -> None:
    check_walk(RelaxedAcceptance(top_n, delta), relaxed(top_n, delta), tree, seed, 0.0)


@settings(max_examples=60)
@given(trees(10), st.integers(0, 10_000), st.sampled_from([0.05, 0.3]), st.sampled_from([0.09, 0.5]))
def test_medusas_typical_test_takes_the_deepest_path_of_typical_tokens(
    tree: FlatTree, seed: int, epsilon: float, delta: float
) -> None:
    check_walk(MedusaAcceptance(epsilon, delta), typical(epsilon, delta), tree, seed, 1.0)


def test_medusas_test_leaves_greedy_rows_and_reads_the_rest_at_their_temperature() -> None:
    tree, rule = chain_tree(3), MedusaAcceptance()
    greedy = verified(tree, 1)
    before = greedy.choices.clone()
    rewrite_choices(rule, greedy).meaning()
    assert torch.equal(greedy.choices, before)
    # At a temperature of 0.002 nothing but the best is typical, at 5 everything is.
    for temperature, expected in ((0.002, None), (5.0, 3)):
        at = verified(tree, 3, temperature=temperature)
        alone = followed(at, tree).n_accepted.clone()
        rewrite_choices(rule, at).meaning()
        wanted = alone if expected is None else torch.full_like(alone, expected)
        assert torch.equal(followed(at, tree).n_accepted, wanted)


@settings(max_examples=60)
@given(trees(10), st.integers(0, 10_000), st.floats(0.0, 3.0))
def test_a_forced_length_is_accepted_as_far_as_the_tree_goes_and_no_further(
    tree: FlatTree, seed: int, drafts: float
) -> None:
    at = verified(tree, seed)
    rule = ForcedAcceptance(accepted_drafts=drafts)
    wanted = forced_drafts(rule, at).clamp_max(tree.max_depth)
    is_crowded = max(map(tree.parents.count, range(tree.n_nodes))) >= V  # then every token is a draft
    rewrite_choices(rule, at).meaning()
    if not is_crowded:
        assert torch.equal(followed(at, tree).n_accepted.long(), wanted)
    assert set((wanted - int(drafts)).tolist()) <= {0, 1} or tree.max_depth < drafts


def test_the_rest_of_a_forced_fraction_comes_as_often_as_it_says() -> None:
    at = verified(chain_tree(4), 0, batch=4000)
    at.state[REQUEST_ID] = torch.arange(4000)
    counted = forced_drafts(ForcedAcceptance(length=3.25), at)
    assert set(counted.tolist()) == {2, 3}
    # Four standard deviations of 4,000 draws with probability 1/4.
    assert abs(float((counted == 3).double().mean()) - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert torch.equal(counted, forced_drafts(ForcedAcceptance(accepted_drafts=2.25), at))


@pytest.mark.parametrize("rule", [ForcedAcceptance(length=4), RelaxedAcceptance(V, 100.0)])
def test_plain_and_dead_rows_missing_drafts_and_missing_choices_are_left_alone(rule: AcceptanceRule) -> None:
    tree = chain_tree(3)
    at = verified(tree, 2, batch=5)
    at.slots.copy_(torch.tensor([4, -1, 2, 1, 0]))
    at.state[PLAIN, 2] = 1  # row 2
    at.tokens[3, 2] = -1
    at.choices[4, 1] = -1
    before = at.choices.clone()
    rewrite_choices(rule, at).meaning()
    assert torch.equal(at.choices[1:3], before[1:3])
    assert (at.choices[3, 0], at.choices[4, 0]) == (at.tokens[3, 1], at.tokens[4, 1])
    assert int(at.choices[4, 1]) == -1
    accepted = followed(at, tree).n_accepted
    assert accepted[[0, 3, 4]].tolist() == [3, 1, 1]
