"""Kernels of engines to come are compiled on any machine, once, and packed into a file that others read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3core.kernels import cubins
from lab.cli import main
from lab.errors import ExperimentError
from lab.options.kernels import WarmOptions
from lab.options.speed import SpeedOptions
from lab.pairs import shipped_folder, shipped_pair
from lab.probes.proofs.plans import Plans, needed_variants
from lab.probes.speed.command import SpeedPlans, scenario_of
from lab.probes.start.warm import wanted_kernels

ARCH = "sm_90a"


def names(variants: list) -> set[str]:
    """Names by digest."""
    return {cubins.cubin_name(variant, ARCH) for variant in variants}


@pytest.mark.reference
def test_kernels_of_a_geometry_are_those_that_a_timed_engine_of_it_needs() -> None:
    options = SpeedOptions(at="512x1,512x4", spec="0,3", geometry="llama-3.1-8b", tokens=16, build=Path("nowhere"))
    scenario = scenario_of(options)
    plans: Plans = SpeedPlans(geometry=scenario.geometry, scenario=scenario)
    timed = names(needed_variants(plans, ("speed",), ARCH))
    assert names(wanted_kernels(WarmOptions(geometry="llama-3.1-8b", spec="0,3", batch="1,4"), ARCH)) == timed
    assert names(wanted_kernels(WarmOptions(geometry="llama-3.1-8b", spec="0", batch="1"), ARCH)) < timed
    both = wanted_kernels(WarmOptions(geometry="llama-3.1-8b,qwen3-8b"), ARCH)
    assert timed < names(both)
    assert len(both) == len(names(both))


@pytest.mark.reference
@pytest.mark.skipif(
    not (shipped_folder() / "target" / "model.safetensors").is_file(), reason="this checkout has no shipped pair"
)
def test_kernels_of_a_pair_on_disk_follow_its_drafts() -> None:
    pair = shipped_pair()
    plain = names(wanted_kernels(WarmOptions(target=str(pair.target)), ARCH))
    drafting = names(wanted_kernels(WarmOptions(target=str(pair.target), draft=str(pair.draft)), ARCH))
    assert plain < drafting


@pytest.mark.reference
@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], "neither --geometry nor --target"),
        (["--geometry", "nano", "--target", "T"], "--geometry together with --target"),
        (["--geometry", "nano", "--draft", "D"], "--draft without --target"),
        (["--geometry", "none"], "none"),
        (["--geometry", "nano", "--archive", "cubins.tar"], "ends in .zip"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", *words]) == 2
    assert refusal in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.compiled
def test_a_machine_is_made_ready_once_and_its_archive_makes_another_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, archive, again = tmp_path / "cache", tmp_path / "cubins.zip", tmp_path / "again.zip"
    monkeypatch.setenv(cubins.CACHE_VARIABLE, str(cache))
    monkeypatch.delenv(cubins.CUBINS_VARIABLE, raising=False)
    typed = ["warm", "--geometry", "nano", "--spec", "0", "--batch", "1", "--arch", ARCH]

    def told(*more: str) -> dict:
        assert main([*typed, *more]) == 0
        return json.loads(capsys.readouterr().out)

    first = told("--archive", str(archive))
    assert first["n_compiled"] == first["n_wanted"] > 10
    assert first["archive_bytes"] == archive.stat().st_size
    assert told("--archive", str(again))["n_compiled"] == 0
    assert again.read_bytes() == archive.read_bytes()
    monkeypatch.setenv(cubins.CACHE_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setenv(cubins.CUBINS_VARIABLE, str(archive))
    assert told()["n_compiled"] == 0
    assert not (tmp_path / "none").exists()
    with pytest.raises(ExperimentError):
        WarmOptions()
