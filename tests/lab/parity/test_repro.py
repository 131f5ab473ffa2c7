"""A stage that fails is written as a script with its tensors: it ends with 1 while the stage differs, then with 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from places import ROOT
from safetensors.torch import load_file
from state_dumps import Dumper, write_vllm

from lab import cli
from lab.pairs import shipped_pair
from lab.parity import repro, run_stage_parity
from lab.parity.repro import write_repros

pytestmark = pytest.mark.reference

PROMPTS = [[5, 17, 99, 230, 301, 44, 8, 412, 77], [1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_agreeing_pair(tmp_path_factory.mktemp("agreeing"))


def ran(script: Path, *words: str) -> tuple[int, str]:
    """Exit code and what was printed, errors included, by a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ["swapped_concat", pytest.param("stale_draft_kv", marks=pytest.mark.slow)])
def test_the_script_of_a_planted_bug_shows_the_same_error_and_none_once_it_is_repaired(
    tmp_path: Path, agreeing: tuple[Path, Path], fault: str
) -> None:
    report = run_stage_parity(*agreeing, prompts=PROMPTS, fault=fault)
    assert report.again is not None
    first = report.first_divergent
    [script] = write_repros(report.evidence, report.again, tmp_path)
    assert first is not None
    assert script.parent.name == f"{first.pass_name}/{first.stage}".replace("/", "-")
    code, told = ran(script)
    assert (code, f"largest error {first.max_abs:.6g}, was {first.max_abs:.6g}" in told) == (1, True), told
    code, told = ran(script, "--fault", "")
    assert code == 0, told


@pytest.mark.slow
def test_tokens_of_another_number_are_written_too(tmp_path: Path, agreeing: tuple[Path, Path]) -> None:
    report = run_stage_parity(*agreeing, prompts=PROMPTS, fault="second_best")
    assert report.again is not None
    script, *_ = write_repros(report.evidence, report.again, tmp_path)
    assert ran(script) == (1, "step0/accept.tokens: shape (1,) where (4,) is expected\n")
    assert ran(script, "--fault", "")[0] == 0


def test_nothing_is_written_of_a_run_that_passes_and_large_tensors_keep_their_worst_rows(
    tmp_path: Path, agreeing: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_stage_parity(*agreeing, prompts=PROMPTS[1:]).evidence == ()
    report = run_stage_parity(*agreeing, prompts=PROMPTS[:1], fault="swapped_gate_up")
    assert report.again is not None
    monkeypatch.setattr(repro, "MOST_BYTES", 2000)  # three rows of 64 fp64 numbers
    [script] = write_repros(report.evidence, report.again, tmp_path)
    stored = load_file(script.parent / "tensors.safetensors")
    assert stored["expected"].shape == (3, 64)
    first = report.first_divergent
    assert first is not None
    error = (stored["got"].double() - stored["expected"].double()).abs().max()
    assert float(error) == pytest.approx(first.max_abs)


def test_a_diverging_dump_is_written_and_passes_with_what_the_engine_gives(tmp_path: Path) -> None:
    tokens = [5, 170, 99, 2300, 301, 44]
    dumper = Dumper(shipped_pair().target)
    states = dumper.stacked(tokens, (2, 4)).clone()
    states[:, 1, ::7] *= 1.5
    path = write_vllm(tmp_path / "v.safetensors", tokens, states)
    words = ["inspect", "states", str(path), "--capture-layers", "2", "4", "--repro", str(tmp_path / "repro")]
    assert cli.run(words) == 1
    script = tmp_path / "repro" / "prefill-target.3.mlp" / "repro.py"
    code, told = ran(script)
    assert code == 1, told
    assert "largest error" in told
    stored = load_file(script.parent / "tensors.safetensors")
    assert torch.equal(stored["expected"], states[:, 1])
