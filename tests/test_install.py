"""What `make` asks of pip before it installs, and what the fetching of wheels leaves alone."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

pytestmark = pytest.mark.reference


def tool(name: str) -> Any:
    """A script of `tools/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder_with_torch(folder: Path, needs: list[str]) -> list[str]:
    """pip's arguments that find one torch only: a wheel in `folder` with these requirements."""
    about = ["Metadata-Version: 2.1", "Name: torch", "Version: 99.0", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(folder / "torch-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch-99.0.dist-info/METADATA", "\n".join(about) + "\n")
        wheel.writestr("torch-99.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-99.0.dist-info/RECORD", "")
    return ["--ignore-installed", "--no-index", "--find-links", str(folder)]


@pytest.mark.parametrize(
    ("needs", "named"),
    [
        (["filelock", 'opt-einsum>=3; extra == "opt-einsum"'], []),
        (["filelock", 'nvidia-cudnn-cu13==9.1; platform_system == "Linux"'], ["nvidia-cudnn-cu13==9.1"]),
    ],
)
def test_a_torch_that_brings_cuda_is_named_before_anything_is_fetched(
    tmp_path: Path, needs: list[str], named: list[str]
) -> None:
    pip = [sys.executable, "-m", "pip"]
    assert tool("install").cuda_packages(pip, folder_with_torch(tmp_path, needs)) == named


@pytest.mark.parametrize("name", ["notes.txt", "folder.whl/inside"])
def test_a_folder_with_anything_but_wheels_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    kept = tmp_path / "mine" / name
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    (tmp_path / "mine" / "old.whl").write_text("")
    monkeypatch.setattr(sys, "argv", ["fetch_wheels.py", "--out", str(tmp_path / "mine")])
    assert tool("fetch_wheels").main() == 2
    assert "allowed: a new folder" in capsys.readouterr().err
    assert kept.read_text() == "mine"
    assert (tmp_path / "mine" / "old.whl").exists()
