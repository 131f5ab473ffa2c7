"""Configurations are read strictly; a job's hash covers what its result depends on and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_notebooks import PASS, START, write_config, write_notebook

from lab.errors import ExperimentError
from lab.night.jobs import Job, content_hash, expand, finished_outcome, load_config, record
from lab.night.notebook import NotebookOutcome

pytestmark = pytest.mark.reference


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    parameters = 'dtype: str = "float32"\nk: int = 3\ntarget: str = ""'
    return write_notebook(tmp_path / "small.ipynb", START, PASS, parameters=parameters)


def jobs_of(config: Path, filled: dict[str, str] | None = None, state: str = "s") -> list[Job]:
    return expand(load_config(config), filled or {}, state)


def test_every_combination_of_a_grid_is_a_job_with_a_folder_of_its_own(tmp_path: Path, notebook: Path) -> None:
    grid = '\ngrid = { dtype = ["float32", "bfloat16"], k = [1, 2] }\nparameters = {}\n'
    jobs = jobs_of(write_config(tmp_path / "c.toml", notebook, extra=grid))
    assert [job.id for job in jobs] == [
        "small-float32-1",
        "small-float32-2",
        "small-bfloat16-1",
        "small-bfloat16-2",
    ]
    assert jobs[3].parameters == {"dtype": "bfloat16", "k": 2}
    assert len({job.hash for job in jobs}) == 4


def test_the_hash_follows_source_parameters_and_state_but_not_where_the_pair_lies(
    tmp_path: Path, notebook: Path
) -> None:
    config = write_config(tmp_path / "c.toml", notebook)
    (plain,) = jobs_of(config, {"target": "a"})
    assert jobs_of(config, {"target": "b"})[0].hash == plain.hash
    assert jobs_of(config, {"target": "a"})[0].hash == plain.hash
    assert jobs_of(config, {"target": "a"}, "other")[0].hash != plain.hash
    other = write_config(tmp_path / "d.toml", notebook, extra="parameters = { k = 4 }\n")
    assert jobs_of(other, {"target": "a"})[0].hash != plain.hash
    notebook.write_text(notebook.read_text().replace("exp.finish();", "exp.finish()  ;"))
    assert jobs_of(config, {"target": "a"})[0].hash != plain.hash


def test_only_a_finished_job_with_an_equal_hash_need_not_run_again(tmp_path: Path, notebook: Path) -> None:
    (job,) = jobs_of(write_config(tmp_path / "c.toml", notebook))
    assert finished_outcome(job, tmp_path) is None
    record(job, tmp_path, NotebookOutcome("died", 1.0, error="killed"))
    assert finished_outcome(job, tmp_path) is None
    done = NotebookOutcome("finished", 1.0, passed=False)
    record(job, tmp_path, done)
    assert finished_outcome(job, tmp_path) == done
    (changed,) = jobs_of(write_config(tmp_path / "c.toml", notebook), state="another source")
    assert finished_outcome(changed, tmp_path) is None


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("suprise = 1\n", r"job.0.suprise: unknown key"),
        ("timeout_s = -1\n", r"job.0.timeout_s: Input should be greater than 0"),
        ("[other]\nx = 1\n", r"other: unknown key"),
        ('[pair]\ntarget = "x"\n', r"give either name"),
        ('[[gate]]\nname = "g"\nkind = "k"\nrow = "r"\nvalue = "v"\n', r"a gate needs at_least or at_most"),
        ("nonsense\n", r"cannot be read"),
    ],
)
def test_a_configuration_with_an_unknown_key_or_a_bad_value_is_refused(
    tmp_path: Path, notebook: Path, extra: str, said: str
) -> None:
    config = write_config(tmp_path / "c.toml", notebook, extra=extra)
    with pytest.raises(ExperimentError, match=said):
        load_config(config)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("parameters = { kk = 1 }\n", r"unknown parameter 'kk' \(did you mean 'k'\?\)"),
        ('parameters = { k = "3" }\n', r"parameter 'k' is '3', a str"),
        ('parameters = { job = "mine" }\n', r"'job' was given"),
    ],
)
def test_a_parameter_the_notebook_does_not_take_is_refused_when_the_night_is_planned(
    tmp_path: Path, notebook: Path, extra: str, said: str
) -> None:
    with pytest.raises(ExperimentError, match=said):
        jobs_of(write_config(tmp_path / "c.toml", notebook, extra=extra))


def test_two_jobs_cannot_share_a_folder(tmp_path: Path, notebook: Path) -> None:
    with pytest.raises(ExperimentError, match="two jobs are called 'small'"):
        jobs_of(write_config(tmp_path / "c.toml", notebook, notebook))


def test_a_notebook_without_the_place_parameters_is_refused(tmp_path: Path, notebook: Path) -> None:
    notebook.write_text(notebook.read_text().replace('run_dir: str = \\"\\"', 'elsewhere: str = \\"\\"'))
    with pytest.raises(ExperimentError, match="does not declare the parameters run_dir and job"):
        jobs_of(write_config(tmp_path / "c.toml", notebook))


def test_a_content_hash_follows_contents_and_not_the_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "w").write_bytes(b"123")
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    (tmp_path / "b" / "deep" / "w").write_bytes(b"124")
    assert content_hash(tmp_path / "a") != content_hash(tmp_path / "b")
