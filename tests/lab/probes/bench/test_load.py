"""Memory of loading: what it takes at once is seen, and stays within 2 GB beyond the models."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.cli import run
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED
from lab.pairs.planted import PlantedPair, find_geometry
from lab.probes.bench.floors import draft_weight_bytes, weight_bytes
from lab.probes.bench.load import BETWEEN_LOOKS_S, MOST_BEYOND, Load, watched, watched_load
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")


def test_what_is_held_for_a_while_is_seen() -> None:
    def made() -> Tensor:
        passing = torch.ones(50 << 20)  # 200 MiB
        time.sleep(20 * BETWEEN_LOOKS_S)
        return passing[: 1 << 20].clone()

    kept, peak = watched(made, CPU)
    assert kept.nbytes == 4 << 20
    assert 190 << 20 <= peak < 260 << 20, "some that was held before may have been given back meanwhile"


def test_two_gigabytes_beyond_the_models_are_allowed_and_no_more() -> None:
    assert Load(10**9, 10**9 + MOST_BEYOND).holds
    assert not Load(10**9, 10**9 + MOST_BEYOND + 1).holds
    assert Load(10**9, 10**8).beyond == 0, "weights that lie in mapped files"


@pytest.mark.slow
def test_a_pair_is_loaded_as_it_is_made_and_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["planted", "--geometry", "nano-experts", "--dtype", "bfloat16", "--steps", "0", "--no-margin", "--load"]
    assert run([*words, "--out", str(out)]) == EXIT_PASSED
    assert run([*words, "--write", str(tmp_path / "pair"), "--out", str(out)]) == EXIT_PASSED
    made, read = (row for row in read_rows(out) if row.name == "load")
    made_of = find_geometry("nano-experts")
    kept = weight_bytes(made_of.target, 2) + draft_weight_bytes(made_of.draft, 2) + 4 * made_of.draft.draft_vocab_size
    assert made.values["kept_bytes"] == read.values["kept_bytes"] == kept, "and the map of the draft's vocabulary"
    assert [row.parameters["how"] for row in (made, read)] == ["made", "read"]
    monkeypatch.setattr("lab.probes.bench.load.MOST_BEYOND", -1)
    assert run(words) == EXIT_GATE_FAILED


@pytest.mark.slow
@pytest.mark.exhaustive
def test_layers_of_the_120b_are_made_in_4_bits_within_two_gigabytes_beyond_them() -> None:
    pair = PlantedPair("gpt-oss-120b, 2 layers", share=0.8, dtype=torch.bfloat16)
    with torch.no_grad():
        _, load = watched_load(pair.models, CPU)
    assert load.kept > 6e9
    assert load.holds, load.values()
