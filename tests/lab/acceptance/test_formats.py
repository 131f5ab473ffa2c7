"""A head's maps in another format are compared prompt by prompt, and the report says what that changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import pytest
from tiny_engines import random_prompts, write_tiny_pair

from eagle3core.metrics import RequestMetrics, StepRecord
from eagle3core.request import Response
from lab.acceptance.counts import count_acceptance
from lab.acceptance.formats import compare_formats, formats, length_change
from lab.acceptance.measure import measure_acceptance
from lab.pairs.prompts import Prompt

pytestmark = pytest.mark.reference


def response(accepted: Sequence[int], *, cut: bool = False) -> Response:
    """A request whose steps accepted so many of two drafts; `cut`: one more ended with the text."""
    steps, start = list[StepRecord](), 1
    for n in accepted:
        steps.append(StepRecord(start, 2, n, n + 1, False, (0,) * n + (1,) * (n < 2)))
        start += n + 1
    if cut:
        steps.append(StepRecord(start, 2, 1, 1, True, (0, 1)))
    return Response("", list(range(start + cut)), 1, "length", RequestMetrics(None, tuple(steps)))


def test_the_change_is_that_of_the_pooled_lengths_and_its_interval_pairs_prompts() -> None:
    stored = [response([2, 2, 0]), response([1, 1], cut=True), response([0] * 4)]
    other = [response([2, 1, 0]), response([1, 1]), response([0] * 4, cut=True)]
    change = length_change(stored, other)
    assert change.mean == pytest.approx((6 + 4 + 4) / 9 / ((7 + 4 + 4) / 9) - 1)
    assert change.low is not None
    assert change.high is not None
    assert change.low == pytest.approx(-1 / 7), "of draws that took the first prompt three times"
    assert change.high == 0.0
    same = length_change(stored, stored)
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)


def test_without_complete_steps_nothing_is_said() -> None:
    nothing = [response([], cut=True)]
    assert length_change(nothing, nothing).mean is None
    depth = count_acceptance(2, [Prompt((1, 2), "")], nothing, len)
    compared = compare_formats("fp8", depth, depth)
    assert compared.verdict.startswith("Too few steps are complete")
    assert compared.row_values()["length_change"] is None


def test_the_engine_is_measured_in_both_formats_and_the_answers_are_compared(tmp_path: Path) -> None:
    pair = write_tiny_pair(tmp_path)
    prompts = [Prompt(tuple(ids), "") for ids in random_prompts([3, 9, 17, 30, 5, 22, 11, 2])]
    how = {"max_new_tokens": 24, "dtype": "float64", "device": "cpu"}
    stored = measure_acceptance(*pair, prompts, [2], **how).at(2)
    other = measure_acceptance(*pair, prompts, [2], **how, draft_weights="fp8").at(2)
    assert other.misses != stored.misses, "FP8 changes some draft, or the format was not asked for"
    compared = compare_formats("fp8", stored, other)
    assert compared.n_different == 0
    assert "the draft's maps in fp8 a step of spec-2 commits" in compared.verdict
    assert compared.verdict.endswith("; the answers are the same.")
    values = compared.row_values()
    assert values["format_length"] == other.length.mean
    assert values["stored_length"] == stored.length.mean
    assert other.length.mean is not None
    assert stored.length.mean is not None
    assert values["length_change"] == pytest.approx(other.length.mean / stored.length.mean - 1)
    with mpl.rc_context():
        table = formats(compared).table
    assert list(table["draft_maps"]) == ["as stored", "fp8"]
    assert list(table["position_2"]) == [stored.by_position[1], other.by_position[1]]


def test_answers_that_differ_are_counted() -> None:
    prompts = [Prompt((1, 2), ""), Prompt((1, 2), "")]
    depth, other = (
        count_acceptance(2, prompts, [response([2, 2]), response(last)], len) for last in ([1, 0, 0], [2, 2])
    )
    assert compare_formats("fp8", depth, other).n_different == 1
    assert "1 answers differ" in compare_formats("fp8", depth, other).verdict
