"""Every token, draft, accepted count, rank and logit of the engine in fp64 is that of the naive, uncached oracle.

Only public names are used (`Engine`, its configurations, `req_metrics`, a trace), so nothing here depends on how the
engine is built inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from oracle import Decoded, Draft, Target, greedy, speculate
from rings import slow_but
from tiny_engines import Pair, new_tokens, random_prompts, tiny_engine, write_tiny_pair
from torch import Tensor

from eagle3core import GenerationConfig, Response
from eagle3core.trace import RecordingTrace
from lab.pairs.random_pair import RandomShape, make_random_pair

pytestmark = pytest.mark.reference

LENGTHS = [3, 19, 1, 17, 30]  # in chunks of 8 and blocks of 4: within one, at its end, over several
# llama3 scaling that begins at 16 positions, theta 500000, unequal widths, an own embedding, the last layer's output.
SCALED = RandomShape(
    vocab=40, draft_vocab=26, layers=3, hidden=96, heads=4, kv_heads=2, head_dim=32, ffn=64, draft_hidden=48,
    draft_heads=4, draft_ffn=64, taps=(0, 1, 3), scaled_from=16, max_position=512,
)  # fmt: skip
AGREEING: dict[str, Any] = {
    "n_layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64, "vocab": 64, "draft_vocab": 24,
    "taps": (0, 1, 3), "convention": "input", "eos": [],
}  # fmt: skip
AGREEING_PAIRS: dict[str, dict[str, Any]] = {
    "linear scaling, biases": {"rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}, "bias": True},
    "default taps of eight layers": {"n_layers": 8, "taps": None, "convention": None},
    "outputs of two layers, one key head": {"taps": (0, 1), "convention": "output", "kv_heads": 1},
}  # fmt: skip
RANDOM_PAIRS: dict[str, dict[str, Any]] = {
    "tied": {"tie": True},
    "the target's head": {"own_head": False},
    "biases": {"bias": True},
    "five draft tokens of 24": {"vocab": 24, "draft_vocab": 5},
}


@pytest.fixture(scope="module")
def scaled_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = make_random_pair(tmp_path_factory.mktemp("scaled"), SCALED, seed=1)
    return pair.target, pair.draft


@cache
def decoded_by_the_oracle(
    pair: Pair, k: int, prompt: tuple[int, ...], n_new: int, stop_tokens: tuple[int, ...] = ()
) -> Decoded:
    target = Target(pair[0])
    return speculate(target, Draft(pair[1], target), prompt, k=k, n_new=n_new, stop_tokens=stop_tokens)


def assert_the_oracles(
    pair: Pair,
    k: int,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    limits: Sequence[GenerationConfig],
) -> list[Decoded]:
    """Tokens and every step's counts and ranks; what the oracle decoded."""
    decoded = [
        decoded_by_the_oracle(pair, k, tuple(prompt), limit.max_new_tokens, limit.stop_token_ids)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    for request, (response, expected) in enumerate(zip(responses, decoded, strict=True)):
        where = f"request {request} at depth {k}"
        assert response.token_ids == expected.tokens, where
        steps = response.req_metrics.steps
        assert len(steps) == len(expected.steps), where
        start = 1  # the first token is the prompt's own
        for i, (step, truth) in enumerate(zip(steps, expected.steps, strict=True)):
            ours = (step.start, step.n_draft, step.n_accepted, step.n_committed, step.ranks)
            theirs = (start, k, truth.n_accepted, len(truth.tokens), tuple(truth.ranks))
            assert ours == theirs, f"step {i} of {where}"
            assert step.cut == (len(truth.tokens) <= truth.n_accepted), f"step {i} of {where}"
            start += len(truth.tokens)
    return decoded


def counts_of(decoded: Sequence[Decoded]) -> set[int]:
    return {step.n_accepted for request in decoded for step in request.steps}


@pytest.mark.parametrize("k", slow_but([1, 3, 8], range(1, 9)))
def test_every_depth_decodes_as_the_oracle_does(scaled_pair: Pair, k: int) -> None:
    prompts = random_prompts(LENGTHS, n_vocab=40, seed=k)
    engine = tiny_engine(scaled_pair, k, collect_draft_ranks=True)
    decoded = assert_the_oracles(
        scaled_pair, k, prompts, engine.generate(prompts, new_tokens(18)), [new_tokens(18)] * 5
    )
    assert {0, 1, k} <= counts_of(decoded), "rejection, partial and full acceptance all occurred"


def test_without_a_draft_the_engine_decodes_as_the_oracle_does(scaled_pair: Pair) -> None:
    prompts = random_prompts(LENGTHS, n_vocab=40)
    responses = tiny_engine(scaled_pair, None).generate(prompts, new_tokens(18))
    target = Target(scaled_pair[0])
    assert [response.token_ids for response in responses] == [greedy(target, prompt, 18) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "k"),
    slow_but([(name, (2, 6)[i % 2]) for i, name in enumerate(AGREEING_PAIRS)], list(product(AGREEING_PAIRS, (2, 6)))),
)
def test_other_agreeing_pairs_decode_as_the_oracle_does(tmp_path: Path, name: str, k: int) -> None:
    pair = write_agreeing_pair(tmp_path, **{**AGREEING, **AGREEING_PAIRS[name]})
    prompts = random_prompts([3, 19, 30], n_vocab=64, seed=3)
    engine = tiny_engine(pair, k, collect_draft_ranks=True)
    decoded = assert_the_oracles(pair, k, prompts, engine.generate(prompts, new_tokens(12)), [new_tokens(12)] * 3)
    assert {0, 1} <= counts_of(decoded)


@pytest.mark.parametrize("name", slow_but([*RANDOM_PAIRS][:2], RANDOM_PAIRS))
def test_pairs_that_agree_only_by_luck_decode_as_the_oracle_does(tmp_path: Path, name: str) -> None:
    pair = write_tiny_pair(tmp_path, **RANDOM_PAIRS[name])
    prompts = random_prompts(LENGTHS)
    engine = tiny_engine(pair, 4, collect_draft_ranks=True)
    assert_the_oracles(pair, 4, prompts, engine.generate(prompts, new_tokens(14)), [new_tokens(14)] * 5)


@pytest.mark.parametrize(("n_slots", "block_size", "chunk"), [(1, 3, 3), (2, 16, 32), (5, 1, 1), (8, 64, 64)])
def test_slots_blocks_and_chunks_change_nothing(scaled_pair: Pair, n_slots: int, block_size: int, chunk: int) -> None:
    prompts = random_prompts(LENGTHS, n_vocab=40, seed=1)
    engine = tiny_engine(
        scaled_pair, 5, max_batch_size=n_slots, block_size=block_size, prefill_chunk=chunk, collect_draft_ranks=True
    )
    assert_the_oracles(scaled_pair, 5, prompts, engine.generate(prompts, new_tokens(14)), [new_tokens(14)] * 5)


def test_slots_that_are_refilled_while_others_run_decode_as_the_oracle_does(scaled_pair: Pair) -> None:
    prompts = random_prompts([3, 19, 1, 17, 30, 8, 5, 12], n_vocab=40, seed=2)
    plain = greedy(Target(scaled_pair[0]), prompts[3], 24)
    stop = next(token for i, token in enumerate(plain) if i >= 4 and token not in plain[:i])
    limits = [new_tokens(n) for n in (1, 24, 2, 24, 5, 9, 1, 16)]
    limits[3] = new_tokens(24, stop_token_ids=(stop,))
    engine = tiny_engine(scaled_pair, 3, max_batch_size=2, collect_draft_ranks=True)
    for _ in range(2):  # an engine that has decoded before is as good as a new one
        decoded = assert_the_oracles(scaled_pair, 3, prompts, engine.generate(prompts, limits), limits)
    assert decoded[3].tokens[-1] == stop


def test_prompts_of_many_chunks_decode_as_the_oracle_does(scaled_pair: Pair) -> None:
    prompts = random_prompts([150, 7, 97, 64], n_vocab=40, seed=4)
    limits = [new_tokens(12)] * 4
    engine = tiny_engine(
        scaled_pair, 4, session_len=256, block_size=16, prefill_chunk=32, collect_draft_ranks=True, max_batch_size=2
    )
    assert_the_oracles(scaled_pair, 4, prompts, engine.generate(prompts, limits), limits)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_drafts_past_the_first_miss_and_all_logits_are_the_oracles(scaled_pair: Pair, k: int) -> None:
    trace = RecordingTrace()
    prompt = random_prompts([23], n_vocab=40, seed=6)[0]
    tiny_engine(scaled_pair, k, trace=trace).generate([prompt], new_tokens(16))
    target = Target(scaled_pair[0])
    draft = Draft(scaled_pair[1], target)
    decoded = decoded_by_the_oracle(scaled_pair, k, tuple(prompt), 16)
    assert trace.tensors["first_token"].tolist() == decoded.tokens[:1]
    sequence = prompt + decoded.tokens[:1]
    for i, step in enumerate(decoded.steps):
        assert trace.tensors[f"step{i}/tree.tokens"].tolist()[1:] == step.drafts, f"step {i}"
        scopes = ["extend", *(f"chain{level}" for level in range(1, k))]
        ours = torch.cat([trace.tensors[f"step{i}/{scope}/draft.head"] for scope in scopes])
        assert_equal_logits(ours, draft.chain(sequence, k).logits)
        verified = target.logits(sequence + step.drafts)[len(sequence) - 1 :]
        assert_equal_logits(trace.tensors[f"step{i}/verify/target.head"], verified)
        sequence += step.tokens


def assert_equal_logits(ours: Tensor, theirs: Tensor) -> None:
    """Two orders of summing in fp64 differ by far less; any wrong term by far more."""
    n_ids = theirs.shape[1]
    assert (ours[:, n_ids:] == float("-inf")).all(), "padding of a head is never chosen"
    assert ours[:, :n_ids].shape == theirs.shape
    assert float((ours[:, :n_ids] - theirs).abs().max()) < 1e-10
