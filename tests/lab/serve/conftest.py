"""The lettered pair, written once a run of tests."""

from __future__ import annotations

import pytest
from lettered import lettered_pair
from tiny_engines import Pair


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair over sixteen tokens, each a letter."""
    return lettered_pair(tmp_path_factory.mktemp("served_letters"))
