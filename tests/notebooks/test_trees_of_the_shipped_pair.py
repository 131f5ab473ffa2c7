"""The notebook of draft trees on the pair that ships: every shape side by side, on the page and in rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3core.trees import read_choices
from lab.nightly import run_one
from lab.options.night import RunOptions
from lab.rows.runs import read_summary
from lab.rows.store import read_run

pytestmark = pytest.mark.reference

SETTINGS = ("n_prompts=2", "max_new_tokens=16", "device=cpu")
SHAPES = ["plain", "chain-3", "chain-5", "mc_sim_7b_63", "dynamic-60/7/10", "best-16", "best-32", "best-60"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_shape_is_measured_beside_the_others_and_changes_no_token(tmp_path: Path) -> None:
    out = tmp_path / "reports" / "trees"
    assert run_one(RunOptions(notebook="32_trees", settings=SETTINGS, out=out)) == 0
    rows = [row for row in read_run(out) if row.kind == "tree_acceptance"]
    assert [(row.name, row.status) for row in rows] == [(name, "measured") for name in SHAPES]
    assert [row.values["n_nodes"] for row in rows] == [1, 4, 6, 64, 60, 16, 32, 60]
    assert {row.values["n_different_tokens"] for row in rows} == {0}
    for row in rows[3:]:
        first, length = row.number("first_chain_length"), row.number("acceptance_length")
        assert first is not None
        assert length is not None
        assert first <= length
    assert [gate["word"] for gate in read_summary(out)["gates"]] == ["pass", "pass"]
    job = out / "jobs" / "32_trees"
    for n_nodes in (16, 32, 60):
        tree = read_choices(job / "choices" / f"best-{n_nodes}.json")
        assert tree is not None
        assert tree.n_nodes == n_nodes
    page = (out / "index.html").read_text(encoding="utf-8")
    assert all(f'data-name="{name}"' in page for name in ("tree-lengths", "tree-budgets", "tree-cells", "best-tree"))
    kept = json.loads((job / "figures" / "best-tree.json").read_text())
    assert kept["steps"][-1].startswith("60 nodes: ")
    assert page.count('type="radio"') == len(kept["steps"])
