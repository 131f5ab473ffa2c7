"""Parameters are checked before anything starts; an experiment's rows, gates and figures land where they belong."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from small_notebooks import write_notebook

from lab.errors import ExperimentError
from lab.figures import Drawing
from lab.night import experiment
from lab.night.experiment import Experiment
from lab.night.parameters import ParameterSpec, check_parameters, parse_value, read_parameters
from lab.night.progress import NightProgress
from lab.rows import environment
from lab.rows.environment import Environment
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference

TYPED = """\
batch: int = 1  # sequences
scale: float = 0.5
dtype: str = "float32"  # float32 or bfloat16
loud: bool = False
depths: list[int] = [1, 2, 3]
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_notebook(tmp_path / "small.ipynb", parameters=TYPED)


def test_a_parameter_is_read_with_its_type_default_and_comment(small: Path) -> None:
    specs = {spec.name: spec for spec in read_parameters(small)}
    assert specs["batch"] == ParameterSpec("batch", "int", 1, "sequences")
    assert specs["depths"] == ParameterSpec("depths", "list", [1, 2, 3], "")
    assert list(specs) == ["run_dir", "job", "batch", "scale", "dtype", "loud", "depths"]


def test_an_unknown_parameter_is_refused_with_the_closest_name(small: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        check_parameters(read_parameters(small), {"bacth": 2})
    assert caught.value.what == "unknown parameter 'bacth' (did you mean 'batch'?)"
    assert "batch: int" in caught.value.allowed
    assert "nothing was started" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("batch", "2", "str"), ("batch", True, "bool"), ("batch", 2.0, "float"), ("dtype", 1, "int")],
)
def test_a_mistyped_parameter_is_refused_with_its_value_and_the_right_type(
    small: Path, name: str, value: object, kind: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        check_parameters(read_parameters(small), {name: value})
    assert caught.value.what == f"parameter {name!r} is {value!r}, a {kind}"
    assert caught.value.allowed.startswith("int (sequences)" if name == "batch" else "str (float32 or bfloat16)")


def test_an_int_becomes_a_float_where_one_is_declared_and_defaults_fill_the_rest(small: Path) -> None:
    resolved = check_parameters(read_parameters(small), {"scale": 2})
    assert resolved["scale"] == 2.0
    assert isinstance(resolved["scale"], float)
    assert resolved["batch"] == 1


@pytest.mark.parametrize(
    "line",
    ["n: int | None = None", "n = 2 * 3", "a = b = 1", "n: int", "n: int = 'x'", "print(1)", "x: dict = {[1]: 2}"],
)
def test_a_parameter_line_that_is_not_one_plain_literal_is_refused(tmp_path: Path, line: str) -> None:
    path = write_notebook(tmp_path / "odd.ipynb", parameters=line)
    with pytest.raises(ExperimentError, match=r"odd.ipynb: the parameter line"):
        read_parameters(path)


@pytest.mark.parametrize("line", ["%matplotlib inline", "depths: list = [1, 2", "x: str = 'a\0b'"])
def test_a_parameters_cell_that_is_not_python_is_refused(tmp_path: Path, line: str) -> None:
    path = write_notebook(tmp_path / "odd.ipynb", parameters=line)
    with pytest.raises(ExperimentError, match=r"odd.ipynb: the cell tagged 'parameters' is not Python"):
        read_parameters(path)


def test_words_in_brackets_are_shown_as_they_are() -> None:
    written = io.StringIO()
    with NightProgress(["j"], {}, Console(file=written, force_terminal=True, width=100)) as progress:
        progress.event("j", {"event": "say", "text": "read [/tmp/x]"})
    assert "read [/tmp/x]" in written.getvalue()


def test_the_time_left_is_of_the_jobs_that_are_known_and_counts_the_others() -> None:
    written = io.StringIO()
    with NightProgress(["a", "b", "c"], {"a": 60.0, "b": 70.0}, Console(file=written, width=100)) as progress:
        for job in "abc":
            progress.began(job)
            progress.ended(job, "finished", 1.0)
    starts = [line.split(" ", 1)[1] for line in written.getvalue().splitlines() if "starts" in line]
    assert starts == [
        "[1/3] a starts, about 2 min 10 s and 1 job not timed before left",
        "[2/3] b starts, about 1 min 10 s and 1 job not timed before left",
        "[3/3] c starts",
    ]


def test_a_notebook_without_exactly_one_parameters_cell_is_refused(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "none.ipynb")
    path.write_text(path.read_text().replace('"tags": ["parameters"]', '"tags": []'))
    with pytest.raises(ExperimentError, match="0 cells tagged 'parameters'"):
        read_parameters(path)


def test_command_line_text_becomes_a_value_of_the_declared_type(small: Path) -> None:
    specs = {spec.name: spec for spec in read_parameters(small)}
    texts = {"batch": "4", "scale": "1e-3", "dtype": "4", "loud": "True", "depths": "[2, 4]"}
    parsed = {name: parse_value(specs[name], text) for name, text in texts.items()}
    assert parsed == {"batch": 4, "scale": 1e-3, "dtype": "4", "loud": True, "depths": [2, 4]}
    with pytest.raises(ExperimentError, match="parameter 'batch' is 'many', a str"):
        parse_value(specs["batch"], "many")


@pytest.fixture(scope="module")
def machine() -> Environment:
    return environment.collect()


@pytest.fixture
def exp(tmp_path: Path, machine: Environment, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    run = tmp_path / "run"
    run.mkdir()
    (run / "environment.json").write_text(machine.model_dump_json())
    monkeypatch.setenv(experiment.SOURCE_VARIABLE, str(write_notebook(tmp_path / "small.ipynb", parameters=TYPED)))
    return experiment.start({"run_dir": str(run), "job": "small-1", "batch": 3, "other": 1}, notebook="small")


def test_start_takes_only_declared_names_and_prints_what_it_resolved(
    exp: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vars(exp.parameters) == {
        "batch": 3,
        "scale": 0.5,
        "dtype": "float32",
        "loud": False,
        "depths": [1, 2, 3],
    }
    exp.print_start([ParameterSpec("batch", "int", 1, "sequences")])
    assert "batch = 3  # sequences" in capsys.readouterr().out


def test_a_row_carries_run_job_and_machine_and_no_absolute_path(exp: Experiment, machine: Environment) -> None:
    exp.write("small", "a", {"np": np.float32(0.5), "torch": torch.tensor([1, 2]), "n": 1}, dtype="float32")
    (row,) = read_rows(exp.out / "rows.jsonl")
    assert (row.run, row.job, row.notebook, row.environment) == ("run", "small-1", "small", machine.fingerprint)
    assert row.values == {"np": 0.5, "torch": [1, 2], "n": 1}
    assert row.parameters == {"dtype": "float32"}
    assert str(exp.out.parent.parent.parent) not in row.line()


def test_a_value_json_has_no_word_for_is_refused_by_name(exp: Experiment) -> None:
    with pytest.raises(ExperimentError, match="value 'path' is a PosixPath"):
        exp.write("small", "a", {"path": Path("x")})


def test_the_outcome_holds_every_gate_and_missing_is_not_passed(exp: Experiment) -> None:
    exp.gate("holds", True, value=2.0, threshold=1.0)
    exp.finish()
    outcome = json.loads((exp.out / "outcome.json").read_text())
    assert outcome["passed"]
    assert [gate["name"] for gate in outcome["gates"]] == ["holds"]


@pytest.mark.parametrize("verdict", [False, None])
def test_a_failed_or_unjudged_gate_keeps_the_outcome_from_passing(exp: Experiment, verdict: bool | None) -> None:
    exp.gate("holds", True)
    exp.gate("does not", verdict, detail="why")
    exp.finish()
    assert not json.loads((exp.out / "outcome.json").read_text())["passed"]


def test_a_figure_needs_words_and_a_table_and_is_kept_with_both(exp: Experiment) -> None:
    from matplotlib import pyplot as plt

    table = pd.DataFrame({"k": [1, 2], "length": [1.5, 2.0]})
    for words in ((" ", "c"), ("a", "")):
        with pytest.raises(ExperimentError, match="has no"):
            exp.figure("f", Drawing(plt.figure(), table, *words))
    with pytest.raises(ExperimentError, match="empty table"):
        exp.figure("f", Drawing(plt.figure(), table.iloc[:0], "a", "c"))
    plt.close("all")
    figure, axes = plt.subplots()
    axes.plot(table["k"], table["length"])
    exp.figure("A figure!", Drawing(figure, table, "a", "c"))
    kept = json.loads((exp.out / "figures" / "a-figure.json").read_text())
    assert kept["alt"] == "a"
    assert kept["rows"] == [[1, 1.5], [2, 2.0]]
    assert (exp.out / "figures" / "a-figure.svg").exists()


def test_by_hand_results_go_to_a_folder_of_their_own_with_the_machine_in_it(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(experiment.SOURCE_VARIABLE, str(small))
    monkeypatch.setattr(environment, "checkout", lambda: None)
    monkeypatch.chdir(tmp_path)
    made = experiment.start({"run_dir": "", "job": ""}, notebook="small")
    assert made.out.parent == tmp_path / "reports" / "by-hand" / "small"
    assert [row.kind for row in read_rows(made.out / "rows.jsonl")] == ["environment"]


def test_a_run_dir_that_is_no_run_is_refused(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(experiment.SOURCE_VARIABLE, str(small))
    with pytest.raises(ExperimentError, match=r"has no record of its machine: environment.json"):
        experiment.start({"run_dir": str(tmp_path), "job": "x"}, notebook="small")


def test_the_environment_names_no_host_and_no_folder(machine: Environment) -> None:
    import platform

    text = machine.model_dump_json()
    assert platform.node() not in text or len(platform.node()) < 3
    assert str(Path.cwd()) not in text
    assert environment.shown_argv(["/usr/bin/x", "--out=/a/b", "/c/d", "e/f"]) == ["x", "--out=…/b", "…/d", "e/f"]
    assert environment.shown_argv(["x", "-p", "rows=/a/b", "k=3"]) == ["x", "-p", "rows=…/b", "k=3"]
