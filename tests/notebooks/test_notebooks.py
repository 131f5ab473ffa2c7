"""The packaged notebooks: thin, stripped, typed, and runnable by the night that ships with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.night.jobs import PAIR_PARAMETERS, expand, load_config
from lab.night.parameters import listing, notebooks_folder, read_parameters, title
from lab.night.plan import packaged_config

pytestmark = pytest.mark.reference

NOTEBOOKS = sorted(notebooks_folder().glob("*.ipynb"))


def cells_of(path: Path) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return list(content["cells"])


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_the_notebooks_of_a_night_are_all_there() -> None:
    names = {"00_environment", "10_parity_stages", "11_parity_tokens", "30_decode", "31_acceptance", "90_nightly"}
    assert names <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_holds_no_output_and_names_the_plain_kernel(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    for cell in content["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert not set(cell["metadata"]) - {"tags"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_thin_has_a_title_and_begins_and_ends_as_an_experiment(path: Path) -> None:
    cells = cells_of(path)
    code = [source_of(cell) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert len(cells) <= 12
    assert title(path)
    assert "experiment.start(globals(), notebook=" in code[1]
    assert f'notebook="{path.stem}"' in code[1]
    assert code[-1].rstrip().rstrip(";").endswith("exp.finish()")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_one_parameters_cell_explains_every_parameter_and_takes_its_place_from_the_runner(path: Path) -> None:
    specs = {spec.name: spec for spec in read_parameters(path)}
    assert (specs["run_dir"].default, specs["job"].default) == ("", "")
    assert not [spec.name for spec in specs.values() if not spec.help]
    for name in set(PAIR_PARAMETERS) & set(specs):
        assert specs[name].type == "str"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_of_a_notebook_is_given_words_and_a_table(path: Path) -> None:
    for cell in cells_of(path):
        calls = source_of(cell).count("exp.figure(")
        for word in ("alt=", "caption=", "table="):
            assert source_of(cell).count(word) >= calls, (word, source_of(cell))


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
