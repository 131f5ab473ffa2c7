"""The whole engine with its kernels run lane by lane: prompt, drafts, verification, commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import device_engine, device_runner, write_nano_pair
from quantised_heads import write_fp8
from rings import exhaustive_but
from tiny_engines import Pair, new_tokens, random_prompts, tokens_of
from torch import Tensor

from eagle3core.acceptance import AcceptanceRule, ForcedAcceptance, RejectionAcceptance
from eagle3core.step.admission import SlotRequest
from eagle3core.step.replay import EagerReplayer, emulate
from eagle3core.step.tree import FlatTree
from eagle3core.trace import RecordingTrace, Trace

pytestmark = pytest.mark.emulated

LANES, MEANING = EagerReplayer(emulate), EagerReplayer()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=64)


def recorded(pair: Pair, k: int | None, prompt: list[int], n: int, **changes: Any) -> tuple[list[int], Tensor]:
    """Tokens, and the bits of the logits `[n, V]` that chose them."""
    trace = RecordingTrace()
    engine = device_engine(pair, k, LANES, trace=trace, n_slots=1, **changes)
    response = engine.generate([prompt], new_tokens(n))[0]
    rows = [trace.tensors["prefill/target.head"]]
    kept = [step.n_accepted + 1 for step in response.req_metrics.steps] if k else [1] * (n - 1)
    rows += [trace.tensors[f"step{i}/verify/target.head"][:count] for i, count in enumerate(kept)]
    return response.token_ids, torch.cat(rows)[:n].view(torch.int16)


def test_speculation_gives_the_baselines_tokens_and_the_bits_of_its_logits(pair: Pair) -> None:
    """The slow ring has longer runs and prefill passes of more rows."""
    prompt, n = random_prompts([6], n_vocab=64, seed=2)[0], 4
    tokens, logits = recorded(pair, None, prompt, n, chunk=8)
    drafted, same = recorded(pair, 3, prompt, n, chunk=8)
    assert drafted == tokens
    assert torch.equal(same, logits)
    assert tokens == tokens_of(device_engine(pair, 3, MEANING).generate([prompt], new_tokens(n)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("stored", exhaustive_but(["at load"], ["at load", "fp8", "modelopt", "compressed-tensors"]))
def test_a_target_in_fp8_gives_its_baselines_tokens_and_the_bits_of_its_logits(tmp_path: Path, stored: str) -> None:
    """Maps of 256 columns, so that those stored as "fp8" have scales of two blocks of 128."""
    width = 256 if stored == "fp8" else 64
    pair = write_nano_pair(tmp_path, seed=5, n_layers=1, taps=(0, 1), vocab=64, hidden=width)
    how: dict[str, Any] = {"chunk": 8, "target_weights": "fp8" if stored == "at load" else "as_stored"}
    if stored != "at load":
        pair = write_fp8(pair[0], tmp_path / "quantised", stored, block=(16, 128)), pair[1]
    prompt, n = random_prompts([6], n_vocab=64, seed=2)[0], 3
    tokens, logits = recorded(pair, None, prompt, n, **how)
    drafted, same = recorded(pair, 3, prompt, n, **how)
    assert drafted == tokens
    assert torch.equal(same, logits)
    assert tokens == tokens_of(device_engine(pair, 3, MEANING, **how).generate([prompt], new_tokens(n)))[0]
    scales = device_engine(pair, None, MEANING, **how).target.layers[0].qkv.scales
    assert scales is not None
    assert scales.ndim == (3 if stored == "fp8" else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", exhaustive_but([RejectionAcceptance()], [RejectionAcceptance(), ForcedAcceptance(length=2.5)])
)
def test_rules_of_acceptance_give_the_same_tokens_whether_kernels_run_or_their_meaning(
    pair: Pair, rule: AcceptanceRule
) -> None:
    prompt, n = random_prompts([6], n_vocab=64, seed=2), new_tokens(4, temperature=1.0, seed=3)
    engines = [device_engine(pair, 2, by, n_slots=1, chunk=8, acceptance=rule) for by in (LANES, MEANING)]
    lanes, meaning = (engine.generate(prompt, n)[0] for engine in engines)
    assert lanes.token_ids == meaning.token_ids
    assert lanes.req_metrics == meaning.req_metrics


@pytest.mark.slow
def test_a_batch_whose_slots_fill_and_empty_gives_the_baselines_tokens(pair: Pair) -> None:
    """Three requests in two slots, one of them read in two chunks."""
    prompts = random_prompts([6, 18, 3], n_vocab=64, seed=2)
    limits = [new_tokens(n) for n in (2, 4, 3)]
    expected = tokens_of(device_engine(pair, None, MEANING, chunk=16).generate(prompts, limits))
    assert tokens_of(device_engine(pair, 2, LANES, chunk=16).generate(prompts, limits)) == expected


@pytest.mark.slow
@pytest.mark.exhaustive  # trees by kernels: `test_grown_trees_emulated`, and the GPU ring
def test_a_tree_given_by_hand_is_verified_in_one_pass_to_the_bits_of_plain_decoding(pair: Pair) -> None:
    """Forty nodes, five of them right and not neighbours, in two mask words; over a unit's end in the second step."""
    prompt, n = random_prompts([9], n_vocab=64)[0], 12
    expected, bits = recorded(pair, None, prompt, n + 1, chunk=16)
    parents = [-1] + [0] * 9 + [7] * 10 + [15] * 10 + [25] * 10
    tree, path = FlatTree(tuple(parents)), (7, 15, 25, 39)
    runner = device_runner(pair, None, LANES, n_slots=1, tree=tree, drafts=False, chunk=16)
    runner.admit(0, SlotRequest(0, prompt, n, ()), Trace())
    tokens = list(runner.collect(everything=True)[0].rows[0].tokens)
    for _ in range(2):
        right = expected[len(tokens) :]
        for node in range(1, tree.n_nodes):
            here = right[int(tree.depths[node]) - 1]
            runner.state.step.drafted[node] = here if node in path else (here + 1) % 64
        trace = RecordingTrace()
        runner.enqueue(1, 0, trace)
        row = runner.collect(everything=True)[0].rows[0]
        assert row.n_accepted == 4
        [logits] = [tensor for name, tensor in trace.tensors.items() if name.endswith("verify/target.head")]
        along = logits[[0, *path]].view(torch.int16)
        assert torch.equal(along, bits[len(tokens) : len(tokens) + 5])
        tokens += row.tokens
    assert tokens == expected[: len(tokens)]
