"""The tree our draft grows against the one the official EAGLE-3 code grew on the same random weights."""

from __future__ import annotations

import pytest
from golden_trees import FORWARDS, Golden, Round, check_level, check_tree, golden_runner, official_tree, rounds_of

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def official() -> Golden:
    return official_tree()


@pytest.fixture(scope="module")
def rounds(official: Golden) -> list[Round]:
    return rounds_of(golden_runner(), official)


@pytest.mark.parametrize("at", [0, 1])
def test_tokens_positions_mask_and_paths_are_the_official_ones(official: Golden, rounds: list[Round], at: int) -> None:
    check_tree(official, rounds[at], at)


@pytest.mark.parametrize("level", range(1, FORWARDS + 1))
@pytest.mark.parametrize("at", [0, 1])
def test_every_level_reads_the_official_beam_and_gives_its_logits(
    official: Golden, rounds: list[Round], at: int, level: int
) -> None:
    check_level(official, rounds[at], at, level)
