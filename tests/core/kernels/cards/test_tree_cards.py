"""Growing, choosing, masking and accepting trees: each against a slow walk in plain Python, or against the engine's."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import trees
from tree_arrays import paths_of

from eagle3core.errors import KernelLimit
from eagle3core.kernels.tree.accept import accept_reference, accept_variant
from eagle3core.kernels.tree.grow_tree import HeadRows, Offers, grow_tree, grow_tree_variant
from eagle3core.kernels.tree.growth import grow_tree_reference, mask_words, new_growth, pool_size
from eagle3core.kernels.tree.mask_words import pack_words, unpack_words
from eagle3core.kernels.tree.pack_paths import pack_paths_reference
from eagle3core.kernels.tree.select_tree import select_tree_reference, select_tree_variant
from eagle3core.kernels.tree.tree_masks import tree_masks_reference
from eagle3core.step.tree import FlatTree

pytestmark = pytest.mark.reference


def grown(steps: list[torch.Tensor], ids: list[torch.Tensor], k: int):
    """Growth after every level, level by level."""
    growth, states = new_growth(1, k, len(steps), torch.device("cpu")), []
    for level, (step, drafted) in enumerate(zip(steps, ids, strict=True)):
        growth = grow_tree_reference(growth, step, drafted, None, level)
        states.append(growth)
    return states


@st.composite
def levels(draw: st.DrawFn):
    """Log-probabilities in halves, zeros among them so that children tie with their parents, and ids."""
    k, n_levels = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    steps, ids = [], []
    for level in range(n_levels):
        rows = 1 if level == 0 else k
        values = draw(st.lists(st.integers(-3, 0), min_size=rows * k, max_size=rows * k))
        steps.append(torch.tensor(values).view(1, rows, k).sort(dim=2, descending=True).values / 2)
        ids.append(
            torch.tensor(draw(st.lists(st.integers(0, 9), min_size=rows * k, max_size=rows * k))).view(1, rows, k)
        )
    return k, steps, [drafted.int() for drafted in ids]


@given(levels())
def test_every_beam_node_scores_the_sum_along_the_ancestors_its_mask_names(case) -> None:
    k, steps, ids = case
    states = grown(steps, ids, k)
    for level, state in enumerate(states):
        beams = [earlier.beam_flat[0].tolist() for earlier in states[: level + 1]]
        for place in range(k):
            bits = unpack_words(state.beam_mask[0, place], k * len(steps)).nonzero()[:, 0].tolist()
            path = [beams[bit // k][bit % k] for bit in bits]
            assert len(path) == level + 1
            assert path[-1] == int(state.beam_flat[0, place])
            for parent, child in zip([-1, *path], path, strict=False):
                assert int(state.parents[0, child]) == parent
            flat = [int(step) for step in path]
            gained = [float(steps[0].flatten()[flat[0]])]
            for depth in range(1, level + 1):
                gained.append(float(steps[depth].flatten()[flat[depth] - pool_size(k, depth)]))
            assert float(state.beam_scores[0, place]) == sum(gained)


@given(levels(), st.data())
def test_the_chosen_nodes_are_the_best_closed_under_parents_and_in_order(case, data: st.DataObject) -> None:
    k, steps, ids = case
    state = grown(steps, ids, k)[-1]
    n_nodes = data.draw(st.integers(1, pool_size(k, len(steps)) + 1))
    chosen = select_tree_reference(state.scores, state.tokens, state.parents, torch.tensor([77]), n_nodes)
    flat, parents = chosen.flat[0].tolist(), chosen.parents[0].tolist()
    scores = state.scores[0].tolist()
    wanted = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: n_nodes - 1]
    assert flat == [-1, *sorted(wanted)]
    FlatTree(tuple(parents))  # refuses a tree whose parents do not precede their children
    for node in range(1, n_nodes):
        assert flat[parents[node]] == int(state.parents[0, flat[node]])
        assert int(chosen.tokens[0, node]) == int(state.tokens[0, flat[node]])
    assert int(chosen.tokens[0, 0]) == 77


def test_a_beam_of_one_is_a_chain() -> None:
    steps = [torch.tensor([[[-0.5]]]) for _ in range(4)]
    ids = [torch.tensor([[[level]]], dtype=torch.int32) for level in range(4)]
    state = grown(steps, ids, 1)[-1]
    chosen = select_tree_reference(state.scores, state.tokens, state.parents, torch.tensor([9]), 5)
    assert chosen.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert chosen.tokens.tolist() == [[9, 0, 1, 2, 3]]


def test_a_log_probability_above_zero_cannot_put_a_child_before_its_parent() -> None:
    steps = [torch.tensor([[[-1.0]]]), torch.tensor([[[1e-6]]])]
    ids = [torch.zeros(1, 1, 1, dtype=torch.int32)] * 2
    scores = grown(steps, ids, 1)[-1].scores[0].tolist()
    assert scores == [-1.0, -1.0]


def test_a_candidate_that_cannot_come_has_no_score_and_one_that_is_no_number_counts_as_certain() -> None:
    steps = [torch.tensor([[[-0.5, -math.inf, math.nan]]])]
    state = grown(steps, [torch.zeros(1, 1, 3, dtype=torch.int32)], 3)[-1]
    assert state.scores[0].tolist() == [-0.5, -math.inf, 0.0]
    assert state.beam_flat[0].tolist() == [2, 0, 1]


def test_the_last_bit_of_a_mask_word_is_set_and_no_other() -> None:
    level = torch.arange(16) * -1.0
    steps = [level.view(1, 1, 16), level.repeat(1, 16, 1) - 100 * torch.arange(16.0)[:, None]]
    ids = [torch.zeros(step.shape, dtype=torch.int32) for step in steps]
    state = grown(steps, ids, 16)[-1]
    assert unpack_words(state.beam_mask[0, 15], 32).nonzero()[:, 0].tolist() == [0, 31], "of the root's best child"


@given(trees(), st.integers(-1, 50))
def test_masks_depths_and_paths_are_those_of_the_flat_tree(tree: FlatTree, length: int) -> None:
    width = tree.max_depth + 1
    made = tree_masks_reference(torch.tensor([tree.parents]), torch.tensor([length]), width)
    if length < 0:
        assert int(made.mask.abs().sum() + made.leaves.sum()) == 0
        assert made.paths.unique().tolist() == [-1]
        return
    assert torch.equal(unpack_words(made.mask[0], tree.n_nodes), tree.mask)
    assert torch.equal(made.depths[0].long(), tree.depths)
    assert torch.equal(made.positions[0].long(), length + tree.depths)
    paths = paths_of(tree)
    n_leaves = len(paths)
    assert torch.equal(made.paths[0, :n_leaves].long(), paths)
    assert (made.paths[0, n_leaves:] == -1).all()
    assert int(made.leaves.sum()) == n_leaves


@given(trees())
def test_the_linked_list_visits_the_children_of_every_node_in_order(tree: FlatTree) -> None:
    made = tree_masks_reference(torch.tensor([tree.parents]), torch.tensor([0]), tree.max_depth + 1)
    for node in range(tree.n_nodes):
        child, visited = int(made.first_child[0, node]), []
        while child >= 0:
            visited.append(child)
            child = int(made.next_sibling[0, child])
        assert visited == [other for other in range(tree.n_nodes) if tree.parents[other] == node]


@given(st.integers(1, 70), st.randoms())
def test_packed_words_hold_node_j_in_bit_j_lowest_first(n: int, random) -> None:
    mask = torch.tensor([random.random() < 0.5 for _ in range(n)])
    words = pack_words(mask)
    assert [bool(int(words[j // 32]) >> (j % 32) & 1) for j in range(n)] == mask.tolist()
    assert torch.equal(unpack_words(words, n), mask)


@given(trees(), st.data())
def test_the_stop_index_is_the_first_end_token_among_the_committed(tree: FlatTree, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 2), min_size=tree.n_nodes, max_size=tree.n_nodes)
    tokens, choices = (torch.tensor([data.draw(row)]) for _ in range(2))
    ends = torch.tensor(data.draw(st.lists(st.integers(0, 2), max_size=2)), dtype=torch.int64)
    parents, width = torch.tensor([tree.parents]), tree.max_depth + 1
    made = accept_reference(tokens, choices, parents, tree.depths[None], torch.tensor([True]), ends, width)
    committed = made.tokens[0, : int(made.n_committed[0])].tolist()
    hits = [i for i, token in enumerate(committed) if token in ends.tolist()]
    assert int(made.stop[0]) == (hits[0] if hits else -1)
    assert committed[-1] == int(made.bonus[0])


def test_a_dead_sequence_commits_nothing() -> None:
    tokens, parents = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[-1, 0, 1]])
    depths, ends = torch.tensor([[0, 1, 2]]), torch.zeros(0, dtype=torch.int64)
    made = accept_reference(tokens, tokens, parents, depths, torch.tensor([False]), ends, 3)
    assert (int(made.n_accepted), int(made.n_committed), int(made.bonus)) == (0, 0, -1)
    assert made.tokens.unique().tolist() == made.path.unique().tolist() == [-1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_packed_paths_are_found_again_by_their_offsets(counts: list[int]) -> None:
    path = torch.arange(3 * len(counts)).view(-1, 3).int()
    offsets, packed = pack_paths_reference(torch.tensor(counts, dtype=torch.int32), path)
    for b, n in enumerate(counts):
        assert packed[offsets[b] : offsets[b + 1]].tolist() == path[b, :n].tolist()
    assert (packed[int(offsets[-1]) :] == -1).all()


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (partial(grow_tree_variant, maps=False), ("bf16", 17, 32000, 1), "top_k in 1..16"),
        (partial(grow_tree_variant, maps=False), ("bf16", 16, 32000, mask_words(16, 17)), "256 beam nodes"),
        (partial(grow_tree_variant, maps=False), ("bf16", 4, 300_000, 1), "at most 262144"),
        (select_tree_variant, (5000, 60, 9), "1..4096"),
        (select_tree_variant, (10, 12, 3), "1..11"),
        (select_tree_variant, (900, 257, 3), "1..256 nodes"),
        (select_tree_variant, (10, 4, 5), "no longer than the tree"),
        (accept_variant, (300, 4), "1..256"),
    ],
)
def test_sizes_beyond_a_kernel_are_refused_with_what_is_allowed(make, sizes, message: str) -> None:
    with pytest.raises(KernelLimit, match=message):
        make("sm_90a", *sizes)


def test_the_largest_trees_that_are_allowed_have_a_variant() -> None:
    assert select_tree_variant("sm_90a", 4096, 256, 256).constants["nodes"] == 256
    assert select_tree_variant("sm_90a", 10, 11, 2).constants["nodes"] == 11, "every candidate, and the root"


@pytest.mark.parametrize(
    ("columns", "k", "level", "message"), [(32, 2, 2, "level 2"), (17, 2, 1, "multiple of 16"), (0, 2, 1, "at least")]
)
def test_a_level_that_the_kernel_cannot_grow_is_refused(columns: int, k: int, level: int, message: str) -> None:
    growth, found = new_growth(1, k, 2, torch.device("cpu")), torch.zeros(1, k, k)
    rows = HeadRows(torch.zeros(k, columns).bfloat16(), *[torch.zeros(k, columns // 16)] * 2)
    offers = Offers(found, found.int(), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(KernelLimit, match=message):
        grow_tree("sm_90a", growth, rows, None, level, offers)
    assert math.isinf(float(growth.scores[0, 0]))
