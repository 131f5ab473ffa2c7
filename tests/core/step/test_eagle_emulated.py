"""An EAGLE-1 head by the kernels themselves, lane by lane: the states and drafts that their meaning gives."""

from __future__ import annotations

import pytest
import torch
from device_engines import device_runner
from eagle_pairs import write_eagle_pair
from tiny_engines import Pair, random_prompts
from torch import Tensor

from eagle3core.step.replay import EagerReplayer, Replayer, emulate
from eagle3core.step.run import SlotRequest
from eagle3core.step.tree import GrownTree
from eagle3core.trace import Trace

LANES, MEANING = EagerReplayer(emulate), EagerReplayer()


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_eagle_pair(
        tmp_path_factory.mktemp("nano"), n_layers=1, hidden=64, heads=2, kv_heads=1, head_dim=64, ffn=64, vocab=64,
        taps=(0, 1), dtype=torch.bfloat16, seed=5,
    )  # fmt: skip


def first_step(nano: Pair, replayer: Replayer, tree: GrownTree | None) -> dict[str, Tensor]:
    """What the first step leaves of its drafts; the prompt is read by meaning, which is quicker."""
    k = None if tree else 2
    runner = device_runner(nano, k, MEANING, n_slots=1, chunk=8, tree=tree, method="eagle")
    runner.admit(0, SlotRequest(0, random_prompts([6], n_vocab=64, seed=2)[0], 9, ()), Trace())
    runner.collect(everything=True)
    runner.replay_by(replayer)
    runner.enqueue(1, 0, Trace())
    runner.collect(everything=True)
    own, made = runner.state.draft, runner.state.tree
    assert own is not None
    drafts = runner.state.step.drafted if made is None else made.selection.tokens
    return {"drafts": drafts.clone(), "feedback": own.feedback.clone(), "next": own.next_feedback.clone()}


def check(nano: Pair, tree: GrownTree | None) -> None:
    lanes, meaning = (first_step(nano, replayer, tree) for replayer in (LANES, MEANING))
    assert torch.equal(lanes["drafts"], meaning["drafts"])
    for name in ("feedback", "next"):
        error = (lanes[name].float() - meaning[name].float()).abs().max()
        assert error <= 2**-6 * meaning[name].float().abs().max(), name  # sums in another order, rounded to bf16
    assert meaning["feedback"].abs().max() > 0


@pytest.mark.emulated
def test_the_kernels_draft_the_chain_that_their_meaning_drafts(nano: Pair) -> None:
    check(nano, None)


@pytest.mark.emulated
@pytest.mark.slow
def test_the_kernels_grow_the_tree_that_their_meaning_grows(nano: Pair) -> None:
    check(nano, GrownTree(2, 2, 5))
