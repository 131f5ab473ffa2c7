"""The packaged notebooks: thin, stripped, typed, and runnable by the night that ships with them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.night.jobs import PAIR_PARAMETERS, PLACE_PARAMETERS, expand, load_config
from lab.night.parameters import listing, notebooks_folder, read_parameters, title
from lab.night.plan import packaged_config

pytestmark = pytest.mark.reference

# What gives nothing back.
QUIET = r"exp\.\w+|(figures\.|widgets\.)?show|print|(records|view|night|feasible_figure)\.write\w*"
NOTEBOOKS = sorted(notebooks_folder().glob("*.ipynb"))


def cells_of(path: Path) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return list(content["cells"])


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_the_notebooks_of_a_night_are_all_there() -> None:
    names = {"00_environment", "10_parity_stages", "11_parity_tokens", "30_decode", "31_acceptance", "90_nightly"}
    assert names <= {path.stem for path in NOTEBOOKS}


def test_committed_notebooks_hold_no_output_and_name_the_plain_kernel() -> None:
    wrong = []
    for path in NOTEBOOKS:
        content = json.loads(path.read_text(encoding="utf-8"))
        kernel = content["metadata"]["kernelspec"]["name"]
        wrong += [f"{path.name} names the kernel {kernel}"] * (kernel != "python3")
        for index, cell in enumerate(content["cells"]):
            kept = cell.get("outputs") or cell.get("execution_count") is not None
            wrong += [f"{path.name} cell {index} holds output"] * bool(kept)
            wrong += [f"{path.name} cell {index} holds metadata"] * bool(set(cell["metadata"]) - {"tags"})
    assert not wrong, "\n".join(wrong)


def test_notebooks_are_thin_have_titles_and_begin_and_end_as_experiments() -> None:
    wrong = [f"{path.name} {fault}" for path in NOTEBOOKS for fault in faults_of_form(path)]
    assert not wrong, "\n".join(wrong)


def faults_of_form(path: Path) -> list[str]:
    """What a notebook lacks of the form that all of them have."""
    cells = cells_of(path)
    code = [source_of(cell) for cell in cells if cell["cell_type"] == "code"]
    start = f'experiment.start(globals(), notebook="{path.stem}"'
    rules = {
        "has fewer than 5 cells of code": len(code) < 5,
        "has more than 12 cells": len(cells) > 12,
        "has no title": not title(path),
        f"does not begin with {start})": start not in "".join(code[1:2]),
        "does not end with exp.finish()": not code[-1].rstrip().rstrip(";").endswith("exp.finish()"),
    }
    return [fault for fault, is_so in rules.items() if is_so]


def test_parameters_cells_explain_every_parameter_and_take_their_place_from_the_runner() -> None:
    wrong = []
    for path in NOTEBOOKS:
        specs = {spec.name: spec for spec in read_parameters(path)}
        wrong += [f"{path.name} sets {name}" for name in PLACE_PARAMETERS if specs[name].default != ""]
        wrong += [f"{path.name} does not explain {spec.name}" for spec in specs.values() if not spec.help]
        wrong += [
            f"{path.name}: {name} is no str" for name in PAIR_PARAMETERS if name in specs and specs[name].type != "str"
        ]
    assert not wrong, "\n".join(wrong)


def test_words_and_tables_come_with_figures_and_no_notebook_draws_by_itself() -> None:
    wrong = [
        f"{path.name} cell {index}: {word}"
        for path in NOTEBOOKS
        for index, cell in enumerate(cells_of(path))
        for word in ("alt=", "caption=", "pyplot", "matplotlib")
        if source_of(cell).count(word) and cell["cell_type"] == "code"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cell_ends_with_a_value_that_would_be_echoed() -> None:
    wrong = []
    for path in NOTEBOOKS:
        for index, cell in enumerate(cells_of(path)):
            last = ast.parse(source_of(cell)).body[-1] if cell["cell_type"] == "code" else None
            is_call = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
            called = ast.unparse(last.value.func) if is_call else ""  # type: ignore[union-attr, attr-defined]
            if isinstance(last, ast.Expr) and not re.fullmatch(QUIET, called):
                wrong.append(f"{path.name} cell {index}: {ast.unparse(last)}")
    assert not wrong, "\n".join(wrong)


def test_the_packaged_night_can_be_planned_with_every_parameter_accepted() -> None:
    jobs = expand(load_config(packaged_config()), dict.fromkeys(PAIR_PARAMETERS, "somewhere"), "state")
    assert [job.id for job in jobs][:3] == ["00_environment", "10_parity_stages-float32", "10_parity_stages-bfloat16"]
    assert jobs[-1].id == "90_nightly"
    assert jobs[-1].reads_run


def test_the_listing_names_each_notebook_with_its_title_and_parameters() -> None:
    text = listing()
    for path in NOTEBOOKS:
        assert f"{path.stem}: {title(path)}" in text
    assert "  largest_mib: int = " in text
    assert "run_dir" not in text


def test_the_gates_of_speed_judge_every_point_and_not_only_those_that_are_drawn() -> None:
    last = source_of(cells_of(notebooks_folder() / "40_speed.ipynb")[-1])
    assert "write_gates(exp, speed.points if speed else []," in last
