"""What `make` asks of pip before it installs."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.reference

spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
assert spec is not None
assert spec.loader is not None
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


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
    assert install.cuda_packages(pip, folder_with_torch(tmp_path, needs)) == named
