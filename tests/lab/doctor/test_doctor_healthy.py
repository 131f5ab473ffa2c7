"""No lamp of weights, training or data is red of a pair that has nothing to mend."""

from __future__ import annotations

from pathlib import Path

import pytest
from healthy_pairs import HEALTHY, healthy_pair
from rings import exhaustive_but

from lab.doctor.draft.case import Case
from lab.doctor.draft.lamps.data import DATA
from lab.doctor.draft.lamps.weights import WEIGHTS
from lab.pairs.prompts import prompts_for

pytestmark = [pytest.mark.reference, pytest.mark.slow]
OF_TRAINING = {"training", "dead_head", "coverage"}  # what a head of random weights may well lack


@pytest.mark.parametrize("name", exhaustive_but(["shipped"], HEALTHY))
def test_no_lamp_is_red_of_a_healthy_pair(tmp_path: Path, name: str) -> None:
    pair = healthy_pair(name, tmp_path)
    prompts, _ = prompts_for(pair.target, str(pair.prompts or ""), limit=8, max_tokens=64)
    case = Case(pair.target, pair.draft, tuple(prompts), max_new_tokens=40, device="cpu")
    looked = [lamp.look(case) for lamp in (*WEIGHTS, *DATA)]
    red = {finding.lamp: finding.said for finding in looked if finding.colour == "red"}
    assert not (red.keys() - OF_TRAINING if name == "random" else red), red
