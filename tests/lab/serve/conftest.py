"""The lettered pair, written once a run of tests, and what its prompts give alone."""

from __future__ import annotations

import pytest
from lettered import lettered_pair, tokens_alone
from tiny_engines import Pair


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair over sixteen tokens, each a letter."""
    return lettered_pair(tmp_path_factory.mktemp("served_letters"))


@pytest.fixture(scope="session")
def alone(letters: Pair) -> list[list[int]]:
    """What each of `lettered_prompts` gives by itself, without drafts."""
    return tokens_alone(letters)
