"""Rotary embedding of every kind turns q and k as the Hugging Face implementation does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from precision import allowed_error, largest_error
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle3core.geometry import RopeGeometry
from eagle3core.kernels.layer.rope import rope_reference, rope_tables
from eagle3core.weights.rope import rope_frequencies

pytestmark = pytest.mark.reference

HEAD_DIM = 16
KINDS: dict[str, tuple[RopeGeometry, dict[str, Any]]] = {
    "default": (RopeGeometry(theta=5e5), {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        RopeGeometry(theta=1e4, kind="linear", factor=4.0),
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    "llama3": (
        RopeGeometry(theta=5e5, kind="llama3", factor=8.0, original_max_position=256),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "yarn": (
        RopeGeometry(theta=1.5e5, kind="yarn", factor=32.0, original_max_position=128, truncate=False),
        {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    ),
    "yarn with rounded limits and a given scale": (
        RopeGeometry(theta=1e4, kind="yarn", factor=4.0, original_max_position=512, attention_factor=1.25),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 512,
        },
    ),
}


def theirs(parameters: dict[str, Any], q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q and k `[B, T, heads, D]` turned by transformers."""
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters=parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    turned = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def mine(rope: RopeGeometry, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q and k turned by the engine."""
    frequencies, scale = rope_frequencies(rope, HEAD_DIM)
    cos, sin = rope_tables(frequencies, scale, positions, q.dtype)
    return rope_reference(q, cos, sin), rope_reference(k, cos, sin)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_and_k_are_turned_as_transformers_turns_them(kind: str, dtype: torch.dtype) -> None:
    rope, parameters = KINDS[kind]
    q, k = torch.randn(2, 9, 4, HEAD_DIM).to(dtype), torch.randn(2, 9, 2, HEAD_DIM).to(dtype)
    positions = torch.tensor([[0, 1, 2, 3, 100, 101, 511, 2047, 4095], [7, 8, 9, 10, 11, 12, 13, 14, 15]])
    truth = mine(rope, q.double(), k.double(), positions)
    plain = theirs(parameters, q, k, positions)
    for result, expected, exact in zip(mine(rope, q, k, positions), plain, truth, strict=True):
        assert largest_error(result, exact) <= allowed_error(expected, exact)
        assert largest_error(result, expected) <= 1e-6 * 4 if dtype == torch.float32 else torch.equal(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_scale_are_those_of_transformers(kind: str) -> None:
    rope, parameters = KINDS[kind]
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters=parameters,
    )
    reference = LlamaRotaryEmbedding(config)
    frequencies, scale = rope_frequencies(rope, HEAD_DIM)
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(reference.attention_scaling, rel=1e-12)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, HEAD_DIM).double(), torch.randn(1, 1, 1, HEAD_DIM).double()

    def score(at_q: int, at_k: int) -> float:
        turned_q = mine(RopeGeometry(), q, q, torch.tensor([[at_q]]))[0]
        turned_k = mine(RopeGeometry(), k, k, torch.tensor([[at_k]]))[0]
        return float((turned_q * turned_k).sum())

    assert score(9, 4) == pytest.approx(score(905, 900), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_position_0_turns_nothing() -> None:
    x = torch.randn(1, 1, 3, HEAD_DIM)
    assert torch.equal(mine(RopeGeometry(), x, x, torch.tensor([[0]]))[0], x)
