"""All notebooks run by hand, as JupyterLab runs them over their copies: without parameters of a night, and quietly."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT
from rings import exhaustive_but

from lab.night.copies import copy_notebooks
from lab.night.parameters import notebooks_folder

pytestmark = [pytest.mark.reference, pytest.mark.slow]

# Fewer prompts, tokens and rounds; what is asked stays the same.
LESS: dict[str, dict[str, Any]] = {
    "00_environment": {"largest_mib": 1, "repeats": 2},
    "10_parity_stages": {"n_prompts": 1, "steps": 1, "max_prompt_tokens": 24},
    "11_parity_tokens": {"n_prompts": 1, "max_new_tokens": 8, "ks": [1]},
    "22_kernels": {"arches": [], "emulated_cases": 0},
    "30_decode": {"n_prompts": 1, "rounds": 1, "warmup": 0, "max_new_tokens": 8, "ks": [3]},
    "31_acceptance": {"n_prompts": 2, "max_new_tokens": 12, "ks": [3], "n_reference_prompts": 1, "uneven_k": 0},
    "32_trees": {"n_prompts": 1, "max_new_tokens": 8, "shapes": ["dynamic-12/2/4"], "budgets": [6]},
    "33_doctor": {"n_prompts": 2, "max_new_tokens": 8, "limit_s": 10.0},
    "34_draft_vocabulary": {"n_prompts": 2, "n_counted": 2, "max_new_tokens": 8, "sizes": [64], "head_sizes": [512]},
}
# Notebooks whose figures can be explored, and those that show rows of the GPU that is committed.
EXPLORED = {"10_parity_stages", "22_kernels", "31_acceptance", "40_speed", "90_nightly"}
STORED = {"20_fmha_sweep", "21_gemm_sweep", "22_kernels", "40_speed", "41_bench", "50_profile", "90_nightly"}
NOTEBOOKS = sorted(path.stem for path in notebooks_folder().glob("*.ipynb"))
# The others run in nights of the slow ring and of `make lab`.
KEPT = sorted({"00_start_here", "50_profile"} | EXPLORED)


def state() -> str:
    """What git would see changed."""
    asked = ["git", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def executed(copy: Path) -> nbformat.NotebookNode:
    """A copy after all its cells ran, saved as JupyterLab saves it."""
    notebook = nbformat.read(copy, 4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in LESS.get(copy.stem, {}).items())
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=copy.parent)
    nbformat.write(notebook, copy)
    return notebook


def loud_outputs(notebook: nbformat.NotebookNode) -> list[str]:
    """Values that a cell echoed, and what it wrote to the error stream."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    echoed = [str(output.data)[:200] for output in outputs if output.output_type == "execute_result"]
    return echoed + [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]


def text_of(notebook: nbformat.NotebookNode) -> str:
    """All outputs as one text."""
    return json.dumps([cell.get("outputs", []) for cell in notebook.cells])


def test_what_is_told_of_notebooks_names_notebooks() -> None:
    assert set(NOTEBOOKS) >= EXPLORED | STORED | set(LESS) | set(KEPT)


@pytest.mark.parametrize("name", exhaustive_but(KEPT, NOTEBOOKS))
def test_a_notebook_runs_by_hand_quietly_and_changes_nothing_tracked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    before = state()
    copies = tmp_path / "copies"
    copy_notebooks(copies)
    notebook = executed(copies / f"{name}.ipynb")
    assert loud_outputs(notebook) == []
    told = text_of(notebook)
    assert ("Not of this machine." in told) is (name in STORED)
    assert f"results: reports/by-hand/{name}/" in told
    can_explore = "vnd.jupyter.widget-view" in told or "which is not installed" in told
    assert can_explore is (name in EXPLORED)
    assert state() == before
