"""Stage parity reads heads in containers too, by a reader of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_pairs import write_random_pair

from eagle3core.checkpoint import convert_draft
from eagle3core.checkpoint import draft as loading
from eagle3core.checkpoint.plan import plan_draft
from lab import pairs
from lab.errors import ExperimentError
from lab.parity import run_stage_parity
from lab.parity.head_files import read_draft_files

pytestmark = pytest.mark.reference

PROMPTS = [[5, 17, 99, 30, 41, 44, 8]]
_TRAINED = {"original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_TRAINED},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **_TRAINED},
    "linear": {"rope_type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("form", ["gguf", pytest.param("turbomind", marks=pytest.mark.slow)])
def test_every_stage_of_the_shipped_head_agrees_from_a_container(form: str, tmp_path: Path) -> None:
    shipped = pairs.shipped_pair()
    convert_draft(shipped.draft, tmp_path / form, form, target=shipped.target)
    report = run_stage_parity(shipped.target, tmp_path / form, prompts=PROMPTS, k=2, steps=1)
    assert report.passed, report.verdict


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROPES)
def test_a_scaling_in_a_gguf_file_is_read_as_it_was_meant(kind: str, tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path, vocab=64, draft_vocab=44, draft_rope={"rope_theta": 5e5, **ROPES[kind]})
    convert_draft(draft, tmp_path / "gguf", "gguf", target=target)
    report = run_stage_parity(target, tmp_path / "gguf", prompts=[[5, 17, 9, 30, 41]], k=2, steps=1)
    assert report.passed, report.verdict


def test_a_container_whose_rotation_is_misread_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_random_pair(tmp_path, hidden=32, head_dim=8, ffn=48, vocab=64, draft_vocab=44)
    convert_draft(draft, tmp_path / "gguf", "gguf", target=target)
    monkeypatch.setattr(loading, "plan_draft", lambda *given: replace(plan_draft(*given), is_interleaved=False))
    report = run_stage_parity(target, tmp_path / "gguf", prompts=[[5, 17, 9, 30, 41]], k=2, steps=1)
    assert report.first_divergent is not None
    assert report.first_divergent.stage.startswith("draft.")


def test_factors_of_a_gguf_file_that_no_key_explains_are_refused(tmp_path: Path) -> None:
    target, draft = write_random_pair(
        tmp_path,
        hidden=32,
        head_dim=8,
        ffn=48,
        vocab=64,
        draft_vocab=44,
        draft_rope={"rope_theta": 5e5, **ROPES["llama3"]},
    )
    convert_draft(draft, tmp_path / "gguf", "gguf", target=target)
    _, tensors = read_draft_files(tmp_path / "gguf")
    assert tensors["fc.weight"].dtype == torch.float32
    [path] = (tmp_path / "gguf").iterdir()
    path.write_bytes(path.read_bytes().replace(b"eagle3lab.rope.llama3.", b"somebodys.rope.llama3."))
    with pytest.raises(ExperimentError, match="rope_freqs"):
        read_draft_files(tmp_path / "gguf")
