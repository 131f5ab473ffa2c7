"""Rotary settings are read in both spellings, and contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3core.checkpoint.rope import read_rope
from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError
from eagle3core.geometry import RopeGeometry

pytestmark = pytest.mark.reference

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def rope(**values: Any) -> RopeGeometry:
    return read_rope(Settings(values, "config.json"), max_position=4096)


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "linear", "factor": 4.0}, LLAMA3, {"rope_type": "yarn", "factor": 4.0, "truncate": False}],
)
def test_the_old_and_the_new_spelling_mean_the_same(scaling: dict[str, Any]) -> None:
    new = rope(rope_parameters={**scaling, "rope_theta": 5e5})
    old = rope(rope_theta=5e5, rope_scaling=scaling)
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    assert new == old == rope(rope_theta=5e5, rope_scaling=older)
    assert new == rope(rope_theta=5e5, rope_scaling=scaling, rope_parameters={**scaling, "rope_theta": 5e5})
    assert (new.theta, new.kind, new.factor) == (5e5, scaling["rope_type"], scaling["factor"])


def test_the_base_is_ten_thousand_when_the_file_is_silent() -> None:
    assert rope() == RopeGeometry(theta=10000.0)
    assert rope(rope_scaling=None, rope_theta=None) == RopeGeometry(theta=10000.0)
    assert rope(rope_parameters={"rope_type": "default"}) == RopeGeometry(theta=10000.0)


def test_yarn_without_a_trained_context_takes_the_configured_one() -> None:
    assert rope(rope_scaling={"rope_type": "yarn", "factor": 2.0}).original_max_position == 4096


def test_the_yarn_attention_factor_equals_the_one_of_transformers() -> None:
    scaling = {"rope_type": "yarn", "factor": 16.0, "mscale": 0.7, "mscale_all_dim": 1.3}
    scaling["original_max_position_embeddings"] = 512
    config = LlamaConfig(max_position_embeddings=4096, rope_parameters={**scaling, "rope_theta": 10000.0})
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert rope(rope_scaling=scaling).attention_factor == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta differs within one file"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope_type is 'axial'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, "type is 'dynamic'"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is None"),
        ({"rope_scaling": 3}, "rope_scaling is 3"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "contradicts rope_scaling",
        ),
    ],
)
def test_an_unusable_rotary_setting_is_named(values: dict[str, Any], shown: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        rope(**values)
    assert shown in str(caught.value)
