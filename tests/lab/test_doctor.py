"""The doctor says what is there, and for what is not: why, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_pairs import rewrite_config, write_random_pair

from lab import pairs
from lab.doctor import Check, conclusion, examine, examine_pair, exit_code, machine
from lab.errors import ExperimentError
from lab.night import notebook
from lab.night.notebook import NotebookOutcome

pytestmark = pytest.mark.reference


def test_every_part_has_a_line_and_a_missing_one_a_remedy() -> None:
    checks = examine(from_notebook=True)
    assert {"Python", "torch", "GPU", "numba-cuda", "disk", "Nsight Systems", "Nsight Compute"} == {
        c.part for c in checks
    }
    for check in checks:
        assert check.found
        assert check.ok or check.remedy
        assert check.line().startswith("ok" if check.ok else "missing")


def test_the_kernel_check_really_runs_a_notebook_in_this_interpreter() -> None:
    check = machine.kernel()
    assert check.ok, check.found
    assert "papermill ran one in this interpreter" in check.found


def test_another_interpreter_that_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(source: Path, folder: Path, parameters: dict[str, str], *, timeout_s: float) -> NotebookOutcome:
        Path(parameters["there"]).write_text("/elsewhere/python3")
        return NotebookOutcome("unusable", 1.0, error="ended without calling finish()")

    monkeypatch.setattr(notebook, "run_notebook", ran)
    check = machine.kernel()
    assert not check.ok
    assert check.found == f"papermill ran one in /elsewhere/python3, not in {sys.executable}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_reason_is_said_and_the_lab_can_still_run() -> None:
    check = machine.gpu()
    assert not check.ok
    assert not check.needed
    assert "CUDA" in check.found
    assert exit_code([check]) == 0
    assert "GPU parts will be reported as missing" in conclusion([check])


def _no_pair() -> None:
    raise ExperimentError("the shipped pair is not there", "a pair", "reinstall the package")


def test_a_missing_needed_part_makes_the_exit_code_three(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere: Callable[[], None] = _no_pair
    monkeypatch.setattr(pairs, "shipped_pair", nowhere)
    check = machine.shipped_pair()
    assert (check.ok, check.found, check.remedy) == (False, "the shipped pair is not there", "reinstall the package")
    assert exit_code([Check("a", True, "x"), check]) == 3
    assert conclusion([check]) == "`make lab` cannot run here yet: shipped pair."


def test_of_a_pair_everything_that_keeps_it_from_loading_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_random_pair(tmp_path)
    assert examine_pair(target, draft) == 0
    assert "taps: inputs of layers [2, 4, 5]" in capsys.readouterr().out
    rewrite_config(draft, hidden_act="quick_gelu", attention_swirl=2.0)
    assert examine_pair(target, draft) == 3
    told = capsys.readouterr().out
    assert "hidden_act is 'quick_gelu'" in told
    assert "attention_swirl is 2.0" in told
    assert told.endswith("The pair cannot be loaded: 2 findings.\n")
    rewrite_config(draft, hidden_act="silu", attention_swirl=None, norm_output=True)
    assert examine_pair(target, draft) == 3
    assert examine_pair(target, draft, norm_output="feedback") == 0
    assert "feedback: normed, since the setting norm_output is 'feedback'" in capsys.readouterr().out
    assert examine_pair(target, draft, method="eagle") == 3
    with pytest.raises(ExperimentError, match="--target was given without --draft"):
        examine_pair(target, None)


def test_a_tool_that_is_absent_or_broken_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, good, silent = tmp_path / "nsys", tmp_path / "ncu", tmp_path / "silent"
    broken.write_text("#!/bin/sh\nexit 3\n")
    good.write_text("#!/bin/sh\necho 'NVIDIA tool'\necho 'Version 9.9'\n")
    silent.write_text("#!/bin/sh\necho 'Version 1.0' >&2\n")
    for path in (broken, good, silent):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "failed" in machine.tool("nsys", "Nsight Systems").found
    assert machine.tool("ncu", "Nsight Compute") == Check("Nsight Compute", True, "Version 9.9")
    assert machine.tool("silent", "Silent") == Check("Silent", True, "installed")
    assert machine.tool("no-such-tool", "Nothing").found == "no `no-such-tool` on the path"
