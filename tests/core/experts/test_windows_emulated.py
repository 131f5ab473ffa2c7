"""Attention as gpt-oss has it, by the kernels lane by lane: layers with a window and without in turn, sinks, biases.

Most layers here have one feed-forward in the place of experts, which takes less time; a tree over the whole of gpt-oss
comes last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import device_engine, device_runner, write_nano_pair
from random_pairs import MXFP4
from rings import exhaustive_but
from tiny_engines import Pair, decoded, new_tokens, random_prompts, tokens_of
from torch import Tensor

from eagle3core.step.admission import SlotRequest
from eagle3core.step.replay import EagerReplayer, emulate
from eagle3core.step.run import DeviceRunner
from eagle3core.step.tree import FlatTree, GrownTree
from eagle3core.trace import RecordingTrace, Trace

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

LANES, MEANING = EagerReplayer(emulate), EagerReplayer()
WINDOWS = (5, 0)
# Rows of two branches take turns, so that a parent stands further back by row than by position.
TREE = FlatTree((-1, 0, 0, 1, 2, 3))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=2, vocab=64, taps=(0, 1, 2), bias=True)


GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss", "n_layers": 2, "taps": (0, 1, 2), "vocab": 64, "ffn": 32, "seed": 5,
    "quantization_config": MXFP4, "sliding_window": 5,
}  # fmt: skip


def first_logits(pair: Pair, prompt: list[int], windows: tuple[int, ...] = WINDOWS, chunk: int = 16) -> Tensor:
    """Bits of the logits `[V]` after a prompt, which is read in passes of `chunk`."""
    runner = device_runner(pair, None, LANES, n_slots=1, chunk=chunk, windows=windows)
    trace = RecordingTrace()
    runner.admit(0, SlotRequest(0, prompt, 9, ()), trace)
    runner.collect(everything=True)
    return trace.tensors["prefill/target.head"][0].view(torch.int16)


def tree_logits(runner: DeviceRunner, prompt: list[int], drafted: list[int]) -> tuple[list[int], Tensor]:
    """The tokens of a tree's nodes, its root's first, and the bits of their logits `[N, V]`."""
    trace = RecordingTrace()
    runner.admit(0, SlotRequest(0, prompt, 20, ()), Trace())
    tokens = [*runner.collect(everything=True)[0].rows[0].tokens, *drafted]
    runner.state.step.drafted.copy_(torch.tensor(tokens))
    runner.enqueue(1, 0, trace)
    runner.collect(everything=True)
    return tokens, trace.tensors["verify/target.head"].view(torch.int16)


@pytest.mark.parametrize("n_prompt", exhaustive_but([2], [13, 2, 16]))
def test_a_node_has_the_bits_of_its_own_text(pair: Pair, n_prompt: int) -> None:
    """Node by node: of the prompt and the node's path, read as a prompt."""
    prompt = random_prompts([n_prompt], n_vocab=64, seed=1)[0]
    drafted = random_prompts([TREE.n_nodes - 1], n_vocab=64, seed=2)[0]
    runner = device_runner(pair, None, LANES, n_slots=1, tree=TREE, drafts=False, chunk=16, windows=WINDOWS)
    tokens, logits = tree_logits(runner, prompt, drafted)
    for node in range(TREE.n_nodes):
        path = [tokens[i] for i in TREE.mask[node].nonzero()[:, 0].tolist()]
        assert torch.equal(logits[node], first_logits(pair, prompt + path)), node
    assert not torch.equal(logits[-1], first_logits(pair, prompt + path, (0, 0))), "the window is short enough to show"


@pytest.mark.parametrize("chunk", exhaustive_but([24], [24, 40]))
def test_a_prompt_gives_the_same_bits_in_passes_of_any_width(pair: Pair, chunk: int) -> None:
    prompt = random_prompts([35], n_vocab=64, seed=3)[0]
    assert torch.equal(first_logits(pair, prompt, (20, 0), chunk), first_logits(pair, prompt, (20, 0), 8))


@pytest.mark.parametrize("tree", exhaustive_but([GrownTree(2, 2, 5)], [GrownTree(2, 2, 5), GrownTree(3, 3, 8), None]))
def test_drafts_change_no_token_under_windows(pair: Pair, tree: GrownTree | None) -> None:
    prompts = random_prompts([6], n_vocab=64, seed=2)
    expected = tokens_of(device_engine(pair, None, LANES, chunk=16, windows=WINDOWS).generate(prompts, new_tokens(4)))
    k = 3 if tree is None else None
    runner = device_runner(pair, k, LANES, tree=tree, chunk=16, windows=WINDOWS)
    tokens, rows = decoded(runner, prompts, 4)
    assert tokens == expected
    assert not any(row.fault for row in rows)
    assert any(row.n_accepted for row in rows)


def test_a_node_on_gpt_oss_has_the_bits_of_its_own_text(tmp_path: Path) -> None:
    """The last node and one of each branch, with experts in MXFP4, windows and sinks."""
    whole, tree = write_nano_pair(tmp_path, **GPT_OSS), FlatTree((-1, 0, 0, 1, 2))
    prompt, drafted = random_prompts([6, tree.n_nodes - 1], n_vocab=64, seed=1)
    runner = device_runner(whole, None, LANES, n_slots=1, tree=tree, drafts=False, chunk=16)
    tokens, logits = tree_logits(runner, prompt, drafted)
    for node in (3, 4):
        path = [tokens[i] for i in tree.mask[node].nonzero()[:, 0].tolist()]
        assert torch.equal(logits[node], first_logits(whole, prompt + path, ())), node
