"""Attention's output in the order in which warpgroups fetch it: written by who makes it, so that nobody packs it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from eagle3core.kernels import proof
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.launcher import attention, attention_scratch
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.plan import Plan
from eagle3core.kernels.card import Case, Tensors
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD as GEMM
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.order.pack import OrderedRows, is_whole, pack_rows_reference, packed_words
from eagle3core.kernels.gemm.scratch import ordered_input, workspace
from eagle3core.kernels.gemm.tiling import Tiling
from eagle3core.step import launches_of, step_program
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import shapes_of
from lab.probes.sweeps.in_step import step_setting

CPU = torch.device("cpu")
PASS: Case = {
    "dtype": "bf16",
    "dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "order": (2, 2),
    "prefix": (20, 3, 37),
    "tokens": 5,
}
WIDTH = 4 * 64


def example(card: object, case: Case) -> Tensors:
    return card.example(case, proof.generator(8, CPU), CPU)  # type: ignore[attr-defined,no-any-return]


# All splits of a block's rows: it leaves the output itself.
WHOLE = Plan(4, 2, 2, units=4, tiles=1, grouped=True)


def attend(inputs: Tensors, ordered: OrderedRows | None, plan: Plan | None = None) -> torch.Tensor:
    shape, q = Shape("bf16", 64, 2, 2, 2), inputs["q"]
    out = torch.full_like(q, float("nan"))
    launches = attention(
        "sm_90a", q=q, k_blocks=inputs["k"], v_blocks=inputs["v"], block_tables=inputs["tables"],
        prefix_lens=inputs["prefix"], masks=inputs["words"], out=out,
        scratch=attention_scratch(shape, len(q), q.shape[1], 2, CPU), order=(2, 2), ordered=ordered,
        plan=plan,
    )  # fmt: skip
    assert len(launches) == (2 if plan is None else 1)
    emulator.execute(launches)
    return out.view(-1, WIDTH)


@pytest.mark.emulated
@pytest.mark.parametrize("plan", [None, WHOLE], ids=["combined", "whole"])
@pytest.mark.parametrize("x_tiles", [1, 2, 3])
def test_every_piece_lies_where_packing_the_rows_puts_it_and_rows_are_written_as_before(
    x_tiles: int, plan: Plan | None
) -> None:
    inputs = example(CARD, PASS)
    words = torch.full((2 * packed_words(15, WIDTH, x_tiles, 2),), float("nan"), dtype=torch.bfloat16)
    rows = attend(inputs, OrderedRows(words.view(torch.float32), x_tiles), plan)
    assert proof.differing(rows, attend(inputs, None)) == 0
    expected, there = (pack_rows_reference(x, x_tiles, 2).view(-1) for x in (rows, torch.ones_like(rows)))
    assert torch.equal(words[there > 0].view(torch.int16), expected[there > 0].view(torch.int16))
    assert words[there == 0].isnan().all(), "nothing is written for rows that are not there"


@pytest.mark.emulated
@pytest.mark.parametrize("split", [1, 4])
def test_a_map_reads_rows_in_its_order_to_the_same_bits_in_one_launch_and_no_other_rows_matter(split: int) -> None:
    case = {"kind": "store", "m": 11, "n": 64, "k": 256, "dtype": "bf16", "packed": True}
    inputs, tiling = example(GEMM, case), Tiling("group", 2, 4, 2, 3, split=split)
    x, x_words = inputs["x"], packed_words(11, 256, 2, 2)
    words, there = (pack_rows_reference(rows, 2, 2).view(-1) for rows in (x, torch.ones_like(x)))
    words[there == 0] = float("nan")
    found = []
    for ordered in (None, OrderedRows(words.view(torch.float32), 2)):
        y = torch.full((11, 64), float("nan"), dtype=torch.bfloat16)
        launches = gemm(
            "sm_90a", Epilogue("store"), x=x, w=inputs["w"], y=y, k=256, packed=True, weight_rows=64,
            tiling=tiling, scratch=workspace(CPU), ordered=ordered, operands={},
        )  # fmt: skip
        assert len(launches) == (2 if ordered is None else 1)
        emulator.execute(launches)
        found.append(y)
    assert words.numel() == 2 * x_words
    assert proof.differing(*found) == 0


@pytest.mark.reference
def test_who_makes_rows_is_told_of_their_order_only_where_streams_are_whole_stages_of_warpgroups() -> None:
    meta = workspace(torch.device("meta"))
    wide = ordered_input("sm_90a", 64, 4096, 4096, torch.bfloat16, meta)
    assert wide is not None
    assert wide.x_tiles == 8
    assert ordered_input("sm_90a", 1, 4096, 4096, torch.bfloat16, meta) is None
    assert ordered_input("sm_90a", 64, 4096, 4096, torch.bfloat16, None) is None
    assert ordered_input("sm_90a", 64, 4096, 4096, torch.float32, meta) is None
    assert is_whole(4096, 4)
    assert not is_whole(4096 + 32, 4)
    assert ordered_input("sm_90a", 64, 4096, 4096 + 32, torch.bfloat16, meta) is None


@pytest.mark.reference
@pytest.mark.parametrize("drafts", ["dynamic-60/7/10", "chain-3", "plain"])
def test_in_a_step_nobody_packs_what_attention_made(drafts: str) -> None:
    runner = shapes_of(find_geometry("llama-3.1-8b"), "sm_90a").runner(step_setting(drafts, 64))
    program = step_program(runner.emit, runner.target, runner.draft, runner.state, 1)
    names = [one.variant.name for one in launches_of(program)]
    after = {following for name, following in pairwise(names) if name.startswith("attention_combine")}
    assert after
    assert not any("pack_rows" in name for name in after)
    assert any("combine" in name and "ordered" in name for name in names) is (drafts == "dynamic-60/7/10")
