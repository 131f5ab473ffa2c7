"""JupyterLab works on copies: what it writes never reaches a notebook that is committed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from places import ROOT

from lab import cli

pytestmark = pytest.mark.reference


def test_notebooks_are_copied_once_and_a_copy_with_work_in_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert cli.main(["notebooks", "--copy", str(folder)]) == 0
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(path.name for path in folder.iterdir()) == names
    mine = folder / names[0]
    mine.write_text("my work")
    os.utime(mine, (1, 1))
    (folder / names[1]).unlink()
    capsys.readouterr()
    assert cli.main(["notebooks", "--copy", str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert mine.read_text() == "my work"
    assert "kept, though its source is newer" in said[0]
    assert said[1].endswith("copied")
    assert all(line.endswith("kept") for line in said[2:])


def test_make_jupyter_opens_a_folder_that_git_ignores_and_hands_arguments_on() -> None:
    made = subprocess.run(
        ["make", "-n", "-o", "install", "jupyter", "JUPYTER_ARGS=--allow-root"], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    [opened] = re.findall(r"jupyter lab --allow-root (\S+)/00_start_here\.ipynb", made.stdout)
    assert f"notebooks --copy {opened}" in made.stdout
    ignored = subprocess.run(["git", "check-ignore", "-q", f"{opened}/40_speed.ipynb"], cwd=ROOT, check=False)
    assert ignored.returncode == 0, f"{opened} is tracked"
