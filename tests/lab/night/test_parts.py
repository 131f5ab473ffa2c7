"""A night in parts on several machines: each runs its own jobs, an archive carries the run, the last part judges it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rings import slow_but
from small_notebooks import FAIL, PASS, RAISE, START, write_config, write_notebook

from lab.errors import ExperimentError, RunFailed
from lab.night.archive import write_pack
from lab.night.parts import Part, read_part, unpack
from lab.nightly import run_night
from lab.options.night import NightOptions
from lab.rows import environment, runs

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module", autouse=True)
def _one_source() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "source_hash", lambda: "one source")
        yield


def config_of(folder: Path, *, second: str = PASS) -> Path:
    """One job in part 1, one in part 2."""
    cells = {"first": PASS, "second": second}
    first, last = (write_notebook(folder / f"{name}.ipynb", START, cell) for name, cell in cells.items())
    extra = f'\n[[job]]\nnotebook = "{last}"\npart = 2\ntimeout_s = 60\n'
    return write_config(folder / "night.toml", first, extra=extra, timeout_s=60)


def run(config: Path, out: Path | None, **options: Any) -> tuple[int, dict[str, Any]]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = run_night(NightOptions(config=config, out=out, **options))
    return code, json.loads(printed.getvalue().splitlines()[-1])


@dataclass
class FirstPart:
    """A night whose first part ran, and what it said."""

    config: Path
    out: Path
    archive: Path
    code: int
    line: dict[str, Any]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> FirstPart:
    folder = tmp_path_factory.mktemp("first")
    config, out, archive = config_of(folder), folder / "here" / "night", folder / "packed" / "one.tar"
    return FirstPart(config, out, archive, *run(config, out, part="1/2", pack=archive))


def test_two_parts_in_two_folders_are_one_night_and_no_job_runs_twice(first: FirstPart, tmp_path: Path) -> None:
    assert (first.code, first.line["part"], first.line["n_jobs"], first.line["unfinished"]) == (0, "1/2", 1, [])
    assert not (first.out / runs.SUMMARY_FILE).exists()
    executed = (first.out / "jobs" / "first" / "executed.ipynb").read_bytes()

    there = tmp_path / "there" / "night"
    code, line = run(first.config, there, part="2/2", resume_from=(first.archive,))
    assert (code, line["gates"]) == (0, {"pass": 2, "fail": 0, "missing": 0})
    assert (there / "jobs" / "first" / "executed.ipynb").read_bytes() == executed
    assert runs.read_summary(there)["word"] == "passed"


@pytest.mark.slow
def test_parts_that_ran_side_by_side_are_laid_together_and_judged(first: FirstPart, tmp_path: Path) -> None:
    beside = tmp_path / "beside" / "night"
    run(first.config, beside, part="2/2")
    archives = []
    for folder, name, text in ((first.out, "a", "12\n3\n"), (beside, "b", "2\n3\n")):
        run_dir = shutil.copytree(folder, tmp_path / name)
        (run_dir / "gates.jsonl").write_text(text)
        archives.append(tmp_path / f"{name}.tar")
        write_pack(run_dir, archives[-1])

    there = tmp_path / "there" / "night"
    code, line = run(first.config, there, part="2/2", resume_from=tuple(archives))
    assert (code, line["gates"]) == (0, {"pass": 2, "fail": 0, "missing": 0})
    assert (there / "gates.jsonl").read_text() == "12\n3\n2\n", "each line once, the first archive's before"
    assert (there / "jobs" / "second" / "outcome.json").exists()


def test_parts_of_two_nights_are_not_laid_together(first: FirstPart, tmp_path: Path) -> None:
    another, folder = tmp_path / "another.tar", shutil.copytree(first.out, tmp_path / "night")
    plan = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(plan | {"config_hash": "0" * 12}))
    write_pack(folder, another)
    with pytest.raises(ExperimentError, match="config_hash 000000000000"):
        unpack([first.archive, another], tmp_path / "in" / "night")
    assert not (tmp_path / "in" / "night").exists()


def test_a_last_part_without_the_ones_before_it_is_an_incomplete_night(tmp_path: Path) -> None:
    code, _ = run(config_of(tmp_path), tmp_path / "night", part="2/2")
    summary = runs.read_summary(tmp_path / "night")
    assert (code, summary["word"]) == (3, "incomplete")
    assert "first" in summary["sentence"]


@pytest.mark.parametrize(
    ("cell", "code", "key"), slow_but([(FAIL, 1, "failed")], [(FAIL, 1, "failed"), (RAISE, 3, "unfinished")])
)
def test_a_part_says_which_of_its_jobs_failed_or_did_not_finish(tmp_path: Path, cell: str, code: int, key: str) -> None:
    given, line = run(config_of(tmp_path, second=cell), tmp_path / "night", part="2/3")
    assert (given, line[key]) == (code, ["second"])


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_a_part_is_written_as_one_of_n(text: str) -> None:
    with pytest.raises(ExperimentError, match="I/N"):
        read_part(text)


def test_parts_that_leave_a_job_out_or_have_none_are_refused_before_anything_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ExperimentError, match="no job is in part 3"):
        run(config, tmp_path / "night", part="3/3")
    beyond = config.with_name("beyond.toml")
    beyond.write_text(config.read_text().replace("part = 2", "part = 5"))
    with pytest.raises(ExperimentError, match="--part 1/5"):
        run(beyond, tmp_path / "night", part="1/2")
    assert not (tmp_path / "night").exists()


def test_an_archive_is_not_laid_over_a_run(first: FirstPart) -> None:
    with pytest.raises(ExperimentError, match="holds files"):
        run(first.config, first.out, part="2/2", resume_from=(first.archive,))
    with pytest.raises(ExperimentError, match="--out"):
        run(first.config, None, part="2/2", resume_from=(first.archive,))


def test_a_run_that_cannot_be_packed_says_so_and_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "night"
    run_dir.mkdir()
    (run_dir / "rows.jsonl").write_text("{}\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="could not be written"):
        write_pack(run_dir, tmp_path / "file" / "out.tar")
    assert (run_dir / "rows.jsonl").exists()


def test_the_last_part_is_the_one_that_judges() -> None:
    assert [Part(i, 3).is_last for i in (1, 2, 3)] == [False, False, True]
