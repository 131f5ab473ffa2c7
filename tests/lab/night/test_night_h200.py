"""The H200's night: its parts and times, the same on a CPU with nano shapes, and its report on any machine."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from places import DATA

from lab.errors import ExperimentError
from lab.night.jobs import Budget, JobConfig, NightConfig, load_config
from lab.night.settings import with_settings
from lab.nightly import run_night
from lab.options.night import NightOptions
from lab.page.report import render
from lab.rows import environment
from lab.rows.configuration import packaged
from lab.rows.runs import read_summary
from lab.rows.store import read_run

pytestmark = pytest.mark.reference

CONFIG = packaged("nightly-h200.toml")
GATES = DATA / "small_gates.toml"


def test_the_night_fits_its_budget_and_no_part_is_longer_than_a_lease() -> None:
    config = load_config(CONFIG)
    assert config.budget == Budget(part_s=540, night_s=1800)
    assert all(job.estimate_s and job.estimate_s <= job.timeout_s for job in config.job)
    assert sorted({job.part for job in config.job}) == [1, 2, 3, 4, 5]
    gates = [
        (job.part, job.parameters["kind"], job.parameters.get("repeat"))
        for job in config.job
        if "gates" in job.notebook
    ]
    assert gates == [(3, "micro", 3), (4, "full", None)], "a full run needs the micro runs of an earlier part"


def test_a_night_that_is_expected_to_be_too_long_is_refused() -> None:
    jobs = [JobConfig(notebook="x", estimate_s=400, grid={"a": [1, 2]})]
    with pytest.raises(ValueError, match="part 1 is expected to take 800 s of 540"):
        NightConfig(budget=Budget(part_s=540, night_s=1500), job=jobs)
    with pytest.raises(ValueError, match="the night is expected to take 800 s of 700"):
        NightConfig(budget=Budget(part_s=900, night_s=700), job=jobs)


def test_a_dry_run_shows_every_part_with_its_time_and_starts_nothing(tmp_path: Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run_night(NightOptions(config=CONFIG, out=tmp_path / "night", dry_run=True)) == 0
    text = printed.getvalue()
    assert re.findall(r"^part \d", text, re.M) == [f"part {i}" for i in range(1, 6)]
    assert "at most 30 min 00 s" in text
    assert not (tmp_path / "night").exists()


def test_a_setting_goes_to_every_notebook_that_has_it_or_to_the_one_named() -> None:
    entries = load_config(CONFIG).job
    changed = with_settings(entries, ("geometry=nano", "40_speed.tokens=18"))
    by_name = {(job.notebook, job.name): job.parameters for job in changed}
    assert by_name["40_speed", "depths"]["geometry"] == by_name["41_bench", ""]["geometry"] == "nano"
    assert by_name["40_speed", "depths"]["tokens"] == by_name["40_speed", "batches"]["tokens"] == 18
    assert by_name["41_bench", ""]["tokens"] == 256
    for setting, words in (
        ("size=1", "no notebook of this night has it"),
        ("41_bench.kind=x", "no notebook"),
        ("x", "no '='"),
    ):
        with pytest.raises(ExperimentError, match=words):
            with_settings(entries, (setting,))


def test_a_job_for_which_the_part_has_no_time_left_is_missing_and_was_not_begun(tmp_path: Path) -> None:
    from small_notebooks import PASS, START, write_notebook

    book = write_notebook(tmp_path / "first.ipynb", START, PASS)
    (tmp_path / "n.toml").write_text(
        f'[budget]\npart_s = 29\nnight_s = 60\n[[job]]\nnotebook = "{book}"\nestimate_s = 29\n'
    )
    out = tmp_path / "reports" / "night"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = run_night(NightOptions(config=tmp_path / "n.toml", out=out))
    assert code == 3
    [row] = [row for row in read_run(out) if row.kind == "job"]
    assert row.status == "missing"
    assert re.search(r"not begun: it takes about 29 s, and 29 s of the part's budget are left", row.reason or "")
    assert [job["status"] for job in read_summary(out)["jobs"]] == ["unusable"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_same_night_runs_on_a_cpu_and_is_drawn_again_from_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "source_hash", lambda: "one source")
    out = tmp_path / "reports" / "night"
    settings = ("geometry=nano", "device=cpu", "points=16x1", "tokens=16", "rounds=1", f"42_perf_gates.config={GATES}")
    whole = load_config(CONFIG)
    # The others take their minutes elsewhere: 22_kernels and 40_speed run in the small night of all notebooks.
    part = whole.model_copy(update={"job": [job for job in whole.job if job.notebook.startswith(("41", "42", "90"))]})
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_night(NightOptions(out=out, settings=(*settings, "42_perf_gates.repeat=1")), part)
    summary = read_summary(out)
    assert {job["status"] for job in summary["jobs"]} == {"finished"}, json.dumps(summary["jobs"])
    words = {gate["name"]: gate["word"] for gate in summary["gates"]}
    assert words["full gates"] == "missing", "one micro run does not allow a full one"
    assert words["tokens of every scenario"] == "pass"
    assert {row.kind for row in read_run(out)} >= {"bench", "gate", "environment"}
    page = (out / "index.html").read_text()
    elsewhere = tmp_path / "elsewhere" / "night"
    shutil.copytree(out, elsewhere, ignore=shutil.ignore_patterns("*.html"))
    assert render(elsewhere).read_text() == page


def test_the_committed_rows_of_the_gpu_are_drawn_on_this_machine(tmp_path: Path) -> None:
    root = environment.checkout()
    assert root is not None
    found = sorted((root / "reports" / "reference").glob("*/night*/summary.json"))
    assert found
    for path in found:
        copied = shutil.copytree(path.parent, tmp_path / "-".join(path.parts[-3:-1]))
        page = render(copied)
        assert "NVIDIA" in page.read_text()
        assert page.stat().st_size < 3_000_000
