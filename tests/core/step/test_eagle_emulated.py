"""An EAGLE-1 head by the kernels themselves, lane by lane: the states and drafts that their meaning gives."""

from __future__ import annotations

import pytest
import torch
from eagle_pairs import write_eagle_pair
from emulated_steps import check_first_step
from tiny_engines import Pair

from eagle3core.step.tree import GrownTree


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_eagle_pair(
        tmp_path_factory.mktemp("nano"), n_layers=1, hidden=64, heads=2, kv_heads=1, head_dim=64, ffn=64, vocab=64,
        taps=(0, 1), dtype=torch.bfloat16, seed=5,
    )  # fmt: skip


@pytest.mark.emulated
def test_the_kernels_draft_the_chain_that_their_meaning_drafts(nano: Pair) -> None:
    check_first_step(nano, None, method="eagle")


@pytest.mark.emulated
@pytest.mark.slow
def test_the_kernels_grow_the_tree_that_their_meaning_grows(nano: Pair) -> None:
    check_first_step(nano, GrownTree(2, 2, 5), method="eagle")
