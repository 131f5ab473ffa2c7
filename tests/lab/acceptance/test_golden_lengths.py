"""A length that is kept is what later runs are held against: a changed draft fails, an unknown pair says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from lab import cli
from lab.acceptance.counts import DepthAcceptance
from lab.acceptance.golden.file import GOLDEN_FILE, read_golden
from lab.acceptance.golden.lengths import GoldenReport, judge_lengths, prompts_id
from lab.acceptance.intervals import Interval
from lab.acceptance.measure import measure_acceptance
from lab.errors import ExperimentError, NotComparable
from lab.pairs.prompts import Prompt, prompts_for
from lab.parity.inputs import chosen_pair
from lab.rows.store import Row, RowWriter, read_rows

pytestmark = pytest.mark.reference

N_NEW = 32
COMMITTED = ROOT / "reports/reference/h200/night/jobs/31_acceptance/rows.jsonl"
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair() -> Pair:
    """The pair that ships, whose draft is trained."""
    torch.set_num_threads(1)
    return chosen_pair("", "")


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[Prompt]:
    return prompts_for(pair[0], limit=3, max_tokens=48)[0]


@pytest.fixture(scope="module")
def depth(pair: Pair, prompts: list[Prompt]) -> DepthAcceptance:
    """The pair measured once."""
    return measured(pair, prompts)


def measured(pair: Pair, prompts: list[Prompt], fault: str | None = None) -> DepthAcceptance:
    return measure_acceptance(*pair, prompts, (3,), max_new_tokens=N_NEW, ignore_eos=True, fault=fault).at(3)


def judged(pair: Pair, prompts: list[Prompt], depth: DepthAcceptance, **changes: Any) -> GoldenReport:
    settings: dict[str, Any] = {"dtype": "float32", "max_new_tokens": N_NEW, "ignore_eos": True, **changes}
    return judge_lengths(pair, prompts, {"chain-3": (depth.length, depth.n_steps)}, **settings)


def stored(report: GoldenReport, folder: Path, fault: str = "") -> Path:
    """A run folder with the rows that a notebook writes of a report."""
    with RowWriter(folder / "jobs" / "31_acceptance" / "rows.jsonl") as writer:
        for one in report.judgements:
            writer.write(
                Row(
                    run="r", job="31_acceptance", notebook="31_acceptance", kind="golden_length", environment="m",
                    name=one.measured.shape, values=one.row_values(), recorded_at=None,
                    parameters={**one.measured.parameters(), "fault": fault},
                )
            )  # fmt: skip
    return folder


@pytest.fixture
def kept(pair: Pair, prompts: list[Prompt], depth: DepthAcceptance, tmp_path: Path) -> Path:
    """A file of that length, with a tolerance of 0.1 tokens, as the command writes it."""
    run, out = stored(judged(pair, prompts, depth), tmp_path / "run"), tmp_path / GOLDEN_FILE
    assert cli.main(["golden", str(run), "--out", str(out), "--tolerance", "0.1"]) == 0
    return out


def test_without_a_file_nothing_is_judged_and_the_report_says_so(
    pair: Pair, prompts: list[Prompt], depth: DepthAcceptance
) -> None:
    report = judged(pair, prompts, depth)
    assert report.passed is None
    assert report.verdict.startswith("No golden length")
    assert report.judgements[0].row_values()["is_within"] is None


def test_a_kept_length_holds_for_the_same_draft_and_not_for_a_changed_one(
    pair: Pair, prompts: list[Prompt], depth: DepthAcceptance, kept: Path
) -> None:
    assert judged(pair, prompts, depth, file=str(kept)).passed is True
    broken = judged(pair, prompts, measured(pair, prompts, "tap_order"), file=str(kept))
    assert broken.passed is False
    assert broken.verdict.startswith("Acceptance length has drifted: chain-3 ")
    assert broken.judgements[0].row_values()["drift"] < -0.1


def test_more_than_expected_is_drift_as_well_and_the_tolerance_is_inclusive(
    pair: Pair, prompts: list[Prompt], depth: DepthAcceptance, kept: Path
) -> None:
    [golden] = read_golden(kept)
    for move, passed in ((0.0999, True), (0.1001, False), (-0.0999, True), (-0.1001, False)):
        moved = replace(depth, length=Interval(golden.length + move, None, None))
        assert judged(pair, prompts, moved, file=str(kept)).passed is passed
    unmeasured = replace(depth, length=Interval(None, None, None), n_steps=0)
    assert judged(pair, prompts, unmeasured, file=str(kept)).passed is False


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"max_new_tokens": 39}, {"ignore_eos": False}])
def test_another_run_is_held_against_no_length_of_this_one(
    pair: Pair, prompts: list[Prompt], depth: DepthAcceptance, kept: Path, change: dict[str, Any]
) -> None:
    assert judged(pair, prompts, depth, file=str(kept), **change).passed is None
    assert judged(pair, prompts[::-1], depth, file=str(kept)).passed is None
    assert prompts_id(prompts) != prompts_id(prompts[::-1])


def test_the_file_is_looked_for_beside_the_draft(prompts: list[Prompt], depth: DepthAcceptance, kept: Path) -> None:
    folder = kept.parent  # which a pair would lie in, in folders of these names
    assert judged((folder / "target", folder / "draft"), prompts, depth).passed is True
    assert judged((folder / "target", folder / "other draft"), prompts, depth).passed is None


def test_a_length_is_replaced_by_its_own_kind_alone_and_the_tolerance_comes_from_the_spread(
    pair: Pair, prompts: list[Prompt], depth: DepthAcceptance, kept: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    half = stored(judged(pair, prompts, depth, dtype="bfloat16"), tmp_path / "half")
    again = stored(judged(pair, prompts, depth), tmp_path / "again")
    for run in (half, again):
        assert cli.main(["golden", str(run), "--out", str(kept)]) == 0
    assert "(was " in capsys.readouterr().out
    lengths = read_golden(kept)
    assert [length.dtype for length in lengths] == ["bfloat16", "float32"]
    low, high = depth.length.low, depth.length.high
    assert low is not None
    assert high is not None
    assert {length.tolerance for length in lengths} == {round((high - low) / 2, 4)}


def test_what_cannot_be_kept_or_read_is_refused_in_three_parts(
    pair: Pair, prompts: list[Prompt], depth: DepthAcceptance, kept: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    faulty = stored(judged(pair, prompts, depth), tmp_path / "faulty", fault="tap_order")
    (tmp_path / "empty").mkdir()
    for run, what in ((faulty, "planted bug 'tap_order'"), (tmp_path / "empty", "holds no acceptance length")):
        assert cli.main(["golden", str(run), "--out", str(kept)]) == 2
        said = capsys.readouterr().err
        assert what in said
        assert "\n  do: " in said
    content = json.loads(kept.read_text())
    for text, error in (
        ("[]", ExperimentError),
        (json.dumps({**content, "lengths": [{**content["lengths"][0], "tolerance": 0}]}), ExperimentError),
        (json.dumps({**content, "schema_version": 2}), NotComparable),
    ):
        kept.write_text(text)
        with pytest.raises(error):
            judged(pair, prompts, depth, file=str(kept))
    with pytest.raises(ExperimentError, match="cannot be read"):
        judged(pair, prompts, depth, file=str(tmp_path / "none.json"))


def test_the_lengths_that_ship_are_those_of_the_committed_rows(pair: Pair) -> None:
    """Measured on an H200; a night of the packaged configuration holds every machine against them."""
    shipped = {length.shape: length for length in read_golden(pair[1].parent / GOLDEN_FILE, is_needed=True)}
    rows = [row for row in read_rows(COMMITTED) if row.kind == "acceptance"]
    assert len(rows) == 3
    for row in rows:
        golden = shipped[row.name.replace("spec-", "chain-")]
        assert golden.length == pytest.approx(row.number("acceptance_length"), abs=1e-6)
        assert (golden.dtype, golden.n_prompts) == (row.parameters["dtype"], row.parameters["n_prompts"])
    every = prompts_for(pair[0], limit=64, max_tokens=512)[0]
    assert {length.prompts for length in shipped.values()} == {prompts_id(every)}
