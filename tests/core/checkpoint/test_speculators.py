"""Heads that vllm-project/speculators wrote draft here as its own model drafts, which is no part of this project.

Needs an environment of its own: `python tools/speculators_env.py DIR`, then EAGLE3_SPECULATORS_PYTHON=DIR/bin/python.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_logits import drafted, relative_error
from places import SUPPORT
from random_pairs import ROPE_LLAMA3, write_random_pair
from torch import Tensor

from eagle3core.checkpoint import load_draft, load_target
from lab.parity import run_stage_parity

pytestmark = [pytest.mark.reference, pytest.mark.slow]

K = 4  # a first pass and three chained ones
PROMPT = [5, 17, 3, 40, 9, 22, 31, 8, 60, 2]
NEAR = 6  # a window that the prompt leaves
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
NBR, NBF, EACH, FED = (
    {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}
)  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab": 44},
    "normed residual": {"draft_vocab": 44, "flags": NBR},
    "one norm before fc": {"draft_vocab": 44, "flags": NBF},
    "a norm of each tap": {"draft_vocab": 44, "flags": EACH},
    "normed feedback": {"draft_vocab": 44, "flags": FED},
    "gpt-oss style, full vocabulary": {"flags": NBR | NBF},
    "EAGLE 3.1 with biases": {"draft_vocab": 30, "flags": NBR | EACH | FED, "keys": {"attention_bias": True}},
    "biases everywhere": {"draft_vocab": 44, "keys": {"attention_bias": True, "mlp_bias": True}},
    "Qwen3 layer": {"layer": "qwen3", "draft_vocab": 44},
    "Qwen3 layer, all three norms": {"layer": "qwen3", "flags": NBR | NBF | FED},
    "Qwen3 layer, EAGLE 3.1, biases, yarn": {
        "layer": "qwen3", "draft_vocab": 44, "flags": EACH | FED,
        "keys": {"attention_bias": True, "rope_parameters": YARN},
    },
    "four taps, one of the last state": {
        "draft_vocab": 44, "flags": NBR | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6, 8]},
    },
    "a window": {"draft_vocab": 44, "window": NEAR},
    "Qwen3 layer and a window": {"layer": "qwen3", "draft_vocab": 44, "window": NEAR, "flags": NBR},
    "as its trainer makes it": {"trained": {}},
    "as its trainer makes it, Qwen3 layer": {"trained": {"draft_arch": "qwen3", "draft_vocab_size": 44}},
    "as its trainer makes it, near": {"trained": {"sliding_window": NEAR, "draft_vocab_size": 44}},
    "as its trainer makes it, whole attention": {"trained": {"full_attention_indices": [0]}},
}  # fmt: skip
PAST_WINDOW = ["a window", "Qwen3 layer and a window", "as its trainer makes it, near"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and the folder of heads that speculators wrote for it."""
    python = os.environ.get("EAGLE3_SPECULATORS_PYTHON", "")
    if not python:
        pytest.skip("EAGLE3_SPECULATORS_PYTHON names no Python with speculators (tools/speculators_env.py makes one)")
    folder = tmp_path_factory.mktemp("speculators")
    target, _ = write_random_pair(
        folder, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64, draft_vocab=44, eos=[], rope=ROPE_LLAMA3
    )
    request = {"target": str(target), "prompt": PROMPT, "k": K, "heads": HEADS}
    (folder / "request.json").write_text(json.dumps(request))
    script = [python, str(SUPPORT / "speculators_heads.py"), str(folder / "request.json"), str(folder / "heads")]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return target, folder / "heads"


def theirs_of(heads: Path, name: str) -> dict[str, Tensor]:
    return torch.load(heads / name / "logits.pt", weights_only=True)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_speculators_drafts_as_its_own_model_does(written: tuple[Path, Path], name: str) -> None:
    target, heads = written
    sequence, ours, drafts = drafted(target, heads / name, PROMPT, K)
    theirs = theirs_of(heads, name)
    assert sequence[-1:] == theirs["first"].tolist()
    assert drafts == theirs["tokens"].tolist()
    assert ours.shape[0] == K
    assert relative_error(ours, theirs["served"]) < 1e-5


@pytest.mark.parametrize("name", PAST_WINDOW)
def test_its_training_steps_keep_keys_that_a_window_of_positions_drops(written: tuple[Path, Path], name: str) -> None:
    """So the first pass is the same in both, and the chained ones are compared by position, as heads are served."""
    target, heads = written
    theirs = theirs_of(heads, name)
    _, ours, _ = drafted(target, heads / name, PROMPT, K)
    assert relative_error(ours[:1], theirs["trained"][:1]) < 1e-5
    assert relative_error(ours[1:], theirs["trained"][1:]) > 1e-3


def test_what_speculators_writes_is_read_as_it_was_made(written: tuple[Path, Path]) -> None:
    target, heads = written
    geometry = load_target(target).geometry
    made = {name: load_draft(heads / name, geometry).geometry for name in HEADS}
    default = made["as its trainer makes it"]
    variant = default.variant
    assert (variant.normed_residual, variant.fusion_norm, variant.feeds_normed) == (True, "all", True)
    assert (default.window, default.draft_vocab_size, default.block.has_qk_norm) == (2048, 64, False)
    assert made["as its trainer makes it, Qwen3 layer"].block.has_qk_norm
    assert made["as its trainer makes it, whole attention"].window == 0
    assert {geometry.window for name, geometry in made.items() if name in PAST_WINDOW} == {NEAR}
    assert all(geometry.has_embedding and geometry.has_head for geometry in made.values())
    assert made["four taps, one of the last state"].taps == (1, 3, 6, 8)


@pytest.mark.parametrize("name", ["Qwen3 layer and a window", "as its trainer makes it", "EAGLE 3.1 with biases"])
def test_stage_parity_reads_what_speculators_writes_as_the_engine_does(written: tuple[Path, Path], name: str) -> None:
    target, heads = written
    report = run_stage_parity(target, heads / name, prompts=[PROMPT, PROMPT[3:], PROMPT[::-1]], k=3, steps=2)
    assert report.passed, report.verdict
