"""Pairs on disk: the shipped one is whole and as described, a wrong folder is named."""

import json
from pathlib import Path

import pytest
from random_pairs import write_random_pair

from lab.errors import ExperimentError
from lab.pairs import pair_on_disk, shipped_folder, shipped_pair

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_random_pair(tmp_path_factory.mktemp("pair"))


def test_the_shipped_pair_is_whole_and_at_most_sixteen_mebibytes() -> None:
    pair = shipped_pair()
    assert pair.prompts is not None
    assert sum(file.stat().st_size for file in shipped_folder().rglob("*") if file.is_file()) <= 16 * 2**20
    assert len(pair.prompts.read_text(encoding="utf-8").splitlines()) == 64


def test_the_shipped_target_beats_the_five_gram_and_its_card_says_what_it_was_made_of() -> None:
    card = shipped_pair().card
    losses = card["held_out_loss_nats_per_token"]
    assert losses["target"] < losses["five_gram"]
    assert card["acceptance"]["length_outside_loops"] >= 2.2
    assert {"source", "python", "sha256", "tokens"} <= card["data"].keys()
    assert 0 < card["acceptance"]["coverage"] <= 1
    assert 0 <= card["acceptance"]["looped_share"] <= 1


def test_two_folders_make_a_pair_with_what_lies_beside_them(folders: tuple[Path, Path]) -> None:
    beside = folders[0].parent
    assert pair_on_disk(*folders).prompts is None
    assert pair_on_disk(*folders).card == {}
    (beside / "prompts.jsonl").write_text('{"text": "def"}\n')
    (beside / "card.json").write_text('{"seed": 7}')
    pair = pair_on_disk(str(folders[0]), str(folders[1]))
    assert (pair.target, pair.draft, pair.prompts) == (*folders, beside / "prompts.jsonl")
    assert pair.card == {"seed": 7}


def test_a_missing_folder_an_empty_one_and_a_file_are_told_apart(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"draft folder .*nowhere does not exist"):
        pair_on_disk(folders[0], tmp_path / "nowhere")
    with pytest.raises(ExperimentError, match=r"target folder .* holds nothing"):
        pair_on_disk(tmp_path, folders[1])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ExperimentError, match=r"draft folder .* holds config\.json") as caught:
        pair_on_disk(folders[0], tmp_path)
    assert "model.safetensors" in caught.value.allowed
    with pytest.raises(ExperimentError, match=r"draft .*config\.json is a file"):
        pair_on_disk(folders[0], tmp_path / "config.json")


def test_prompts_that_are_not_there_and_a_torn_card_are_named(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path)
    with pytest.raises(ExperimentError, match=r"prompts file .*absent\.jsonl does not exist"):
        pair_on_disk(target, draft, tmp_path / "absent.jsonl")
    (tmp_path / "card.json").write_text(json.dumps({"seed": 7})[:-2])
    with pytest.raises(ExperimentError, match=r"card\.json is not a card"):
        pair_on_disk(target, draft)
