"""Acceptance by size of the draft vocabulary, the head's time beside it, and the pictures of both."""

from __future__ import annotations

import pytest
import torch

from lab.pairs import shipped_pair
from lab.pairs.prompts import prompts_for
from lab.parity.recording import PairUnderTest
from lab.probes.kernels.rows import read_bench, reference_files
from lab.vocabulary.choose import read_candidates
from lab.vocabulary.counts import count_ids
from lab.vocabulary.figures import head_times, lengths
from lab.vocabulary.heads import stored_times, time_heads
from lab.vocabulary.measure import VocabularyReport, measure_sizes
from lab.vocabulary.sources import ANSWERS, TEXT, read_sources

pytestmark = pytest.mark.reference

FEW = "few words"


@pytest.fixture(scope="module")
def report() -> VocabularyReport:
    pair = shipped_pair().target, shipped_pair().draft
    prompts, _ = prompts_for(pair[0], limit=6, max_tokens=96)
    candidates = read_candidates(*pair)
    under_test = PairUnderTest(*pair, "float32", "cpu")
    sources = read_sources(under_test, candidates, prompts[3:], n_tokens=16, text="", max_letters=200_000)
    assert not sources.missing
    how = {"max_new_tokens": 24, "dtype": "float32", "device": "cpu"}
    lists = {**sources.lists, FEW: count_ids([list(range(20, 60))], 4096, FEW)}
    return measure_sizes(pair, prompts[:3], lists, [12, 400, 4000], candidates, k=3, **how)


def test_fewer_tokens_cover_less_and_draft_less_and_change_no_answer(report: VocabularyReport) -> None:
    few, more, whole = report.of(TEXT)
    assert (few.size, more.size, whole.size) == (12, 400, 1024)
    assert few.measured.coverage < more.measured.coverage <= whole.measured.coverage
    assert few.measured.length.mean < whole.measured.length.mean  # type: ignore[operator]
    assert report.n_different == 0
    assert (few.change.mean or 0.0) < 0
    assert whole.change.mean == 0


def test_answers_that_hold_too_few_tokens_are_followed_by_the_texts(report: VocabularyReport) -> None:
    few, more, _ = report.of(ANSWERS)
    assert (few.size, more.size) == (12, 400)
    assert (few.counted_coverage or 0.0) <= (more.counted_coverage or 0.0) < 1.0, "the draft never had some of them"
    assert few.measured.coverage < more.measured.coverage


def test_a_size_that_the_counted_text_cannot_fill_says_why(report: VocabularyReport) -> None:
    [name] = report.left_out
    assert name == f"400/{FEW}"
    assert "hold 40 distinct ones" in report.left_out[name]


def test_the_curve_has_a_line_a_list_and_ends_at_the_whole_head(report: VocabularyReport) -> None:
    drawing = lengths(report)
    assert set(drawing.table["counted"]) == {ANSWERS, TEXT, FEW}
    assert (drawing.table.groupby("counted")["size"].max() == 1024).all()
    assert report.verdict(TEXT) in drawing.alt


def test_a_heads_time_goes_with_its_size_and_is_read_from_a_gpus_rows() -> None:
    small, large = time_heads([512, 8192], 128, torch.float32, "a CPU", repeats=3)
    assert small.floor_us * 16 == pytest.approx(large.floor_us)
    assert small.us < large.us
    stored = stored_times(read_bench(reference_files()[-1]))
    head = next(one for one in stored if one.size == 201088)
    assert head.width == 2880
    assert head.us > head.floor_us > 0
    drawing = head_times(stored, "a head", "rows")
    assert "201088 tokens" in drawing.alt
