"""Every kind of rotary scaling gives the table that transformers makes for the same length."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3core.checkpoint.rope import check_pairs, read_rope
from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError
from eagle3core.geometry import RopeGeometry
from eagle3core.weights.rope import rope_frequencies

pytestmark = pytest.mark.reference

HEAD_DIM, BORDER = 32, 256
_TRAINED = {"original_max_position_embeddings": BORDER}
_LISTS = {"short_factor": [1.0 + i / 50 for i in range(16)], "long_factor": [1.5 + i / 4 for i in range(16)]}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_TRAINED},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **_TRAINED},
    "yarn, mscale_all_dim 0": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0, **_TRAINED},
    "yarn, limits given": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    | {"mscale": 0.7, "mscale_all_dim": 1.3, **_TRAINED},
    "yarn, mscale alone": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, **_TRAINED},
    "yarn, shrinking": {"rope_type": "yarn", "factor": 0.5, "mscale": 0.7, "mscale_all_dim": 1.3, **_TRAINED},
    "longrope": {"rope_type": "longrope", **_LISTS, **_TRAINED},
    "longrope, scale given": {"rope_type": "longrope", "attention_factor": 1.25, **_LISTS, **_TRAINED},
}


def both(parameters: dict[str, Any], length: int, positions: int) -> tuple[Any, Any]:
    """(frequencies, scale) of transformers and ours."""
    parameters = {**parameters, "rope_theta": 5e5}
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=positions, rope_parameters=dict(parameters))
    theirs = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)
    rope = read_rope(Settings({"rope_parameters": parameters}, "config.json"), positions)
    return theirs, rope_frequencies(rope, HEAD_DIM, length)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers_on_both_sides_of_the_border(kind: str) -> None:
    parameters = KINDS[kind]
    positions = BORDER if kind == "dynamic" else 4 * BORDER
    found = []
    for length in (1, BORDER - 1, BORDER, BORDER + 1, 4 * BORDER):
        theirs, ours = both(parameters, length, positions)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-12)
        found.append(ours[0])
    changes = [not torch.equal(a, b) for a, b in pairwise(found)]
    assert changes == [False, False, kind.startswith(("dynamic", "longrope")), kind == "dynamic"]


def test_a_dynamic_scaling_begins_behind_the_configured_positions_whatever_length_is_said_to_be_trained() -> None:
    for length in (BORDER, 4 * BORDER):
        theirs, ours = both({**KINDS["dynamic"], "original_max_position_embeddings": BORDER // 4}, length, BORDER)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)


def test_a_dynamic_scaling_needs_heads_of_four() -> None:
    config = Settings({"rope_parameters": KINDS["dynamic"], "head_dim": 2}, "config.json")
    with pytest.raises(CheckpointError, match="head_dim is 2"):
        check_pairs(config, read_rope(config, BORDER), 2)
    check_pairs(config, read_rope(config, BORDER), 4)


def test_an_mrope_target_turns_text_as_a_default_one() -> None:
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    assert read_rope(Settings({"rope_scaling": scaling, "rope_theta": 1e6}, "c"), 64) == RopeGeometry(theta=1e6)


def test_two_names_of_one_kind_do_not_contradict() -> None:
    older = {**KINDS["longrope"], "type": "su"}
    read = [read_rope(Settings({"rope_parameters": one}, "c"), 4 * BORDER) for one in (KINDS["longrope"], older)]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("scaling", "shown"),
    [
        ({"rope_type": "longrope", **_LISTS, "long_factor": [1.0] * 3, **_TRAINED}, "long_factor is a list of 3"),
        ({"rope_type": "longrope", **_LISTS, "short_factor": None}, "short_factor is None"),
        ({"rope_type": "proportional"}, "rope_type is 'proportional'"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
        ({"rope_type": "dynamic"}, "factor is missing"),
    ],
)
def test_a_setting_that_fits_no_head_is_named(scaling: dict[str, Any], shown: str) -> None:
    config = Settings({"rope_parameters": scaling}, "config.json")
    with pytest.raises(CheckpointError) as caught:
        check_pairs(config, read_rope(config, 4 * BORDER), HEAD_DIM)
    assert shown in str(caught.value)
