"""A tree grown by the kernels themselves, lane by lane: the same nodes as by their meaning, plain decoding's tokens."""

from __future__ import annotations

import pytest
import torch
from device_engines import device_engine, device_runner, write_nano_pair
from tiny_engines import Pair, decoded, new_tokens, random_prompts, tokens_of
from torch import Tensor

from eagle3core.step.admission import SlotRequest
from eagle3core.step.replay import EagerReplayer, Replayer, emulate
from eagle3core.step.tree import GrownTree
from eagle3core.trace import Trace

pytestmark = pytest.mark.emulated

LANES, MEANING = EagerReplayer(emulate), EagerReplayer()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=64)


def first_tree(pair: Pair, tree: GrownTree, replayer: Replayer, lengths: list[int]) -> dict[str, Tensor]:
    """What the first step of a batch leaves of its trees; prompts are read by meaning, which is quicker."""
    runner = device_runner(pair, None, MEANING, n_slots=len(lengths), tree=tree, chunk=16)
    for slot, prompt in enumerate(random_prompts(lengths, n_vocab=64, seed=2)):
        runner.admit(slot, SlotRequest(slot, prompt, 9, ()), Trace())
        runner.collect(everything=True)
    runner.replay_by(replayer)
    runner.enqueue(len(lengths), 0, Trace())
    [outcome] = runner.collect(everything=True)
    made = runner.state.tree
    assert made is not None
    fields = {**made.selection._asdict(), **made.masks._asdict(), "beam_mask": made.growth.beam_mask}
    fields |= {
        "places": runner.state.step.opened["chain_slots"],
        "committed": torch.tensor([row.n_accepted for row in outcome.rows]),
    }
    return {name: tensor.clone() for name, tensor in fields.items()}


def test_the_kernels_grow_the_tree_that_their_meaning_grows(pair: Pair) -> None:
    """Two levels; the slow ring has a deeper tree, and a batch."""
    tree = GrownTree(2, 2, 5)
    lanes, meaning = (first_tree(pair, tree, replayer, [6]) for replayer in (LANES, MEANING))
    for name, tensor in meaning.items():
        assert torch.equal(lanes[name], tensor), name


def test_a_level_has_one_launch_beside_the_models_and_the_choice_of_the_nodes_one(pair: Pair) -> None:
    runner = device_runner(pair, None, LANES, n_slots=1, tree=GrownTree(2, 3, 6))
    books = [
        launch.variant.make.__name__.removeprefix("make_")
        for stage in runner.programs[1] if not stage.name.startswith(("draft.", "target."))
        for launch in stage.launches
    ]  # fmt: skip
    opening, closing = ["active_slots", "open_step"], ["argmax_join", "accept", "commit", "compact_kv"]
    assert books == [*opening, *["grow_tree"] * 3, "select_tree", *closing]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_deeper_tree_whose_masks_take_two_words(pair: Pair) -> None:
    tree = GrownTree(12, 3, 10)
    lanes, meaning = (first_tree(pair, tree, replayer, [70]) for replayer in (LANES, MEANING))
    for name, tensor in meaning.items():
        assert torch.equal(lanes[name], tensor), name


@pytest.mark.slow
def test_a_run_by_the_kernels_gives_the_tokens_of_plain_decoding(pair: Pair) -> None:
    prompts = random_prompts([6, 11], n_vocab=64, seed=2)
    expected = tokens_of(device_engine(pair, None, MEANING).generate(prompts, new_tokens(4)))
    runner = device_runner(pair, None, LANES, n_slots=2, tree=GrownTree(3, 3, 8), chunk=16)
    tokens, rows = decoded(runner, prompts, 4)
    assert tokens == expected
    assert not any(row.fault for row in rows)
