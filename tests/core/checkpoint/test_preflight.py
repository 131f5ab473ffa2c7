"""One look at a pair finds everything that loading would stop at, without reading a weight."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from damaged_drafts import change
from eagle_pairs import write_eagle_pair
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file, save_file

from eagle3core.checkpoint import draft_shapes, load_draft, load_target, preflight, target_shapes
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.target import read_target_geometry
from eagle3core.errors import CheckpointError, ConfigError
from eagle3core.geometry import DraftGeometry

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_pair_that_loads_passes_with_the_decisions_of_loading(tmp_path: Path, layout: str) -> None:
    target, draft = write_random_pair(tmp_path, layout=layout)
    begun = time.process_time()
    looked = preflight(target, draft)
    assert time.process_time() - begun < 1.0
    assert looked.passed
    assert looked.decisions == load_draft(draft, load_target(target).geometry).geometry.decisions
    assert looked.lines == [decision.line for decision in looked.decisions]


def test_all_that_is_wrong_is_found_at_once(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path)
    change(target, "model.norm.weight", torch.ones(3))
    change(target, "model.layers.3.mlp.up_proj.weight", None)
    rewrite_config(
        draft, norm_output=True, attention_swirl=0.5, target_hidden_size=128, eagle_config={"use_mtp_layernorm": True}
    )
    change(draft, "norm.weight", torch.ones(3))
    change(draft, "midlayer.mlp.down_proj.weight", None)
    change(draft, "fc.scale", torch.ones(3))
    change(draft, "d2t", torch.arange(128))
    looked = preflight(target, draft)
    assert not looked.passed
    said = "\n".join(str(error) for error in looked.errors)
    for part in (
        "model.norm.weight has shape [3]", "lacks 1 tensors: model.layers.3.mlp.up_proj.weight", "norm_output is True",
        "attention_swirl is 0.5", "target_hidden_size is 128", "use_mtp_layernorm is True",
        "tensor norm.weight has shape [3]", "lacks 1 tensors: midlayer.mlp.down_proj.weight",
        "no place in this model: fc.scale", "holds 0, 1, 2 ...",
    ):  # fmt: skip
        assert part in said, part
    assert len(looked.errors) == 10


def test_frequencies_beside_the_weights_of_a_target_are_no_finding(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path)
    change(target, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    assert preflight(target, draft).passed


def test_a_head_that_lies_beside_a_tied_table_is_no_finding(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path, tie=True)
    change(target, "lm_head.weight", load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    load_target(target)
    assert preflight(target, draft).passed


def test_more_layers_than_tensors_are_one_finding_and_not_a_name_for_each(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path)
    rewrite_config(target, num_hidden_layers=5000)
    [error] = preflight(target, draft).errors
    assert "num_hidden_layers is 5000" in error.what


def test_a_convention_that_is_given_is_the_one_that_is_looked_at(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path)
    geometry = load_target(target).geometry
    looked = []
    for convention in ("input", "output"):
        told = {"capture_layers": (1, 2, 7), "capture_convention": convention}
        looked.append(preflight(target, draft, **told).decisions)  # type: ignore[arg-type]
        assert looked[-1] == load_draft(draft, geometry, **told).geometry.decisions  # type: ignore[arg-type]
    assert looked[0] != looked[1]


def test_a_tensor_without_a_place_has_the_name_that_it_has_in_its_file(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path)
    weights = load_file(draft / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, draft / "model.safetensors")
    change(draft, "model.fc.scale", torch.ones(3))
    [error] = preflight(target, draft).errors
    assert "no place in this model: model.fc.scale" in error.what


def test_a_meaning_of_norm_output_that_there_is_not_is_refused_before_any_file_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="norm_output"):
        preflight(tmp_path / "nothing", tmp_path / "nothing", norm_output="sideways")


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_side_that_is_not_there_is_a_finding(tmp_path: Path, side: str) -> None:
    pair = dict(zip(("target", "draft"), write_random_pair(tmp_path), strict=True))
    pair[side] = tmp_path / "nothing"
    looked = preflight(**pair)
    assert [error.what for error in looked.errors] == [f"{side} directory {str(pair[side])!r} does not exist"]


def test_what_loading_refuses_first_is_among_the_findings(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path)
    rewrite_config(draft, hidden_act="quick_gelu", vocab_size=640)
    with pytest.raises(CheckpointError) as caught:
        load_draft(draft, load_target(target).geometry)
    assert caught.value.what in [error.what for error in preflight(target, draft).errors]


def sparse_file(path: Path, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str] | None = None) -> int:
    """A safetensors file of zeros that takes no room on disk: a true header, and a size; how many bytes it has."""
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        n_bytes = math.prod(shape) * {"BF16": 2, "I64": 8}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + end)
    return end


LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
N_SHARDS = 30


def test_a_pair_of_70b_is_looked_at_within_a_second(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        folder.mkdir()
    (target / "config.json").write_text(json.dumps(LLAMA_70B))
    taps = {"eagle_aux_hidden_state_layer_ids": [2, 40, 77]}
    (draft / "config.json").write_text(
        json.dumps({**LLAMA_70B, **taps, "num_hidden_layers": 1, "draft_vocab_size": 32000})
    )
    geometry = read_target_geometry(Settings.read(target / "config.json"), target)
    shapes = list(target_shapes(geometry))
    weight_map, n_bytes = {}, 0
    for i in range(N_SHARDS):
        name = f"model-{i + 1:05}-of-{N_SHARDS:05}.safetensors"
        n_bytes += sparse_file(target / name, dict(shapes[i::N_SHARDS]))
        weight_map |= dict.fromkeys(dict(shapes[i::N_SHARDS]), name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    plain = DraftGeometry(
        block=geometry.block, target_hidden_size=8192, vocab_size=128256, draft_vocab_size=32000, taps=(2, 40, 77),
        has_embedding=False, has_head=True,
    )  # fmt: skip
    sparse_file(draft / "model.safetensors", {**dict(draft_shapes(plain)), "d2t": (32000,)}, {"d2t": "I64"})
    begun = time.process_time()
    looked = preflight(target, draft)
    seconds = time.process_time() - begun
    assert looked.passed, looked.lines
    assert n_bytes > 140e9
    assert seconds < 1.0


def test_of_an_eagle1_head_too_everything_is_found_at_once(tmp_path: Path) -> None:
    target, draft = write_eagle_pair(tmp_path)
    assert preflight(target, draft, method="eagle").passed
    (told,) = preflight(target, draft).errors
    assert "set method='eagle'" in str(told)
    rewrite_config(draft, vocab_size=7, num_hidden_layers=2, norm_before_residual=True, attention_swirl=0.5, bias=False)
    change(draft, "layers.0.self_attn.o_proj.weight", None)
    change(draft, "layers.0.mlp.down_proj.weight", torch.ones(3))
    looked = preflight(target, draft, method="eagle")
    parts = [
        "attention_swirl is 0.5", "vocab_size is 7", "num_hidden_layers is 2", "norm_before_residual is True",
        "fc.bias is stored", "midlayer.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight",
    ]  # fmt: skip
    assert len(looked.errors) == len(parts)
    assert all(part in str(error) for part, error in zip(parts, looked.errors, strict=True))
    with pytest.raises(CheckpointError) as first:
        load_draft(draft, load_target(target).geometry, method="eagle")
    assert str(first.value) == str(looked.errors[0])


def test_a_method_that_no_head_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method is 'ngram'"):
        preflight(*write_random_pair(tmp_path), method="ngram")
