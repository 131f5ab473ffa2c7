"""A head goes from any format to any other and back with the same bits, or what would be lost is named first."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
import yaml
from layout_files import Changes, read_head, write_head
from random_pairs import ROPE_LLAMA3, write_random_pair
from rings import slow_but
from safetensors.torch import load_file

from eagle3core.checkpoint import FORMATS, convert_draft, load_draft, load_target
from eagle3core.errors import CheckpointError
from eagle3core.geometry import TargetGeometry

pytestmark = pytest.mark.reference

Pair = tuple[Path, Path, TargetGeometry]
# What each variant adds to a plain head, and the formats whose readers do not obey it.
VARIANTS = {
    "plain": (lambda head: None, ()),
    "unsorted map": (lambda head: head.unsorted(), ()),
    "own embedding": (lambda head: head.own_embedding(), ()),
    "full vocabulary": (lambda head: head.full_vocabulary(), ()),
    "the target's head": (lambda head: head.full_vocabulary(own_head=False), ()),
    "a tied head": (
        lambda head: (head.own_embedding(), head.full_vocabulary(own_head=False), head.flags(tie_word_embeddings=True)),
        (),
    ),
    "neighbours rotate": (lambda head: head.flags(rope_is_neox_style=False), ()),
    "two taps": (lambda head: head.taps([3, 5], "input"), ("safeailab", "specforge")),
    "other taps": (lambda head: head.taps([0, 3, 8], "input"), ("safeailab",)),
    "normed residual": (
        lambda head: head.flags(norm_before_residual=True), ("safeailab", "specforge", "turbomind"),
    ),
    "norm over all taps": (lambda head: head.norm_over_all(), ("safeailab", "turbomind", "gguf")),
    "EAGLE 3.1": (
        lambda head: (head.norm_over_each(), head.flags(fc_norm=True, return_hidden_post_norm=True)),
        ("safeailab", "specforge", "turbomind"),
    ),
    "biases of attention": (
        lambda head: (head.flags(attention_bias=True), head.biases(*(f"midlayer.self_attn.{n}_proj" for n in "qkv"))),
        ("safeailab", "specforge", "turbomind", "gguf"),
    ),
    "bias of fc": (
        lambda head: (head.flags(bias=True), head.biases("fc")), ("safeailab", "speculators", "turbomind", "gguf"),
    ),
    "window": (
        lambda head: head.flags(layer_types=["sliding_attention"], sliding_window=9),
        ("safeailab", "specforge", "turbomind", "gguf"),
    ),
    "gelu": (lambda head: head.flags(hidden_act="gelu_pytorch_tanh"), ("turbomind", "gguf")),
    "llama3": (
        lambda head: head.flags(rope_scaling=dict(ROPE_LLAMA3, rope_theta=None), rope_theta=5e5),
        ("safeailab", "turbomind"),
    ),
    "yarn": (
        lambda head: head.flags(rope_theta=1.5e5, rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
        ("safeailab", "turbomind"),
    ),
    "dynamic": (
        lambda head: head.flags(rope_scaling={"type": "dynamic", "factor": 2.0}), ("turbomind", "gguf"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target, draft = write_random_pair(
        tmp_path_factory.mktemp("pair"), vocab=64, draft_vocab=44, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return target, draft, load_target(target).geometry


def changed(pair: Pair, variant: str, folder: Path) -> Path:
    config, weights = read_head(pair[1])
    VARIANTS[variant][0](Changes(config, weights, 32, 64))
    return write_head(folder, config, {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights.items()})


def effective(directory: Path, pair: Pair) -> tuple[object, dict[str, torch.Tensor], list[int]]:
    """Shapes without who brings the tables, the tensors with the target's where they are shared, and the ids."""
    loaded, weights = load_draft(directory, pair[2]), {}
    theirs = load_file(pair[0] / "model.safetensors")
    weights["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    if not loaded.geometry.variant.tied_head:
        weights["lm_head.weight"] = theirs["lm_head.weight"]
    weights |= loaded.weights
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    shapes = loaded.geometry
    ids = list(range(64)) if loaded.draft_to_target is None else loaded.draft_to_target.tolist()
    return (shapes.block, shapes.taps, shapes.window, _untied(shapes.variant)), weights, ids


def _untied(variant: object) -> dict[str, object]:
    return {key: value for key, value in vars(variant).items() if key != "tied_head"}


def assert_same(a: Path, b: Path, pair: Pair) -> None:
    (shapes, weights, ids), (others, values, numbers) = effective(a, pair), effective(b, pair)
    assert shapes == others
    assert ids == numbers
    assert weights.keys() == values.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor.double(), values[name].double()), name


@pytest.mark.parametrize("variant", slow_but(("plain", "other taps", "llama3"), VARIANTS))
def test_a_head_goes_through_every_two_formats_that_hold_it_with_the_same_bits(
    pair: Pair, tmp_path: Path, variant: str
) -> None:
    source, able = changed(pair, variant, tmp_path / "source"), [f for f in FORMATS if f not in VARIANTS[variant][1]]
    for form in able:
        convert_draft(source, tmp_path / form, form, target=pair[0])
        assert_same(source, tmp_path / form, pair)
    for first, second in permutations(able, 2):
        convert_draft(tmp_path / first, tmp_path / f"{first}-{second}", second, target=pair[0])
        assert_same(source, tmp_path / f"{first}-{second}", pair)


@pytest.mark.parametrize("variant", [name for name, (_, lacking) in VARIANTS.items() if lacking])
def test_what_a_format_cannot_hold_is_named_and_nothing_is_written(pair: Pair, tmp_path: Path, variant: str) -> None:
    source = changed(pair, variant, tmp_path / "source")
    for form in VARIANTS[variant][1]:
        with pytest.raises(CheckpointError, match="cannot hold") as refused:
            convert_draft(source, tmp_path / "out", form, target=pair[0])
        assert "--drop" in refused.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("form", "variant", "lost"), [
    ("gguf", "norm over all taps", ["norm_before_fc"]), ("turbomind", "EAGLE 3.1", ["fc_norm", "norm_output"]),
    ("safeailab", "other taps", ["taps"]), ("safeailab", "llama3", ["rope_scaling"]), ("gguf", "window", ["window"]),
    ("gguf", "biases of attention", ["attention_bias"]),
])  # fmt: skip
def test_what_is_dropped_on_purpose_is_gone_and_the_rest_is_kept(
    pair: Pair, tmp_path: Path, form: str, variant: str, lost: list[str]
) -> None:
    source = changed(pair, variant, tmp_path / "source")
    conversion = convert_draft(source, tmp_path / "out", form, target=pair[0], drop=lost)
    assert [line.split(":")[0] for line in conversion.said if line.startswith("dropped")] == [
        f"dropped {name}" for name in lost
    ]
    read = load_draft(tmp_path / "out", pair[2])
    assert torch.equal(read.weights["fc.weight"], load_draft(source, pair[2]).weights["fc.weight"])


def test_without_a_target_a_format_that_says_nothing_of_taps_and_tables_is_written(pair: Pair, tmp_path: Path) -> None:
    for form in ("safeailab", "specforge", "modelopt"):
        convert_draft(pair[1], tmp_path / form, form)
        assert_same(pair[1], tmp_path / form, pair)
    for form in ("speculators", "turbomind", "gguf"):
        with pytest.raises(CheckpointError) as refused:
            convert_draft(pair[1], tmp_path / form, form)
        assert "--target DIR" in refused.value.remedy


def test_a_directory_that_is_there_is_left_as_it_is(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"):
        convert_draft(pair[1], tmp_path, "gguf", target=pair[0])
    assert list(tmp_path.iterdir()) == []


def test_values_of_32_bits_go_to_turbomind_only_when_a_dtype_is_given(pair: Pair, tmp_path: Path) -> None:
    config, weights = read_head(pair[1])
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    source = write_head(tmp_path / "source", config, wide)
    with pytest.raises(CheckpointError, match="16-bit"):
        convert_draft(source, tmp_path / "out", "turbomind", target=pair[0])
    convert_draft(source, tmp_path / "out", "turbomind", target=pair[0], dtype=torch.bfloat16)
    assert_same(source, tmp_path / "out", pair)


@pytest.mark.parametrize("form", ["gguf", "turbomind"])
def test_a_cut_or_grown_container_is_refused(pair: Pair, tmp_path: Path, form: str) -> None:
    convert_draft(pair[1], tmp_path / "head", form, target=pair[0])
    for path in sorted((tmp_path / "head").iterdir()):
        data = path.read_bytes()
        for cut in (data[: len(data) // 2], b""):
            path.write_bytes(cut)
            if path.name == "draft_id_to_target_id.weight" and not cut:
                continue  # an empty map is none, which the tensors' comparison refuses below
            with pytest.raises(CheckpointError):
                load_draft(tmp_path / "head", pair[2])
        path.write_bytes(data)
    load_draft(tmp_path / "head", pair[2])


def test_quantised_tensors_and_other_architectures_of_gguf_are_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    convert_draft(pair[1], tmp_path / "head", "gguf", target=pair[0])
    path = tmp_path / "head" / "eagle3.gguf"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\0\0eagle3", b"\0\0llamas", 1))
    with pytest.raises(CheckpointError, match=r"general\.architecture"):
        load_draft(tmp_path / "head", pair[2])
    at = data.index(b"fc.weight") + len(b"fc.weight") + 4 + 16  # behind the count of dimensions and two of them
    path.write_bytes(data[:at] + (8).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match="Q8_0"):
        load_draft(tmp_path / "head", pair[2])


@pytest.mark.parametrize(("key", "value"), [
    ("eagle_ffn_thin_factor", 2), ("eagle_mode", "eaglenet"), ("hidden_units", 31), ("eagle_q_size", 5),
    ("size_per_head", 0), ("inter_size", None), ("eagle_kv_size", 12), ("draft_vocab_size", 65), ("vocab_size", True),
    ("eagle_weight_dtype", "fp8"), ("eagle_capture_layers", [9, 1, 1]), ("eagle_fc_in_dim", 97),
])  # fmt: skip
def test_settings_of_turbomind_that_contradict_are_refused_by_key(
    pair: Pair, tmp_path: Path, key: str, value: object
) -> None:
    convert_draft(pair[1], tmp_path / "head", "turbomind", target=pair[0])
    path = tmp_path / "head" / "config.yaml"
    said = yaml.safe_load(path.read_text())
    said["model_config"][key] = value
    path.write_text(yaml.safe_dump(said))
    with pytest.raises(CheckpointError) as refused:
        load_draft(tmp_path / "head", pair[2])
    assert "config.yaml" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"model_config": {"head_num": ' + "[" * 30_000, "nested more than 64 deep"),  # the scanner would take minutes
        ("model_config: &a {}\nother: *a", "an anchor, an alias or a tag in line 1"),
        ("model_config: {}\nmodel_config: {}", "gives 'model_config' twice"),
        ("model_config: {}" + " " * (64 << 10), "longer than 64 KiB"),
        ("model_config: [", "cannot be read as YAML"),
        ("model_config: 3", "no section model_config"),
    ],
)
def test_settings_of_turbomind_that_are_no_plain_yaml_are_refused(
    pair: Pair, tmp_path: Path, text: str, named: str
) -> None:
    convert_draft(pair[1], tmp_path / "head", "turbomind", target=pair[0])
    (tmp_path / "head" / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=named):
        load_draft(tmp_path / "head", pair[2])


def test_usual_taps_of_gguf_are_doubted_and_a_file_beside_another_is_refused(pair: Pair, tmp_path: Path) -> None:
    convert_draft(pair[1], tmp_path / "head", "gguf", target=pair[0])
    [taps] = [said for said in load_draft(tmp_path / "head", pair[2]).geometry.decisions if said.about == "taps"]
    assert "llama.cpp" in taps.other
    (tmp_path / "head" / "another.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 GGUF files"):
        load_draft(tmp_path / "head", pair[2])
