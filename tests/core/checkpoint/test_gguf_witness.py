"""The `gguf` package of llama.cpp reads what is written, and what it writes is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_pairs import write_random_pair

from eagle3core.checkpoint import convert_draft, load_draft, load_target

pytestmark = [pytest.mark.reference, pytest.mark.slow]


def test_the_packages_reader_and_writer_agree_with_ours(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    target, draft = write_random_pair(tmp_path / "pair", vocab=64, draft_vocab=44, draft_rope={"rope_theta": 7e4})
    convert_draft(draft, tmp_path / "head", "gguf", target=target)
    theirs = gguf.GGUFReader(tmp_path / "head" / "eagle3.gguf")
    fields = {name: field.contents() for name, field in theirs.fields.items()}
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.extract_layers"] == [2, 4, 5]
    writer = gguf.GGUFWriter(tmp_path / "again.gguf", "eagle3")
    for name in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length",
                 "attention.head_count_kv", "attention.key_length", "vocab_size", "target_hidden_size"):  # fmt: skip
        writer.add_uint32(f"eagle3.{name}", int(fields[f"eagle3.{name}"]))
    for name in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        writer.add_float32(f"eagle3.{name}", float(fields[f"eagle3.{name}"]))
    writer.add_array("eagle3.extract_layers", [2, 4, 5])
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(5000)])
    for tensor in theirs.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "again.gguf").rename(tmp_path / "theirs" / "again.gguf")
    geometry = load_target(target).geometry
    ours, read = load_draft(draft, geometry), load_draft(tmp_path / "theirs", geometry)
    assert read.geometry == ours.geometry
    assert all(torch.equal(tensor, ours.weights[name]) for name, tensor in read.weights.items())
    assert read.draft_to_target is not None
    assert ours.draft_to_target is not None
    assert torch.equal(read.draft_to_target, ours.draft_to_target)
