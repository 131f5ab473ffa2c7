"""A level's candidates, of rows that crowd its short lists: all the best in one place, all equal, nearly all -inf."""

from __future__ import annotations

import pytest
import torch

from eagle3core.kernels import proof, registry
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.isa.powers import PIECE, pieces_of
from eagle3core.kernels.tree.growth import new_growth
from eagle3core.kernels.tree.top_k import top_k_reference, with_pieces
from eagle3core.kernels.tree.top_k_keys import WARPS

COLUMNS, K = 68 * PIECE, 10
OF_WARP = 32 * PIECE  # columns that a warp holds, side by side


def rows() -> torch.Tensor:
    """Logits `[5, COLUMNS]` bf16, a row for each kind of crowding."""
    equal = torch.full((COLUMNS,), -2.5)
    in_one_piece = torch.linspace(-9, -8, COLUMNS)
    in_one_piece[3 * PIECE : 4 * PIECE] = torch.arange(16.0).flip(0)
    with_holes = torch.full((COLUMNS,), -float("inf"))
    with_holes[[3, 700, 701, COLUMNS - 1]] = torch.tensor([1.0, 2.0, 2.0, -3e38])
    zeros = torch.where(torch.arange(COLUMNS) % 3 == 0, -0.0, 0.0)
    return torch.stack([equal, in_one_piece, with_holes, zeros, torch.linspace(-4, 4, COLUMNS)]).bfloat16()


def chosen(logits: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """The first level that the kernel makes of a root's `logits: [1, V]`: its scores are log-probabilities."""
    case = {"batch": 1, "columns": logits.shape[1], "k": k, "level": 0}
    inputs = {name: tensor[None] for name, tensor in with_pieces(logits).items()}
    inputs |= new_growth(1, k, 1, torch.device("cpu"))._asdict()
    return proof.run(registry()["grow_tree"], "sm_90a", case, inputs, emulator.execute)


def check(logits: torch.Tensor, k: int) -> None:
    """The kernel's ids are the reference's, and its log-probabilities within a few units in the last place."""
    outputs = chosen(logits, k)
    log_probs, ids, _ = top_k_reference(logits.float(), k)
    assert torch.equal(outputs["tokens"], ids.int())
    assert torch.allclose(outputs["scores"].double(), log_probs, atol=2e-6)


@pytest.mark.emulated
@pytest.mark.parametrize("row", range(5))
def test_crowded_short_lists_still_give_the_best_in_order(row: int) -> None:
    check(rows()[row : row + 1].contiguous(), K)


@pytest.mark.emulated
def test_a_warp_that_holds_more_of_the_best_pieces_than_are_wanted_lists_the_best_of_them() -> None:
    logits = torch.linspace(0, 1, WARPS * OF_WARP)
    # Five pieces of one warp, three of them wanted.
    logits[3 * OF_WARP :][: 5 * PIECE] += torch.tensor([4.0, 7.0, 5.0, 8.0, 6.0]).repeat_interleave(PIECE)
    check(logits[None].bfloat16(), 3)


@pytest.mark.emulated
def test_logits_that_are_no_numbers_still_give_distinct_columns() -> None:
    logits = torch.randn(1, 4 * PIECE).bfloat16()
    logits[0, 7], logits[0, 40] = float("nan"), -float("nan")
    ids = chosen(logits, 5)["tokens"][0]
    assert ids[:2].tolist() == [7, 40], "a NaN counts as infinite, the lower column first"
    assert len(set(ids.tolist())) == 5
    assert bool(((ids >= 0) & (ids < 4 * PIECE)).all())


@pytest.mark.emulated
@pytest.mark.slow
def test_equal_logits_of_a_row_longer_than_a_key_has_places_for_are_ordered_by_column() -> None:
    equal = torch.full((1, 4128 * PIECE), -2.5)
    equal[0, -1] = 3.0
    check(equal.bfloat16(), K)


@pytest.mark.reference
def test_pieces_hold_their_largest_and_the_sum_that_makes_their_log_sum() -> None:
    logits = 5 * torch.randn(3, 4 * PIECE)
    logits[1, :PIECE] = -float("inf")
    best, powers = pieces_of(logits)
    assert powers[1, 0] == 0
    whole = (best.clamp_min(-1e30) + powers.log()).logsumexp(-1)
    assert torch.allclose(whole, logits.double().logsumexp(-1))
