"""Notebooks that the packaged night leaves out run in a small night on a random pair: real kernels, engine, report."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import gate_rows
import pytest
from places import ROOT
from random_pairs import write_random_pair

from lab.night.parameters import notebooks_folder
from lab.nightly import run_night
from lab.options.night import NightOptions
from lab.probes.gates.config import load_gates, packaged_gates
from lab.probes.gates.judging import gate_row, judge_mode
from lab.rows.runs import read_summary
from lab.rows.store import RowWriter, read_run

pytestmark = pytest.mark.reference

# `make lab` runs the jobs of the packaged night; this is the rest.
REST = """\
[[job]]
notebook = "00_start_here"
[[job]]
notebook = "20_fmha_sweep"
[[job]]
notebook = "21_gemm_sweep"
parameters = { measure = true, device = "cpu", top = 0, gates = false }
[[job]]
notebook = "22_kernels"
parameters = { arches = [], emulated_cases = 0, gates = false }
[[job]]
notebook = "32_trees"
parameters = { n_prompts = 2, max_new_tokens = 8, shapes = ["dynamic-12/1/4"], budgets = [6], device = "cpu" }
[[job]]
notebook = "33_doctor"
parameters = { n_prompts = 4, max_new_tokens = 12, device = "cpu", gates = false }
[[job]]
notebook = "34_draft_vocabulary"
parameters = { n_prompts = 2, n_counted = 2, max_new_tokens = 8, sizes = [2], head_sizes = [512, 1024], device = "cpu" }
[[job]]
notebook = "40_speed"
parameters = { measure = true, points = "16x1", ks = [0, 2], spec_k = 2, tokens = 24, rounds = 1, device = "cpu" }
[[job]]
notebook = "41_bench"
parameters = { measure = true, points = "16x1", ks = [0, 2], tokens = 16, rounds = 1, peers = [], device = "cpu" }
[[job]]
notebook = "42_perf_gates"
parameters = { rows = "GATES" }
[[job]]
notebook = "43_start"
parameters = { measure = true, ks = [2], context = 16, device = "cpu", max_stored_s = 300.0 }
[[job]]
notebook = "44_prefill"
[[job]]
notebook = "50_profile"
[[job]]
notebook = "90_nightly"
reads_run = true
"""
KINDS = {
    "environment",
    "kernel_proof",
    "tree_acceptance",
    "draft_lamp",
    "draft_vocabulary",
    "speed_curve",
    "sweep",
    "bench",
    "start",
    "profile",
    "gate",
}


def stored_gates(path: Path) -> Path:
    """What `eagle3lab gates micro --out` writes, of one mode."""
    config = load_gates(packaged_gates())
    rows = [row.model_copy(update={"parameters": {**row.parameters, "run_kind": "micro"}}) for row in gate_rows.rows()]
    with RowWriter(path) as writer:
        for row in [
            *rows,
            *(gate_row(g, rows[0]) for g in judge_mode(config, config.find("single32k"), "micro", rows)),
        ]:
            writer.write(row)
    return path


def run_of(folder: Path) -> Path:
    """The run folder of that night, over a random pair."""
    target, draft = write_random_pair(folder / "pair", n_layers=7, vocab=300)
    config, out = folder / "night.toml", folder / "reports" / "rest"
    config.write_text(REST.replace("GATES", str(stored_gates(folder / "gates.jsonl"))))
    code = run_night(NightOptions(config=config, target=target, draft=draft, out=out))
    summary = read_summary(out)
    assert code == 0, json.dumps([summary["sentence"], summary["jobs"]], indent=1)
    return out


def test_every_packaged_notebook_is_in_a_night() -> None:
    nights = [REST, (ROOT / "nightly.toml").read_text()]
    named = {job["notebook"] for night in nights for job in tomllib.loads(night)["job"]}
    assert named == {path.stem for path in notebooks_folder().glob("*.ipynb")}


@pytest.mark.long
@pytest.mark.slow
def test_every_notebook_ran_and_every_gate_held(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path)
    summary, rows = read_summary(run_dir), read_run(run_dir)
    assert all(job["status"] == "finished" and job["passed"] for job in summary["jobs"]), summary["jobs"]
    assert {gate["word"] for gate in summary["gates"]} == {"pass"}
    assert {row.kind for row in rows} >= KINDS
    for job in summary["jobs"]:
        assert [row for row in rows if row.job == job["id"]], job["id"]
        for words in (run_dir / "jobs" / job["id"] / "figures").glob("*.json"):
            kept: dict[str, Any] = json.loads(words.read_text())
            assert all(kept[key] for key in ("alt", "caption", "rows")), words.name
            assert words.with_suffix(".svg").exists() == kept["is_drawn"]
    drawn = {path.stem for path in (run_dir / "jobs" / "90_nightly" / "figures").glob("*.json")}
    assert drawn == {"points"}, "of what was measured before it"
    for text in [row.line() for row in rows] + [(run_dir / "index.html").read_text()]:
        assert str(tmp_path) not in text, "where the run lay is nobody's business"
