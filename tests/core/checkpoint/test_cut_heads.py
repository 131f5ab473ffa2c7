"""A head cut to fewer tokens keeps their rows bit for bit, in every format and of every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafted_logits import drafted
from layout_files import Changes, read_head, write_head
from random_pairs import write_random_pair
from rings import slow_but
from safetensors.torch import load_file

from eagle3core.checkpoint import FORMATS, convert_draft, load_draft, load_target
from eagle3core.errors import CheckpointError

pytestmark = pytest.mark.reference

SOURCES = {
    "plain": lambda head: None,
    "unsorted map": lambda head: head.unsorted(),
    "full vocabulary": lambda head: head.full_vocabulary(),
    "the target's head": lambda head: head.full_vocabulary(own_head=False),
    "a tied head": lambda head: (
        head.own_embedding(), head.full_vocabulary(own_head=False), head.flags(tie_word_embeddings=True),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_random_pair(
        tmp_path_factory.mktemp("pair"), vocab=64, draft_vocab=44, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48,
        dtype=torch.bfloat16,
    )  # fmt: skip


def source(pair: tuple[Path, Path], kind: str, folder: Path) -> Path:
    config, weights = read_head(pair[1])
    SOURCES[kind](Changes(config, weights, 32, 64))
    return write_head(folder, config, {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights.items()})


def rows_by_id(directory: Path, target: Path) -> dict[int, torch.Tensor]:
    """Rows of the head by the target id that each stands for."""
    draft, theirs = load_draft(directory, load_target(target).geometry), load_file(target / "model.safetensors")
    tied = draft.weights.get("embed_tokens.weight") if draft.geometry.variant.tied_head else None
    table = draft.weights.get("lm_head.weight", theirs["lm_head.weight"] if tied is None else tied)
    ids = range(len(table)) if draft.draft_to_target is None else draft.draft_to_target.tolist()
    return dict(zip(ids, table, strict=True))


@pytest.mark.parametrize("kind", slow_but(("plain", "the target's head"), SOURCES))
def test_every_format_holds_the_kept_rows_and_no_others(pair: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    directory = source(pair, kind, tmp_path / "source")
    whole = rows_by_id(directory, pair[0])
    kept = sorted(whole)[3:30]
    for form in FORMATS:
        convert_draft(directory, tmp_path / form, form, target=pair[0], kept=kept[::-1])
        rows = rows_by_id(tmp_path / form, pair[0])
        assert list(rows) == kept
        assert all(torch.equal(rows[i], whole[i]) for i in kept)


def test_a_cut_head_can_be_cut_again_and_a_whole_one_stays_what_it_was(pair: tuple[Path, Path], tmp_path: Path) -> None:
    whole = rows_by_id(pair[1], pair[0])
    convert_draft(pair[1], tmp_path / "all", "specforge", target=pair[0], kept=list(whole))
    convert_draft(tmp_path / "all", tmp_path / "half", "modelopt", target=pair[0], kept=list(whole)[:22])
    convert_draft(tmp_path / "half", tmp_path / "few", "specforge", target=pair[0], kept=list(whole)[5:12])
    assert list(rows_by_id(tmp_path / "all", pair[0])) == sorted(whole)
    assert list(rows_by_id(tmp_path / "few", pair[0])) == sorted(whole)[5:12]
    full = source(pair, "full vocabulary", tmp_path / "full")
    convert_draft(full, tmp_path / "as full", "specforge", target=pair[0], kept=range(64))
    assert load_draft(tmp_path / "as full", load_target(pair[0]).geometry).draft_to_target is None


def test_logits_at_the_kept_ids_are_those_of_the_whole_head_to_the_bit(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path / "pair", draft_vocab=None)
    kept = list(range(7, 512, 3))
    convert_draft(draft, tmp_path / "cut", "specforge", target=target, kept=kept)
    prompt = list(range(40, 52))
    sequence, whole, _ = drafted(target, draft, prompt, 1)
    same, cut, proposed = drafted(target, tmp_path / "cut", prompt, 1)
    assert same == sequence
    assert torch.equal(cut[:, : len(kept)], whole[:, kept])
    assert proposed == [kept[int(whole[0, kept].argmax())]]  # target ids, from the cut head's own argmax


@pytest.mark.parametrize(
    ("kept", "what"),
    [([], "no id is kept"), ([5, 5], "kept twice"), ([5, 900], "1 kept ids are none of the draft's own")],
)
def test_ids_that_a_head_does_not_have_are_refused_and_nothing_is_written(
    pair: tuple[Path, Path], tmp_path: Path, kept: list[int], what: str
) -> None:
    full = source(pair, "full vocabulary", tmp_path / "full")
    with pytest.raises(CheckpointError) as refusal:
        convert_draft(full, tmp_path / "out", "specforge", target=pair[0], kept=kept)
    assert what in refusal.value.what
    assert "64 that the draft chooses among" in refusal.value.allowed
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_the_targets_own_needs_the_target_to_be_cut(pair: tuple[Path, Path], tmp_path: Path) -> None:
    shared = source(pair, "the target's head", tmp_path / "shared")
    with pytest.raises(CheckpointError) as refusal:
        convert_draft(shared, tmp_path / "out", "specforge", kept=[1, 2])
    assert "--target" in refusal.value.remedy
