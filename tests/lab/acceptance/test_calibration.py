"""Loss and choices of a target in several formats, place by place: those of what the format leaves of its weights."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from oracle import Target
from quantised_heads import write_dequantised
from tiny_engines import random_prompts, write_tiny_pair

from lab.acceptance.calibration.figures import quality
from lab.acceptance.calibration.measure import FORMATS, calibrate
from lab.pairs.prompts import Prompt

pytestmark = pytest.mark.reference


def prompts_of(lengths: list[int]) -> list[Prompt]:
    return [Prompt(tuple(ids), "") for ids in random_prompts(lengths)]


def said_at(target: Target, ids: tuple[int, ...], places: list[int]) -> tuple[float, list[int]]:
    """Loss and choices of the whole text read at once, by the fp64 witness."""
    rows = [target.logits(list(ids[:at]))[-1] for at in places]
    losses = [-float(torch.log_softmax(row, -1)[ids[at]]) for row, at in zip(rows, places, strict=True)]
    return sum(losses), [int(row.argmax()) for row in rows]


def test_each_format_says_what_its_weights_mean_at_every_place(tmp_path: Path) -> None:
    target = write_tiny_pair(tmp_path)[0]
    prompts = prompts_of([5, 12, 29])  # the first has no place
    found = calibrate(target, prompts, n_places=3, dtype="float64", device="cpu")
    assert found is not None
    assert (found.n_places, found.n_prompts) == (6, 2)
    witnesses = Target(target), Target(write_dequantised(target, tmp_path / "left"))
    at = {12: [8, 9, 10], 29: [8, 15, 22]}
    sums, choices = [], []
    for witness in witnesses:
        said = [said_at(witness, prompt.ids, at[len(prompt.ids)]) for prompt in prompts[1:]]
        sums.append(sum(loss for loss, _ in said))
        choices.append([token for _, tokens in said for token in tokens])
    stored, fp8, cached = found.formats
    assert [stored.loss.mean, fp8.loss.mean] == pytest.approx([total / 6 for total in sums], rel=1e-5)
    assert fp8.change.mean == pytest.approx((sums[1] - sums[0]) / 6, abs=1e-5)
    assert fp8.agreement.mean == sum(a == b for a, b in zip(*choices, strict=True)) / 6
    assert (stored.change.mean, stored.agreement.mean) == (0.0, 1.0)
    assert fp8.change.mean != 0.0, "FP8 changes the loss, or the format was not asked for"
    assert cached.loss.mean != fp8.loss.mean, "so does a cache in FP8"


def test_a_format_more_is_a_row_more_of_figure_table_and_verdict(tmp_path: Path) -> None:
    target, prompts = write_tiny_pair(tmp_path)[0], prompts_of([12, 14])
    named = {**FORMATS, "dequantised": {"target_weights": "dequantised"}}
    found = calibrate(target, prompts, n_places=2, dtype="float32", device="cpu", formats=named)
    assert found is not None
    assert found.formats[-1].agreement.mean == 1.0
    assert found.verdict.count("95% interval") == len(FORMATS)
    with mpl.rc_context():
        drawing = quality(found)
    assert list(drawing.table["format"]) == [*FORMATS, "dequantised"]
    assert list(drawing.table["loss_change"]) == [one.change.mean for one in found.formats]


def test_prompts_without_a_place_give_nothing(tmp_path: Path) -> None:
    how = {"dtype": "float32", "device": "cpu"}
    assert calibrate(tmp_path, prompts_of([8, 3]), n_places=4, **how) is None
    assert calibrate(tmp_path, prompts_of([20]), n_places=0, **how) is None
