"""Damaged and hostile checkpoints: each kind is refused in three parts, by the reader that meets it first."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_pairs import rewrite_config, write_random_pair
from safetensors.torch import load_file, save_file

from eagle3core.checkpoint import load_draft, load_target
from eagle3core.errors import CheckpointError, readable, shown

pytestmark = pytest.mark.reference

WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
Header = dict[str, Any]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A small pair to be damaged."""
    return write_random_pair(
        tmp_path, n_layers=3, taps=(0, 1, 2), hidden=32, heads=4, head_dim=8, vocab=64, draft_vocab=32
    )


def refusal(load: Callable[[], object]) -> CheckpointError:
    """How a load is refused; in three parts, readable, and of a bearable length."""
    with pytest.raises(CheckpointError) as caught:
        load()
    error = caught.value
    assert all((error.what, error.allowed, error.remedy))
    assert all(part.isprintable() and len(part) < 2500 for part in (error.what, error.allowed, error.remedy))
    return error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than 64 deep"),
        ('{"a":' * 50_000, "cannot be read as JSON"),
        ('{"hidden_size": ' + "9" * 400 + "}", "an integer of 400 digits"),
        ('{"a": 1, "a": 2}', "the name 'a' stands twice"),
        ('{"a": "' + " " * (32 << 20) + '"}', "longer than 32 MiB"),
        ('{"a": [' + "[]," * 500_000 + "1]}", "holds about 1000003 values, which take up to 76 MiB"),
        ("{" + ",".join(f'"{i:x}":1' for i in range(300_000)) + "}", "take up to 96 MiB"),
        ("[1]", "holds a list"),
        ("", "cannot be read as JSON"),
    ],
)
def test_stored_json_has_limits(pair: tuple[Path, Path], text: str, named: str) -> None:
    (pair[0] / "config.json").write_text(text)
    assert named in refusal(lambda: load_target(pair[0])).what


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 2**31}, {"num_hidden_layers": 10**30}, {"rms_norm_eps": 10**39}, {"rope_theta": 1e308},
        {"eos_token_id": -(2**40)}, {"eos_token_id": ["\ud800"]}, {"hidden_act": "a" * 5000}, {"model_type": [[]] * 99},
    ],
)  # fmt: skip
def test_a_value_beyond_any_use_is_named_by_its_key(pair: tuple[Path, Path], change: dict[str, Any]) -> None:
    rewrite_config(pair[0], **change)
    assert next(iter(change)) in refusal(lambda: load_target(pair[0])).what


def rewrite_header(path: Path, change: Callable[[Header], object], head: bytes | None = None) -> None:
    """A safetensors file with another header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    head = head or json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data_offsets": ["0", "128"]}, "has data_offsets"),
        ({"data_offsets": [-8, 120]}, "has data_offsets"),
        ({"data_offsets": [128, 0]}, "has data_offsets"),
        ({"data_offsets": [0, 2**64]}, "has 18446744073709551616 bytes"),
        ({"shape": [2**62, 4]}, "has 128 bytes"),
        ({"shape": [True]}, "has shape"),
        ({"shape": [1] * 70}, "has shape"),
        ({"dtype": "F33"}, "has dtype"),
        ({"dtype": None}, "has dtype"),
    ],
)
def test_a_header_entry_that_does_not_describe_its_bytes_is_refused(
    pair: tuple[Path, Path], change: Header, named: str
) -> None:
    rewrite_header(pair[0] / WEIGHTS, lambda header: header["model.norm.weight"].update(change))
    error = refusal(lambda: load_target(pair[0]))
    assert "model.norm.weight" in error.what
    assert named in error.what


def test_tensors_that_overlap_or_leave_gaps_and_names_twice_are_refused(pair: tuple[Path, Path]) -> None:
    path, whole = pair[0] / WEIGHTS, (pair[0] / WEIGHTS).read_bytes()
    rewrite_header(path, lambda header: header.update(copy=header["model.norm.weight"]))
    assert "overlaps another" in refusal(lambda: load_target(pair[0])).what
    path.write_bytes(whole)
    rewrite_header(path, lambda header: header.pop("model.embed_tokens.weight"))
    assert "leaves a gap" in refusal(lambda: load_target(pair[0])).what
    rewrite_header(path, lambda header: None, b'{"a": {}, "a": {}}')
    assert "stands twice" in refusal(lambda: load_target(pair[0])).what


@pytest.mark.parametrize(
    "shard",
    [
        "../target/model.safetensors",
        "/etc/passwd",
        "..",
        "",
        "config.json",
        "a/b.bin",
        "..\\b.bin",
        "\x00.bin",
        "a" * 5000,
        "a" * 300 + ".bin",
        3,
    ],
)
def test_an_index_entry_leads_to_a_file_beside_it_and_nowhere_else(pair: tuple[Path, Path], shard: Any) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (pair[0] / INDEX).write_text(json.dumps(index))
    assert "model.norm.weight" in refusal(lambda: load_target(pair[0])).what


def in_a_shard(directory: Path, *, unnamed: str = "", keeps_single: bool = False) -> None:
    """The directory's weights in a shard with an index, which does not name the tensor `unnamed`."""
    weights = load_file(directory / WEIGHTS)
    save_file(weights, directory / "model-00001-of-00001.safetensors")
    named = {name: "model-00001-of-00001.safetensors" for name in weights if name != unnamed}
    (directory / INDEX).write_text(json.dumps({"weight_map": named}))
    if not keeps_single:
        (directory / WEIGHTS).unlink()


def test_a_tensor_that_an_index_leaves_out_is_refused(pair: tuple[Path, Path]) -> None:
    target = load_target(pair[0]).geometry
    in_a_shard(pair[1], unnamed="t2d")
    error = refusal(lambda: load_draft(pair[1], target))
    assert "1 tensors that model.safetensors.index.json does not name, first t2d" in error.what
    in_a_shard(pair[0])
    assert load_target(pair[0]).geometry == target


@pytest.mark.parametrize("other", ["model-00000.safetensors", "model-00002.safetensors"])
def test_of_a_tensor_in_two_shards_the_one_that_the_index_names_counts_in_values_and_shape(
    pair: tuple[Path, Path], other: str
) -> None:
    right, named = load_target(pair[0]).weights["model.norm.weight"], "model-00001.safetensors"
    weights = load_file(pair[0] / WEIGHTS)
    table = weights.pop("model.embed_tokens.weight")
    index = {**dict.fromkeys(weights, named), "model.embed_tokens.weight": other}
    (pair[0] / INDEX).write_text(json.dumps({"weight_map": index}))
    (pair[0] / WEIGHTS).unlink()
    good, stale = right.clone(), torch.zeros(3)
    for in_named, elsewhere in ((good, stale), (stale, good)):
        save_file({**weights, "model.norm.weight": in_named}, pair[0] / named)
        save_file({"model.embed_tokens.weight": table, "model.norm.weight": elsewhere}, pair[0] / other)
        if in_named is good:
            assert torch.equal(load_target(pair[0]).weights["model.norm.weight"], right)
    assert "tensor model.norm.weight has shape [3]" in refusal(lambda: load_target(pair[0])).what


def test_of_two_sets_of_weights_safetensors_count_and_two_of_them_are_refused(pair: tuple[Path, Path]) -> None:
    right = load_target(pair[0])
    shard = "pytorch_model-00001-of-00001.bin"
    torch.save({name: 2 * tensor for name, tensor in load_file(pair[0] / WEIGHTS).items()}, pair[0] / shard)
    weight_map = dict.fromkeys(load_file(pair[0] / WEIGHTS), shard)
    (pair[0] / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_target(pair[0]).weights["model.norm.weight"], right.weights["model.norm.weight"])
    in_a_shard(pair[0], keeps_single=True)
    assert "two sets of weights" in refusal(lambda: load_target(pair[0])).what


def pickled(directory: Path, **changes: Any) -> Path:
    """A draft's weights as a pickle, with changes."""
    torch.save({**load_file(directory / WEIGHTS), **changes}, directory / PICKLE)
    (directory / WEIGHTS).unlink()
    return directory / PICKLE


class Touches:
    """A pickle that makes a file when it is run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


class Takes:
    """A pickle of something that torch allows, of any size."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return bytearray, (8 << 30,)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.zeros(32, device="meta"), "names"),
        (torch.zeros(32).to_sparse(), "names"),
        (torch.zeros(1).expand(2**31, 2**31), "over 4 bytes"),
        (Takes(), "names"),
        ([1.0] * 32, "holds no mapping of names to tensors"),
    ],
)
def test_a_pickle_of_anything_but_plain_tensors_is_refused(pair: tuple[Path, Path], value: Any, named: str) -> None:
    target = load_target(pair[0]).geometry
    pickled(pair[1], **{"norm.weight": value})
    assert named in refusal(lambda: load_draft(pair[1], target)).what


def test_a_pickle_of_code_or_with_names_that_are_no_texts_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, weights = load_target(pair[0]).geometry, load_file(pair[1] / WEIGHTS)
    path = pickled(pair[1], **{"norm.weight": Touches(tmp_path / "canary")})
    refusal(lambda: load_draft(pair[1], target))
    assert not (tmp_path / "canary").exists()
    torch.save({**weights, 3: weights["d2t"]}, path)
    assert "a tensor named 3" in refusal(lambda: load_draft(pair[1], target)).what
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    assert "not a zip file" in refusal(lambda: load_draft(pair[1], target)).what


def test_parameters_in_a_pickle_are_read_as_tensors(pair: tuple[Path, Path]) -> None:
    target, norm = load_target(pair[0]).geometry, load_file(pair[1] / WEIGHTS)["norm.weight"]
    pickled(pair[1], **{"norm.weight": torch.nn.Parameter(norm)})
    assert not load_draft(pair[1], target).weights["norm.weight"].requires_grad


@pytest.mark.parametrize("damage", ["a bit", "packed", "twice"])
def test_a_pickle_whose_archive_is_damaged_is_refused(
    pair: tuple[Path, Path], damage: str, recwarn: pytest.WarningsRecorder
) -> None:
    target, path = load_target(pair[0]).geometry, pickled(pair[1])
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    if damage == "a bit":
        data = bytearray(path.read_bytes())
        data[data.index(entries[largest.filename][:64])] ^= 1
        path.write_bytes(data)
    elif damage == "packed":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
    else:
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(largest.filename, b"")
    named = {"a bit": "Bad CRC-32", "packed": "are packed", "twice": "names"}[damage]
    assert named in refusal(lambda: load_draft(pair[1], target)).what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.complex64, torch.uint64])
@pytest.mark.parametrize("shape", [(32,), (32, 1), (), (0,), (64,)])
def test_a_vocabulary_map_of_another_shape_or_type_is_refused(
    pair: tuple[Path, Path], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    target, weights = load_target(pair[0]).geometry, load_file(pair[1] / WEIGHTS)
    save_file({**weights, "d2t": torch.ones(shape, dtype=dtype)}, pair[1] / WEIGHTS)
    assert "d2t has shape" in refusal(lambda: load_draft(pair[1], target)).what


def test_a_map_whose_offsets_overflow_is_refused(pair: tuple[Path, Path]) -> None:
    target, weights = load_target(pair[0]).geometry, load_file(pair[1] / WEIGHTS)
    for offset in (2**63 - 1, -(2**63)):
        save_file({**weights, "d2t": torch.full((32,), offset)}, pair[1] / WEIGHTS)
        assert "outside the target's vocabulary" in refusal(lambda: load_draft(pair[1], target)).what


@pytest.mark.parametrize("name", ["a" * 5000, "\ud800", "\x1b[2J", "a\nallowed: b", "\x00"])
def test_a_name_of_any_letters_is_shown_readably(pair: tuple[Path, Path], name: str) -> None:
    rewrite_header(
        pair[0] / WEIGHTS, lambda header: header.update({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    )
    refusal(lambda: load_target(pair[0]))


def test_what_an_error_shows_is_cut_and_escaped() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert readable("plain é") == "plain é"
    assert readable("\x1b\n\ud800") == "\\x1b\\n\\ud800"
    assert len(readable("a" * 10**6)) < 2000
    assert [shown(value) for value in (deep, 10**5000)] == [
        "a list that is too large to be shown",
        "a int that is too large to be shown",
    ]
