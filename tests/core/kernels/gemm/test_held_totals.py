"""Blocks of warpgroups that hold their totals in registers: the same bits, where it is possible, and without spills."""

from dataclasses import replace

import pytest
import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.group_room import (
    group_holds_totals,
    group_registers,
    group_shared_bytes,
    group_threads,
    group_totals_in_shared,
)
from eagle3core.kernels.gemm.launcher import gemm_variant
from eagle3core.kernels.gemm.tiling import Tiling, deepest

CASE = {"kind": "store", "m": 41, "n": 48, "k": 528, "dtype": "bf16", "packed": True}
HELD = {"kernel": "group", "x_tiles": 6, "w_tiles": 4, "units": 1, "stages": 5, "split": 1, "held": True}
RING = {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({}, {}),
        ({"k": 80}, {}),  # a stream without units
        pytest.param(
            {"m": 61, "n": 144, "k": 272},
            {"x_tiles": 4, "w_tiles": 8, "units": 2, "stages": 4, "cluster": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kind": "swiglu", "m": 50, "n": 72, "k": 272}, {"x_tiles": 7, "w_tiles": 12}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_bits_equal_those_of_the_ring(case, setting):
    case = {**CASE, **case}
    inputs = CARD.example(case, proof.generator(6, torch.device("cpu")), torch.device("cpu"))
    outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**HELD, **setting})
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    assert proof.differing(outputs["y"], expected["y"]) == 0
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


@pytest.mark.reference
def test_totals_are_held_where_registers_are_left_for_them():
    fits = {(x, w, u) for x in (16, 24, 32) for w in (8, 12, 16) for u in (1, 2) if group_holds_totals(x, w, u, 1)}
    assert fits == {(16, 8, 1), (16, 8, 2), (16, 12, 1), (24, 8, 1), (24, 8, 2)}
    assert not group_holds_totals(16, 8, 1, 4)
    assert not group_totals_in_shared(16, 12, 1, held=True)


@pytest.mark.reference
def test_threads_and_registers_of_a_block_are_those_counted_by_hand():
    assert [group_threads(8, held) for held in (False, True)] == [320, 384], "two warps fetch, or a warpgroup"
    # 65536 registers of a processor less 4 warps' of 48 a lane, in steps of 8; instructions name 240 at most.
    assert [group_registers(w_tiles) for w_tiles in (4, 8, 12, 16)] == [240, 232, 152, 112]


@pytest.mark.reference
def test_the_shared_memory_of_a_block_is_that_counted_by_hand():
    # Six stages of two units: 12 tiles of W in two halves and 16 of x, 512 bytes each; barriers, flag, a scale a row.
    ring, rest = 6 * 2 * (24 + 16) * 512, 6 * 16 + 16 + 4 * 8 * 16
    held, totals, fp8 = (
        group_shared_bytes(16, 12, 2, 6, 1, **about) for about in ({"held": True}, {}, {"held": True, "fp8": True})
    )
    assert held == ring + rest
    assert totals - held == 4 * (8 * 16) * (16 * 12), "a total in fp32 for each product"
    assert held - fp8 == 6 * 2 * 12 * 512, "W in half the bytes"
    assert group_shared_bytes(16, 12, 1, 2, 1, held=True) == 4 * 20 * 8 * 16 * 12 + 2 * 16 + 16 + 512, "room for sums"


@pytest.mark.reference
@pytest.mark.parametrize("setting", [{**HELD, "x_tiles": 32}, {**HELD, "split": 4}, {**RING, "held": True}])
def test_what_cannot_hold_its_totals_is_refused(setting):
    inputs = CARD.example(CASE, proof.generator(6, torch.device("cpu")), torch.device("cpu"))
    with pytest.raises(KernelLimit, match="set held=False"):
        CARD.launches("sm_90a", CASE, inputs, CARD.outputs(CASE, inputs), **setting)


@pytest.mark.compiled
@pytest.mark.parametrize(("x_tiles", "w_tiles", "units"), [(16, 12, 1), (24, 8, 2)])
def test_blocks_that_hold_their_totals_do_so_without_spills(x_tiles, w_tiles, units):
    tiling = deepest("sm_90a", Tiling("group", x_tiles, w_tiles, units, 16, held=True), 128, blocks=1)
    epilogue = Epilogue("swiglu", quads=2, ordered_tiles=x_tiles)
    variant = gemm_variant("sm_90a", "bf16", epilogue, tiling, packed=True, ragged=False)
    compiled = compile_variant(variant, "sm_90a", disassemble=True)
    assert compiled.faults(variant) == []
    assert compiled.sass["USETMAXREG"] == 2, "the assembler ignores the hand-over where it cannot follow it"
    assert tiling.stages > deepest("sm_90a", replace(tiling, held=False, stages=16), 128, blocks=1).stages
