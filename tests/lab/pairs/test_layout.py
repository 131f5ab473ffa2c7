"""Every draft the lab writes says how wide its target is only where the official code needs to know.

SafeAILab's loader takes the mere presence of `target_hidden_size` to say that the draft brings its own embedding
(eagle/model/cnets.py): with the key and without the tensor it drafts with a random table. Without the key it reads the
target's table, which it finds through the index of the target's weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eagle3core.checkpoint import load_draft, load_target
from lab.pairs import shipped_pair
from lab.pairs.layout import write_draft
from lab.pairs.planted import PlantedPair
from lab.pairs.planted.disk import write_pair
from lab.pairs.random_pair import make_random_pair
from lab.training import draft as drafts
from lab.training import target as targets
from lab.training.sizes import SIZES

pytestmark = pytest.mark.reference

EMBEDDING = "model.embed_tokens.weight"


def trained_pair(folder: Path) -> tuple[Path, Path]:
    """As `eagle3lab train` saves it, untrained."""
    size = SIZES["tiny"]
    model = targets.build_target(size, 0, torch.device("cpu"))
    targets.save_target(model, folder / "target")
    ids = torch.arange(0, 2 * size.draft_vocab, 2)
    drafts.save_draft(drafts.build_draft(size, model, ids, 0), size, folder / "draft")
    return folder / "target", folder / "draft"


def pair_of(name: str, folder: Path) -> tuple[Path, Path]:
    if name == "trained":
        return trained_pair(folder)
    pairs = {
        "shipped": shipped_pair,
        "planted": lambda: write_pair(folder, PlantedPair("nano", share=0.8)),
        "random": lambda: make_random_pair(folder),
    }
    pair = pairs[name]()
    return pair.target, pair.draft


def tensors_of(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    ("name", "width", "key"),
    [("shipped", 256, None), ("trained", 64, None), ("planted", 256, None), ("random", 128, 256)],
)
def test_the_targets_width_is_written_only_beside_an_own_embedding(
    tmp_path: Path, name: str, width: int, key: int | None
) -> None:
    target, draft = pair_of(name, tmp_path)
    config = json.loads((draft / "config.json").read_text())
    assert (config["hidden_size"], config.get("target_hidden_size")) == (width, key)
    assert ("target_hidden_size" in config) == ("embed_tokens.weight" in tensors_of(draft))
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors_of(target)
    assert set(index.values()) == {"model.safetensors"}
    assert EMBEDDING in index
    geometry = load_target(target).geometry
    assert load_draft(draft, geometry).geometry.target_hidden_size == geometry.block.hidden_size


def test_a_draft_without_an_embedding_of_its_other_width_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="brings an embedding where its width is another"):
        write_draft(tmp_path, {"hidden_size": 64}, {"fc.weight": torch.zeros(64, 384)}, target_hidden=128)
