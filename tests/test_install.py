"""What `make` asks of pip and holds its wheels to, and what the fetching of wheels leaves alone."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import tomllib
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name
from places import ROOT

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip as it comes: a machine's own constraints and folders would take part in what is found."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


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
    install = tool("install")
    assert install.cuda_packages(install.torch_to_come(pip, folder_with_torch(tmp_path, needs))) == named


def pins_of(name: str) -> dict[str, str]:
    """By pin: the rest of its line in a file of pins."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines if line and not line.startswith("#")}


def test_every_pin_has_the_hash_of_a_wheel() -> None:
    listed = pins_of("hashes.txt")
    assert list(listed) == list(pins_of("constraints.txt"))
    wrong = [pin for pin, rest in listed.items() if not re.fullmatch(r"(--hash=sha256:[0-9a-f]{64} )+# [a-z ]+", rest)]
    assert wrong == []


def test_what_the_project_and_its_extras_name_is_held_to_hashes_and_the_build_backend_is_one_of_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {"lab": project["project"]["dependencies"], "build": project["build-system"]["requires"]}
    named |= project["project"]["optional-dependencies"]
    uses = {
        canonicalize_name(pin.partition("==")[0]): rest.partition("# ")[2].split()
        for pin, rest in pins_of("hashes.txt").items()
    }
    lacking = [
        (user, need)
        for user, needs in named.items()
        for need in needs
        if not {user, "lab"} & set(uses[re.split(r"[\[>=]", need)[0]])
    ]
    assert lacking == []
    assert set(named["build"]) <= set(pins_of("hashes.txt"))


def report_of(version: str, sha256: str) -> dict[str, Any]:
    """pip's report on a torch to come, as far as it is read."""
    return {
        "metadata": {"version": version},
        "download_info": {"archive_info": {"hashes": {"sha256": sha256}} if sha256 else {}},
    }


def test_torch_alone_may_be_a_build_that_is_not_listed_and_is_then_named() -> None:
    install = tool("install")
    (pin, rest), *_ = [(pin, rest) for pin, rest in pins_of("hashes.txt").items() if pin.startswith("torch==")]
    listed = rest.split()[0]

    def of_torch(torch: dict[str, Any] | None) -> tuple[list[str], str]:
        pins, other_build = install.hashed_pins({"lab"}, torch)
        return [line for line in pins if line.startswith("torch==")], other_build

    assert of_torch(report_of(pin[7:], listed[14:])) == ([f"{pin} {listed}"], "")
    other = "0" * 64
    assert of_torch(report_of("9+cpu", other)) == ([f"torch==9+cpu --hash=sha256:{other}"], "9+cpu")
    assert of_torch(report_of("9+cpu", "")) == ([], "9+cpu")
    assert of_torch(None) == ([], "")


def test_only_what_was_asked_for_is_fetched() -> None:
    names = [
        {line.partition("==")[0] for line in tool("install").hashed_pins(users, None)[0]}
        for users in ({"lab", "build"}, {"lab", "build", "dev"})
    ]
    assert {"numpy", "hatchling"} <= names[0]
    assert not {"pytest", "jupyterlab"} & names[0]
    assert names[0] < names[1]
    assert "pytest" in names[1]


def test_a_wheel_of_another_hash_ends_the_installation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = [*folder_with_torch(tmp_path, []), "--target", str(tmp_path / "there"), "--quiet"]
    pip = [sys.executable, "-m", "pip"]
    install = tool("install")
    assert install.install_pins(pip, where, [f"torch==99.0 --hash=sha256:{'0' * 64}"]) != 0
    assert "hashes.txt" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()
    found = hashlib.sha256((tmp_path / "torch-99.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert install.install_pins(pip, where, [f"torch==99.0 --hash=sha256:{found}"]) == 0
    assert (tmp_path / "there" / "torch-99.0.dist-info").is_dir()


def test_an_installation_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install = tool("install")
    said = "".join(f"Collecting part-{i}==1.0 (from -r pins.txt (line {i}))\n  Downloading it\n" for i in range(60))
    (tmp_path / "said.txt").write_text(f"{said}Installing collected packages: part-0\nSuccessfully installed\n")
    pip = [sys.executable, "-c", f"import sys; print(open({str(tmp_path / 'said.txt')!r}).read()); sys.exit(3)"]
    assert install.told_install(pip, 60) == 3
    assert capsys.readouterr().out.splitlines() == [
        "  25 of 60 wheels: part-24==1.0", "  50 of 60 wheels: part-49==1.0", "  all fetched; unpacking",
    ]  # fmt: skip


@pytest.mark.parametrize(("hashes", "status"), [("where-listed", 0), ("require", 3)])
def test_a_machine_that_is_not_covered_is_said_and_refused_where_hashes_are_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hashes: str, status: int
) -> None:
    install = tool("install")
    monkeypatch.setattr(install.platform, "machine", lambda: "aarch64")
    assert install.install_hashed(sys.executable, Namespace(hashes=hashes), {"lab"}, None) == (status, [])
    told = capsys.readouterr()
    assert "aarch64" in told.out + told.err


def test_an_unlisted_torch_is_refused_where_hashes_are_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install = tool("install")
    monkeypatch.setattr(install, "not_covered", lambda python: "")
    torch = report_of("9+cpu", "0" * 64)
    assert install.install_hashed(sys.executable, Namespace(hashes="require"), {"lab"}, torch) == (3, [])
    assert "allowed: with --hashes require" in capsys.readouterr().err


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
