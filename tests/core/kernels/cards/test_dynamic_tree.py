"""Dynamic trees of the cards against a naive one in plain Python, and against the official code's recorded trees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_dynamic_tree import NaiveTree, Offers, Path, naive_tree
from places import GOLDEN
from torch import Tensor

from eagle3core.kernels.tree.growth import Growth, grow_tree_reference, new_growth, pool_size
from eagle3core.kernels.tree.mask_words import unpack_words
from eagle3core.kernels.tree.select_tree import Selection, select_tree_reference
from eagle3core.kernels.tree.tree_masks import tree_masks_reference

pytestmark = pytest.mark.reference

ROOT_TOKEN, LENGTH = 777, 31
# Ties: between siblings, cousins, a child and its parent (0), and by rounding (1e-9 is lost beside any of the others).
STEPS = (0.0, 0.0, -1e-9, -0.25, -0.25, -0.5, -1.0, -30.1)


class Grown(NamedTuple):
    """A tree by the cards' definitions, and the path of ranks of each candidate by flat id."""

    growth: Growth
    paths: dict[int, Path]
    chosen: Selection


def by_the_cards(offers: Offers, k: int, levels: int, n_nodes: int) -> Grown:
    """The tree that `grow_tree` and `select_tree` define, its beam asked for the offers of its own nodes."""
    growth, paths = new_growth(1, k, levels, torch.device("cpu")), {-1: ()}
    for level in range(levels):
        beam = [-1] if level == 0 else growth.beam_flat[0].tolist()
        offered = [offers(paths[flat]) for flat in beam]
        log_probs = torch.tensor([[[log_prob for log_prob, _ in row] for row in offered]], dtype=torch.float32)
        ids = torch.tensor([[[token for _, token in row] for row in offered]], dtype=torch.int32)
        growth = grow_tree_reference(growth, log_probs, ids, None, level)
        start = 0 if level == 0 else pool_size(k, level)
        for place, flat in enumerate(beam):
            paths.update({start + place * k + rank: (*paths[flat], rank) for rank in range(k)})
        continued = [paths[beam[row]] for row in growth.beam_rows[0].tolist()]
        assert continued == [paths[flat][:-1] for flat in growth.beam_flat[0].tolist()], (
            "the hidden state to go on from"
        )
    roots = torch.tensor([ROOT_TOKEN], dtype=torch.int32)
    return Grown(growth, paths, select_tree_reference(growth.scores, growth.tokens, growth.parents, roots, n_nodes))


def assert_same_tree(grown: Grown, naive: NaiveTree) -> None:
    chosen, n_nodes = grown.chosen, len(naive.paths)
    assert [grown.paths[flat] for flat in chosen.flat[0].tolist()] == naive.paths
    assert chosen.tokens[0].tolist() == naive.tokens
    assert chosen.parents[0].tolist() == naive.parents
    width = 1 + max(map(len, naive.paths))
    made = tree_masks_reference(chosen.parents, torch.tensor([LENGTH]), width)
    assert unpack_words(made.mask[0], n_nodes).tolist() == naive.mask
    assert made.positions[0].tolist() == [LENGTH + len(path) for path in naive.paths]
    padded = [path + [-1] * (width - len(path)) for path in naive.leaf_paths]
    assert made.paths[0, : len(padded)].tolist() == padded
    assert made.paths[0, len(padded) :].unique().tolist() in ([], [-1])


@settings(max_examples=250)
@given(st.integers(0, 2**32 - 1))
def test_nodes_order_parents_masks_positions_and_leaf_paths_are_those_of_a_naive_tree(seed: int) -> None:
    random = np.random.default_rng(seed)
    k, levels = int(random.integers(1, 7)), int(random.integers(1, 6))
    n_nodes = int(random.integers(1, min(pool_size(k, levels), 40) + 2))
    has_ties = random.random() < 0.8
    offered: dict[Path, list[tuple[float, int]]] = {}

    def offers(path: Path) -> list[tuple[float, int]]:
        if path not in offered:
            steps = random.choice(STEPS, k) if has_ties else -random.exponential(size=k)
            tokens = random.integers(0, 999, k).tolist()
            offered[path] = list(zip(sorted(steps.tolist(), reverse=True), tokens, strict=True))
        return offered[path]

    assert_same_tree(by_the_cards(offers, k, levels, n_nodes), naive_tree(offers, k, levels, n_nodes, ROOT_TOKEN))


def test_of_equal_scores_the_earlier_one_is_chosen_and_the_tree_stays_closed() -> None:
    def offers(path: Path) -> list[tuple[float, int]]:
        return [(0.0, rank) for rank in range(3)]

    naive = naive_tree(offers, 3, 3, 6, ROOT_TOKEN)
    assert naive.paths == [(), (0,), (1,), (2,), (0, 0), (0, 1)]
    assert_same_tree(by_the_cards(offers, 3, 3, 6), naive)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    with np.load(GOLDEN / "official_tree.npz") as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


@pytest.mark.parametrize("round_", [0, 1])
def test_the_official_logits_give_the_official_tree(recorded: dict[str, Tensor], round_: int) -> None:
    k, levels, key = 4, 5, f"r{round_}"
    offsets = torch.load(GOLDEN / "draft" / "pytorch_model.bin", weights_only=True)["d2t"]
    to_target = (torch.arange(len(offsets)) + offsets).int()
    growth = new_growth(1, k, levels, torch.device("cpu"))
    for level in range(levels):
        log_probs, ids = recorded[f"{key}/s{level}/lm_head/out"].log_softmax(-1).topk(k)
        growth = grow_tree_reference(growth, log_probs[None], ids[None].int(), to_target, level)
        if level + 1 < levels:
            official = recorded[f"{key}/s{level + 1}/tree_mask"][0, 0] > 0
            seen = torch.stack([unpack_words(words, k * levels) for words in growth.beam_mask[0]])
            assert growth.beam_tokens[0].tolist() == recorded[f"{key}/s{level + 1}/ids"].flatten().tolist()
            assert torch.equal(seen[:, : official.shape[1]], official)
    official_tokens = recorded[f"{key}/tree/tokens"][0]
    chosen = select_tree_reference(growth.scores, growth.tokens, growth.parents, official_tokens[:1].int(), 26)
    assert chosen.tokens[0].tolist() == official_tokens.tolist()
    retrieve = recorded[f"{key}/tree/retrieve"]
    made = tree_masks_reference(chosen.parents, torch.tensor([0]), retrieve.shape[1])
    assert torch.equal(unpack_words(made.mask[0], 26), recorded[f"{key}/tree/mask"][0, 0] > 0)
    assert made.depths[0].tolist() == recorded[f"{key}/tree/pos"].tolist()
    assert made.paths[0, : len(retrieve)].tolist() == retrieve.tolist()
