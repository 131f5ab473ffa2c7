"""EAGLE-1 heads: drafts are an independent fp64 head's, chains and trees change no token, and neither kind of head is
taken for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_oracle import Eagle
from eagle_pairs import write_eagle_pair
from oracle import Target, speculate
from random_pairs import rewrite_config
from safetensors.torch import load_file, save_file
from tiny_engines import (
    Pair,
    accepted_counts,
    engine_config,
    is_empty,
    new_tokens,
    random_prompts,
    tiny_engine,
    tokens_of,
)

from eagle3core import CheckpointError, ConfigError, Engine, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.trace import RecordingTrace
from eagle3core.weights import PackedEagle

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17]
CHAIN_AS_TREE = [[0], [0, 0], [0, 0, 0]]
STATIC = {"choices": [*CHAIN_AS_TREE, [1], [2], [1, 0], [0, 1], [1, 0, 0]]}
DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 12}


def eagle_engine(pair: Pair, settings: dict[str, Any], **changes: Any) -> Engine:
    spec = SpeculativeConfig(method="eagle", model=str(pair[1]), **settings)
    given = {key: changes.pop(key) for key in ("trace",) if key in changes}
    return Engine.from_pretrained(pair[0], engine_config(pair, None, speculative_config=spec, **changes), **given)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_eagle_pair(tmp_path_factory.mktemp("eagle"), qkv_bias=True, own_embedding=True)


@pytest.mark.parametrize("name", ["with all that is optional", "with the target's table and no bias"])
def test_every_draft_and_state_is_the_oracles(tmp_path: Path, eagle: Pair, name: str) -> None:
    """Prompts over several chunks, five chained levels: tokens, counts, ranks, and the states of the first step."""
    pair = eagle if name.startswith("with all") else write_eagle_pair(tmp_path, bias=False, tie=True, seed=3)
    target, k, trace = Target(pair[0]), 5, RecordingTrace()
    head = Eagle(pair[1], target)
    engine = eagle_engine(pair, {"num_speculative_tokens": k}, collect_draft_ranks=True, trace=trace)
    prompts = random_prompts(LENGTHS, seed=1)
    responses = engine.generate(prompts[-1:], new_tokens(14))
    first = dict(trace.tensors)
    responses += engine.generate(prompts[:-1], new_tokens(14))
    decoded = [speculate(target, head, prompt, k=k, n_new=14) for prompt in [prompts[-1], *prompts[:-1]]]
    for response, expected in zip(responses, decoded, strict=True):
        assert response.token_ids == expected.tokens
        ours = [(step.n_accepted, step.n_committed, list(step.ranks)) for step in response.req_metrics.steps]
        assert ours == [(step.n_accepted, len(step.tokens), step.ranks) for step in expected.steps]
    chain = head.chain([*prompts[-1], decoded[0].tokens[0]], k)
    for level in range(k):
        scope = f"chain{level}" if level else "extend"
        state, logits = (first[f"step0/{scope}/draft.{name}"] for name in ("feedback", "head"))
        torch.testing.assert_close(state[-1], chain.states[level], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logits[-1, :6], chain.logits[level], rtol=1e-9, atol=1e-9)


def test_chains_and_trees_give_the_tokens_of_plain_decoding(eagle: Pair) -> None:
    prompts = random_prompts([*LENGTHS, 30])
    expected = tokens_of(tiny_engine(eagle, None).generate(prompts, new_tokens(20)))
    for settings in ({"num_speculative_tokens": 4}, {"num_speculative_tokens": 1}, STATIC, DYNAMIC):
        engine = eagle_engine(eagle, settings, max_batch_size=2)
        responses = engine.generate(prompts, new_tokens(20))
        assert tokens_of(responses) == expected
        assert accepted_counts(responses) >= {0, 1}
        assert is_empty(engine)


def test_a_tree_of_one_path_drafts_what_the_chain_drafts(eagle: Pair) -> None:
    """Tree passes feed states back as a chain's do: both accept as much in every step."""
    prompts, counts = random_prompts(LENGTHS, seed=4), []
    for settings in ({"num_speculative_tokens": 3}, {"choices": CHAIN_AS_TREE}):
        responses = eagle_engine(eagle, settings).generate(prompts, new_tokens(24))
        counts.append([step.n_accepted for response in responses for step in response.req_metrics.steps])
    assert counts[0] == counts[1]
    assert {0, 1, 2} <= set(counts[0])


def test_a_step_that_drafts_nothing_leaves_the_head_able_to_go_on(eagle: Pair) -> None:
    prompts = random_prompts(LENGTHS)
    expected = tokens_of(tiny_engine(eagle, None).generate(prompts, new_tokens(20)))
    engine = eagle_engine(eagle, {"num_speculative_tokens": 3, "adaptive": True})
    assert tokens_of(engine.generate(prompts, new_tokens(20))) == expected


def test_the_plan_counts_the_head_and_the_state_it_reads(eagle: Pair) -> None:
    engine = eagle_engine(eagle, {"num_speculative_tokens": 2})
    assert isinstance(engine.draft, PackedEagle)
    assert engine.target.taps == (2,)
    assert engine.speculation.reason == "eagle with 2 drafted tokens a step"
    stored = sum(tensor.nbytes for tensor in load_file(eagle[1] / "model.safetensors").values()) * 2  # fp32 to fp64
    target = sum(tensor.nbytes for tensor in load_file(eagle[0] / "model.safetensors").values()) * 2
    ones = engine.draft.final_gain.nbytes
    assert sum(tensor.nbytes for tensor in engine.draft.own_tensors()) == stored + 2 * ones
    assert engine.memory_plan.weight_bytes == target + stored


def test_each_kind_of_head_names_the_method_that_it_is_for(eagle: Pair, pair: Pair) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)like an EAGLE-1 or EAGLE-2 head.*set method='eagle'"):
        tiny_engine(eagle, 2)
    with pytest.raises(CheckpointError, match=r"(?s)like an EAGLE-3 head.*set method='eagle3'"):
        eagle_engine(pair, {})
    with pytest.raises(ConfigError, match=r"capture_layers is \(1,\) with method 'eagle'"):
        eagle_engine(eagle, {"capture_layers": (1,), "capture_convention": "input"})
    with pytest.raises(ConfigError, match=r"norm_output is 'head' with method 'eagle'"):
        eagle_engine(eagle, {"norm_output": "head"})
    given = eagle_engine(eagle, {})
    config = engine_config(eagle, 3)
    with pytest.raises(ConfigError, match="method is 'eagle3' with a PackedEagle"):
        Engine(given.target, given.draft, config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 16, "head_dim": 4}, "hidden_size is 16"),
        ({"vocab_size": 7}, "vocab_size is 7"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"bias": False}, "fc.bias is stored"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    ],
)
def test_a_head_of_another_shape_is_refused_by_its_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    pair = write_eagle_pair(tmp_path)
    rewrite_config(pair[1], **keys)
    with pytest.raises(CheckpointError, match=message):
        load_draft(pair[1], load_target(pair[0]).geometry, method="eagle")


def test_a_missing_part_of_the_head_is_named(tmp_path: Path) -> None:
    pair = write_eagle_pair(tmp_path)
    weights = load_file(pair[1] / "model.safetensors")
    del weights["layers.0.self_attn.o_proj.weight"]
    save_file(weights, pair[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: midlayer\.self_attn\.o_proj\.weight"):
        load_draft(pair[1], load_target(pair[0]).geometry, method="eagle")
