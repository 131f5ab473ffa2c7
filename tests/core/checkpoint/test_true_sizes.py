"""Heads of the sizes in which people use them give the logits of their readers' formulas.

Only the head is at true size, with the target's width and vocabulary; the target has two narrow layers, whose three
boundaries are the taps. All weights are bf16 on disk, as published.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_logits import drafted, relative_error
from layout_files import FORMATS, IDS, STATED, Changes, read_head, write_head
from layout_oracle import HeadOracle
from oracle import Target
from random_pairs import write_random_pair

pytestmark = [pytest.mark.reference, pytest.mark.slow, pytest.mark.exhaustive]  # minutes, and 10 GB of memory

K, PROMPT = 3, [5, 17, 3, 40, 9, 22, 31, 30000]


@dataclass(frozen=True)
class TrueSize:
    """A head that people use: how it is stored, its geometry beside its target's width and vocabulary, its variant."""

    layout: str
    geometry: dict[str, Any]
    change: Callable[[Changes], object]


def llama3(head: Changes) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    head.flags(rope_theta=5e5, rope_scaling={**scaling, "original_max_position_embeddings": 8192})


def qwen3_layer(head: Changes) -> None:
    head.flags(rope_theta=1e6, norm_before_residual=True)
    head.norms_of_heads()


def yarn(head: Changes) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    head.flags(rope_theta=150000, rope_scaling={**scaling, "original_max_position_embeddings": 4096})
    head.flags(architectures=["LlamaForCausalLM"], truncated_vocab_size=head.config["draft_vocab_size"])


def v3(head: Changes) -> None:
    head.inner(norm_before_fc=True)
    head.norm_over_all()
    head.full_vocabulary(own_head=False)
    head.flags(draft_vocab_size=None)


LLAMA = {"hidden": 4096, "draft_ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256}
QWEN = {"hidden": 4096, "draft_ffn": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 151936}
GPT_OSS = {"hidden": 2880, "draft_ffn": 17280, "heads": 64, "kv_heads": 8, "head_dim": 64, "vocab": 201088}
SIZES = {
    "Llama-3.1-8B, SpecForge": TrueSize("specforge", {**LLAMA, "draft_vocab": 32000}, llama3),
    "Qwen3-8B, speculators with a Qwen3 layer": TrueSize("speculators", {**QWEN, "draft_vocab": 32000}, qwen3_layer),
    "gpt-oss-120b, nebius": TrueSize("specforge", {**GPT_OSS, "draft_vocab": 64000}, yarn),
    "gpt-oss-120b, ModelOpt with a norm before fc": TrueSize("modelopt", {**GPT_OSS, "draft_vocab": 64000}, v3),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_head_of_true_size_gives_the_logits_of_its_formulas(tmp_path: Path, name: str) -> None:
    size, half = SIZES[name], torch.bfloat16
    target, plain = write_random_pair(tmp_path, n_layers=2, ffn=512, tie=True, eos=[], dtype=half, **size.geometry)
    config, weights = read_head(plain)
    config |= {IDS: [0, 1, 2], STATED: "input"}
    size.change(Changes(config, weights, size.geometry["hidden"], size.geometry["vocab"]))
    FORMATS[size.layout](config, weights)
    stored = {name: tensor.to(half) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    del weights
    head = write_head(tmp_path / "head", config, stored)
    del stored
    gc.collect()
    sequence, ours, drafts = drafted(target, head, PROMPT, K)
    gc.collect()  # the engine's copy, before the other one is read
    theirs, expected = HeadOracle(head, Target(target)).chain(sequence, K)
    error = relative_error(ours, theirs)
    print(f"{name}: logits {error:.2e} relative, drafts {drafts}")  # read with -rP
    assert theirs.shape == (K, config.get("draft_vocab_size") or size.geometry["vocab"])
    assert error < 1e-5
    assert drafts == expected
