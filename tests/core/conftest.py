"""Tiny pairs on disk, written once a run of tests."""

from __future__ import annotations

import pytest
from tiny_engines import Pair, write_tiny_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two layers, six tokens, a draft that is often right by luck, and no end token."""
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))
