"""Looked-up drafts through the kernels' own source, lane by lane: the tokens and the bits of plain decoding."""

from __future__ import annotations

import pytest
import torch
from device_engines import device_engine, device_runner, write_nano_pair
from tiny_engines import Pair, new_tokens
from torch import Tensor

from eagle3core import Engine, EngineConfig, Response, SpeculativeConfig
from eagle3core.step.replay import EagerReplayer, emulate
from eagle3core.step.tree import chain_tree
from eagle3core.trace import RecordingTrace

pytestmark = pytest.mark.emulated

LANES = EagerReplayer(emulate)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=64)


def lookup_engine(pair: Pair, method: str, k: int, trace: RecordingTrace) -> Engine:
    runner = device_runner(pair, None, LANES, n_slots=1, tree=chain_tree(k), drafts=False, chunk=8, n_behind=0)
    config = EngineConfig(
        session_len=128, max_batch_size=1, dtype="bfloat16", device="cpu", prefill_chunk=64,
        speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=k),
    )  # fmt: skip
    return Engine(runner.target, None, config, trace=trace, runner=runner)


def logits_of(trace: RecordingTrace, response: Response, n: int) -> Tensor:
    """Bits of the logits `[n, V]` that chose the tokens."""
    counts = [step.n_accepted + 1 for step in response.req_metrics.steps] or [1] * (n - 1)
    rows = [trace.tensors[f"step{i}/verify/target.head"][:count] for i, count in enumerate(counts)]
    return torch.cat([trace.tensors["prefill/target.head"], *rows])[:n].view(torch.int16)


@pytest.mark.slow
def test_kernels_verify_looked_up_drafts_with_the_bits_of_plain_decoding(pair: Pair) -> None:
    """One step whose two drafts are wrong, and one of a single draft, which is right."""
    plain_trace, trace, prompt, n = RecordingTrace(), RecordingTrace(), [44, 32, 47], 4
    plain_engine = device_engine(pair, None, LANES, trace=plain_trace, n_slots=1, chunk=8)
    [plain] = plain_engine.generate([prompt], new_tokens(n))
    [drafted] = lookup_engine(pair, "suffix", 2, trace).generate([prompt], new_tokens(n))
    assert drafted.token_ids == plain.token_ids
    assert torch.equal(logits_of(trace, drafted, n), logits_of(plain_trace, plain, n))
    assert [(step.n_draft, step.n_accepted) for step in drafted.req_metrics.steps] == [(2, 0), (1, 1)]
