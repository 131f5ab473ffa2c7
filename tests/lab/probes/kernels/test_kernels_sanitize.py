"""`eagle3lab kernels --sanitize` is the sanitizer run of the kernels, and says what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3core.errors import BackendUnavailable
from lab import cli
from lab.errors import EXIT_COULD_NOT_RUN
from lab.probes.sanitizer import command as sanitize

pytestmark = pytest.mark.reference


def test_without_the_tool_or_a_gpu_the_command_exits_3_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        sanitize.located()
        pytest.skip("compute-sanitizer is installed here")
    except BackendUnavailable:
        assert cli.main(["kernels", "--sanitize"]) == EXIT_COULD_NOT_RUN
    words = capsys.readouterr().err
    assert "compute-sanitizer was not found" in words
    assert "do: install" in words


def test_rows_are_appended_where_the_command_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(sanitize, "run", lambda options: given.append(options.out) or 0)
    assert cli.main(["kernels", "--sanitize", "rows.jsonl"]) == 0
    assert cli.main(["kernels", "--sanitize"]) == 0
    assert given == [Path("rows.jsonl"), None]
