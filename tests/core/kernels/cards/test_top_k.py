"""The top-k kernels on rows that crowd their short lists: all the best in one place, all equal, nearly all -inf."""

from __future__ import annotations

import pytest
import torch

from eagle3core.kernels import proof, registry
from eagle3core.kernels.choice import top_k
from eagle3core.kernels.choice.top_k import first_pass
from eagle3core.kernels.choice.top_k_keys import GROUP, SEEKERS
from eagle3core.kernels.emulator import instructions as emulator

pytestmark = pytest.mark.emulated

COLUMNS, K = 4 * GROUP + 64, 10


def rows() -> torch.Tensor:
    """Logits `[5, COLUMNS]` bf16, a row for each kind of crowding."""
    equal = torch.full((COLUMNS,), -2.5)
    in_one_lane = torch.linspace(-9, -8, COLUMNS)
    in_one_lane[: 4 * GROUP].view(4, 32, 8)[:, 3] = torch.arange(32.0).view(4, 8)
    with_holes = torch.full((COLUMNS,), -float("inf"))
    with_holes[[3, 700, 701, COLUMNS - 1]] = torch.tensor([1.0, 2.0, 2.0, -3e38])
    zeros = torch.where(torch.arange(COLUMNS) % 3 == 0, -0.0, 0.0)
    return torch.stack([equal, in_one_lane, with_holes, zeros, torch.linspace(-4, 4, COLUMNS)]).bfloat16()


def check(logits: torch.Tensor, k: int) -> None:
    """The kernels' ids are the reference's, and their log-probabilities within a few units in the last place."""
    card, inputs = registry()["top_k"], {"logits": logits}
    case = {"rows": 1, "columns": logits.shape[1], "k": k, "dtype": torch.bfloat16}
    outputs = proof.run(card, "sm_90a", case, inputs, emulator.execute)
    assert [d for d in proof.deviations(card, case, inputs, outputs) if not d.passes and d.output == "ids"] == []
    expected = card.reference(case, {"logits": inputs["logits"].float()})
    assert torch.allclose(outputs["log_probs"].double(), expected["log_probs"], atol=2e-6)
    assert torch.allclose(outputs["lse"].double(), expected["lse"], atol=2e-6)


@pytest.mark.parametrize("row", range(5))
def test_crowded_short_lists_still_give_the_best_in_order(row: int) -> None:
    check(rows()[row : row + 1].contiguous(), K)


def test_a_warp_that_holds_more_of_the_best_groups_than_are_wanted_lists_the_best_of_them() -> None:
    logits = torch.linspace(0, 1, 5 * SEEKERS * GROUP).view(5, SEEKERS, GROUP)
    logits[:, 3] += torch.tensor([4.0, 7.0, 5.0, 8.0, 6.0])[:, None]  # five groups of one warp, three of them wanted
    check(logits.view(1, -1).bfloat16(), 3)


@pytest.mark.parametrize("sizes", [(1, 8), (2, 4), (4, 8)])
def test_the_first_pass_gives_the_same_bits_however_its_groups_are_dealt(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    card, case = registry()["top_k"], {"rows": 2, "columns": 8 * GROUP + 72, "k": 4, "dtype": torch.bfloat16}
    inputs = card.example(case, proof.generator(0, torch.device("cpu")), torch.device("cpu"))
    expected = proof.run(card, "sm_90a", case, inputs, emulator.execute)
    monkeypatch.setattr(top_k, "first_pass", lambda n_rows, n_columns: sizes)
    outputs = proof.run(card, "sm_90a", case, inputs, emulator.execute)
    assert all(torch.equal(outputs[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_equal_logits_of_a_row_too_long_for_columns_in_keys_are_ordered_by_column() -> None:
    equal = torch.full((1, 258 * GROUP), -2.5)
    equal[0, -1] = 3.0
    check(equal.bfloat16(), K)


def test_many_rows_give_a_warp_two_groups_and_few_rows_a_block_to_every_multiprocessor() -> None:
    assert first_pass(1, 32000) == (1, 4)
    assert first_pass(10, 32000) == (1, 8)
    assert first_pass(10, 128256) == first_pass(40, 128256) == (2, 4)
