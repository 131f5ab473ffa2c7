"""What this machine lets a program take."""

from __future__ import annotations

import pytest

from eagle3core import backend
from eagle3core.backend import processes_for

pytestmark = pytest.mark.reference


def test_there_are_no_more_processes_than_jobs_processors_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "processors", lambda: 16)
    monkeypatch.setattr(backend, "available_host_bytes", lambda: 4000)
    assert [processes_for(3, 1), processes_for(100, 1), processes_for(100, 1000), processes_for(100, 9000)] == [
        3, 16, 4, 1
    ]  # fmt: skip
