"""The oracle against Hugging Face's models, the official code's recorded tensors, and itself."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from oracle import Draft, Target, greedy, rotary_frequencies, speculate, tap_inputs
from places import GOLDEN, ROOT
from random_pairs import rewrite_config, write_random_pair
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lab.parity.hf_draft import DraftReference
from lab.parity.hf_target import TargetReference

pytestmark = pytest.mark.reference

TOLERANCE = 1e-5  # of the recorded tensors, which the official code computed in fp32
DEPTH = 5
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "n_layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 80, "vocab": 40, "draft_vocab": 24,
    "taps": (0, 1, 3), "convention": "input", "eos": [],
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama3 with theta 500000": {"rope": LLAMA3, "draft_rope": {**LLAMA3, "factor": 4.0}},
    "linear": {"rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "biases": {"bias": True},
    "tied": {"tie": True},
    "one key head": {"kv_heads": 1, "draft_kv_heads": 4},
    "unequal widths": {"draft_hidden": 32, "draft_heads": 2, "draft_kv_heads": 1},
    "the target's head": {"own_head": False, "draft_vocab": None},
    "outputs are tapped": {"taps": (0, 1), "convention": "output"},
}
Golden = dict[str, Tensor]


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_random_pair(tmp_path_factory.mktemp("pair"), **{**SMALL, **request.param})


@pytest.fixture(scope="module")
def chain() -> Golden:
    with np.load(GOLDEN / "official_chain.npz") as archive:
        return {key: torch.from_numpy(archive[key]) for key in archive.files}


def prompt_of(length: int, n_vocab: int = SMALL["vocab"]) -> list[int]:
    return torch.randint(n_vocab, (length,)).tolist()


def fp64_reference(directory: Path) -> TargetReference:
    return TargetReference(
        directory, dtype=torch.float64, compute_dtype=torch.float64, device=torch.device("cpu"), attention="eager"
    )


def assert_within(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    error = float((ours - theirs.reshape(ours.shape)).abs().max())
    assert error <= tolerance, f"largest difference {error:.3g}"


def test_the_oracle_uses_nothing_of_what_it_judges_and_stays_small() -> None:
    source = (ROOT / "tests" / "support" / "oracle.py").read_text(encoding="utf-8")
    modules = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert not modules & {"eagle3core", "lab", "transformers"}, modules
    assert len(source.splitlines()) <= 300


def test_logits_and_streams_are_those_of_hugging_face_in_fp64(directories: tuple[Path, Path]) -> None:
    target, reference = Target(directories[0]), fp64_reference(directories[0])
    tokens = prompt_of(70)  # more than twice the positions before scaling
    stages = reference.run(tokens)
    assert_within(target.logits(tokens), stages["head"], 1e-11)
    streams = target.streams(tokens)
    assert_within(torch.cat(streams, dim=-1), reference.taps(stages, range(len(streams))), 1e-11)


def test_greedy_tokens_are_those_that_hugging_face_generates(directories: tuple[Path, Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(directories[0], dtype=torch.float64)
    model.generation_config.eos_token_id = None  # the pair has an empty list of them, which `generate` cannot take
    prompt = prompt_of(9)
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert greedy(Target(directories[0]), prompt, 12) == expected[0, 9:].tolist()


def test_a_chain_is_that_of_a_draft_made_of_hugging_faces_modules(directories: tuple[Path, Path]) -> None:
    target_reference = fp64_reference(directories[0])
    reference = DraftReference(directories[1], target_reference, dtype=torch.float64)
    draft = Draft(directories[1], Target(directories[0]))
    tokens = prompt_of(50)
    chain = draft.chain(tokens, DEPTH)
    fed = target_reference.taps(target_reference.run(tokens[:-1]), reference.taps)
    seen = reference.run(tokens[1:], range(len(tokens) - 1), fed, fuse=True)
    for level in range(DEPTH):
        assert_within(chain.logits[level], seen["head"][-1], 1e-10)
        assert chain.tokens[level] == reference.target_token(seen["head"][-1])
        fed = seen["feedback"][-1:]
        seen = reference.run([chain.tokens[level]], [len(tokens) - 1 + level], fed, fuse=False)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_speculation_changes_no_token(directories: tuple[Path, Path], k: int) -> None:
    target = Target(directories[0])
    prompt = prompt_of(7)
    decoded = speculate(target, Draft(directories[1], target), prompt, k=k, n_new=14)
    assert decoded.tokens == greedy(target, prompt, 14)
    assert [token for step in decoded.steps for token in step.tokens] == decoded.tokens[1:]
    for step in decoded.steps:
        n_right = next((i for i, rank in enumerate(step.ranks) if rank != 0), len(step.ranks))
        assert n_right == min(step.n_accepted, len(step.tokens))


def test_a_stop_token_ends_a_request_within_a_step(tmp_path: Path) -> None:
    directories = write_agreeing_pair(tmp_path, **SMALL)
    target = Target(directories[0])
    draft, prompt = Draft(directories[1], target), prompt_of(7)
    free = speculate(target, draft, prompt, k=4, n_new=40)
    stop = next(step.tokens[0] for step in free.steps if len(set(step.tokens)) > 1)  # stops that step before its end
    expected = greedy(target, prompt, 40, [stop])
    decoded = speculate(target, draft, prompt, k=4, n_new=40, stop_tokens=[stop])
    assert decoded.tokens == expected == free.tokens[: free.tokens.index(stop) + 1]


def test_tokens_and_accepted_lengths_are_those_of_the_official_code(chain: Golden) -> None:
    target = Target(GOLDEN / "target")
    n_new = len(chain["tokens_ea"])
    decoded = speculate(target, Draft(GOLDEN / "draft", target), chain["prompt_ids"].tolist(), k=DEPTH, n_new=n_new)
    assert decoded.tokens == chain["tokens_ea"].tolist() == chain["tokens_hf"].tolist()
    assert [step.n_accepted for step in decoded.steps] == chain["accept_lens"][: len(decoded.steps)].tolist()
    for round_ in (0, 1):
        assert decoded.steps[round_].drafts == chain[f"r{round_}/tree/tokens"].flatten().tolist()[1:]


@pytest.mark.parametrize("round_", [0, 1])
def test_captured_states_and_every_level_are_those_of_the_official_code(chain: Golden, round_: int) -> None:
    target = Target(GOLDEN / "target")
    draft = Draft(GOLDEN / "draft", target)
    tokens = chain["prompt_ids"].tolist()
    assert_within(draft.features(tokens), chain["prefill/aux"], TOLERANCE)
    assert_within(target.logits(tokens), chain["prefill/logits"], TOLERANCE)
    tokens += greedy(target, tokens, 1 + round_)  # no draft is right, so each round commits one token
    drafted = draft.chain(tokens, DEPTH)
    for level in range(DEPTH):
        key = f"r{round_}/s{level}"
        assert_within(drafted.logits[level], chain[f"{key}/lm_head/out"].flatten(0, -2)[-1], TOLERANCE)
        assert_within(drafted.states[level], chain[f"{key}/midlayer/out"].flatten(0, -2)[-1], TOLERANCE)
    verified = target.logits(tokens + drafted.tokens)[len(tokens) - 1 :]
    assert_within(verified, chain[f"r{round_}/verify/node_logits"], TOLERANCE)


@pytest.mark.parametrize("rope", [{"rope_theta": 1e4, "rope_type": "default"}, LLAMA3], ids=["default", "llama3"])
def test_both_spellings_of_rope_give_the_frequencies_of_transformers(rope: dict[str, Any]) -> None:
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old, new = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}, {"rope_parameters": rope}
    assert torch.equal(rotary_frequencies(old, 64), rotary_frequencies(new, 64))
    if rope is LLAMA3:
        config = LlamaConfig(rope_parameters=rope, head_dim=64, max_position_embeddings=2048)
        theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        assert torch.equal(rotary_frequencies(new, 64), theirs.double())
        # A scale that nothing falls into would prove nothing.
        ratios = rotary_frequencies(new, 64) / rotary_frequencies({"rope_theta": 500000.0}, 64)
        assert (ratios == 1).any()
        assert (ratios < 0.126).any()
        assert ((ratios > 0.13) & (ratios < 0.99)).any()


def test_taps_are_read_by_both_conventions() -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    assert tap_inputs({}, 36) == [2, 18, 33]
    assert tap_inputs({"eagle_config": {name: [1, 17, 32]}}, 36) == [2, 18, 33]
    assert tap_inputs({name: [2, 18, 33]}, 36) == [2, 18, 33]
    stated = "eagle_aux_hidden_state_layer_convention"
    assert tap_inputs({"eagle_config": {name: [24, 30, 36]}, stated: "input"}, 36) == [24, 30, 36]


def test_a_key_that_is_null_counts_as_absent(tmp_path: Path) -> None:
    directories = write_random_pair(tmp_path, **SMALL)
    before = Target(directories[0]).logits([1, 2, 3])
    path = directories[0] / "config.json"
    path.write_text(path.read_text().replace("{", '{"rope_scaling": null, "rope_parameters": null,', 1))
    assert torch.equal(Target(directories[0]).logits([1, 2, 3]), before)
    rewrite_config(directories[0], rope_theta=500000.0)
    assert not torch.equal(Target(directories[0]).logits([1, 2, 3]), before)
