"""Warpgroups that hold their totals, in blocks that stay: the same bits, where it is possible, and without spills."""

import re

import pytest
import torch
from faulty_emulator import faulty
from rings import exhaustive_but
from warpgroup_products import RING, RING_BUGS

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.candidates import gemm_candidates
from eagle3core.kernels.gemm.card import CARD, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.held import (
    held_registers,
    held_shared_bytes,
    held_threads,
    holds_totals,
    launched_registers,
)
from eagle3core.kernels.gemm.launcher import gemm_variant
from eagle3core.kernels.gemm.tiling import MULTIPROCESSORS, Tiling, deepest

CASE = {"kind": "store", "m": 41, "n": 80, "k": 272, "dtype": "bf16", "packed": True}
HELD = {"kernel": "group", "x_tiles": 3, "w_tiles": 4, "units": 1, "stages": 5, "split": 1, "held": True}
QKV = {"kind": "qkv", "m": 27, "k": 272, "q_heads": 3, "kv_heads": 1, "head_dim": 32, "block": 16, "norm": True}


def example(case):
    return CARD.example(case, proof.generator(6, torch.device("cpu")), torch.device("cpu"))


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({}, {"resident": 2}),  # four blocks, of which the last have tiles and rows past the end
        ({"k": 80}, {"stages": 2}),  # a stream without units
        ({"k": 80}, {"units": 2, "stages": 2, "resident": 1}),
        (
            {"k": 528, "m": 20, "n": 48},
            {"x_tiles": 1, "units": 2, "stages": 3, "resident": 2},
        ),  # stages that are not full
        ({"k": 80, "kind": "swiglu", "n": 40, "m": 25, "norm": True}, {"x_tiles": 1, "stages": 7, "resident": 1}),
        ({"kind": "residual", "m": 30, "n": 64, "norm": True}, {"x_tiles": 2, "units": 2, "stages": 3, "resident": 3}),
        (
            {"kind": "swiglu", "m": 25, "n": 40, "norm": True},
            {"x_tiles": 2, "resident": 1},
        ),  # one after the other
        ({"m": 29}, {"x_tiles": 2, "cluster": 2, "resident": 2}),
        pytest.param(QKV, {"x_tiles": 1, "w_tiles": 8, "resident": 2}, marks=pytest.mark.slow),
        pytest.param({"kind": "head", "n": 96, "norm": True}, {"resident": 3, "stages": 8}, marks=pytest.mark.slow),
    ],
)
def test_bits_equal_those_of_the_ring(case, setting):
    case = {**CASE, **case}
    inputs = example(case)
    outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**HELD, **setting})
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    assert {name: proof.differing(outputs[name], expected[name]) for name in outputs} == dict.fromkeys(outputs, 0)
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


SCALED = {**CASE, "kind": "swiglu", "n": 16, "m": 60, "norm": True}  # three blocks of rows
# The last 32 bytes: barriers of two blocks' scales that are there, then of their having been read.
THERE, READ = (held_shared_bytes(3, 4, 1, 5) - at for at in (32, 16))


def without(name, barriers):
    """The emulator whose instruction `name` does nothing at some barriers of a block of `HELD`."""

    def act(barrier, *operands):
        return None if barrier in barriers else getattr(emulator, name)(barrier, *operands)

    return faulty(**{name: act})


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("name", "barriers", "message"),
    [
        ("mbarrier_arrive", (THERE,), "deadlock"),
        ("mbarrier_arrive", (READ, READ + 8), "deadlock"),
        ("mbarrier_wait", (THERE, THERE + 8), "race|never written"),
        ("mbarrier_wait", (READ, READ + 8), "race"),
    ],
)
def test_scales_that_are_read_too_early_overwritten_or_never_announced_are_found(name, barriers, message):
    inputs = example(SCALED)
    launches = gemm_launches("sm_90a", SCALED, inputs, CARD.outputs(SCALED, inputs), **HELD, resident=1)
    emulator.execute(launches)
    with pytest.raises(EmulationError, match=message):
        emulator.execute(launches, isa=without(name, barriers))


@pytest.mark.emulated
@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize(("plant", "message"), RING_BUGS)
def test_a_planted_bug_in_the_ring_of_a_block_that_stays_is_found(plant, message, units):
    inputs, setting = example(CASE), {**HELD, "resident": 2, "stages": 2, "units": units}
    launches = gemm_launches("sm_90a", CASE, inputs, CARD.outputs(CASE, inputs), **setting)
    emulator.execute(launches)
    with pytest.raises(EmulationError, match=message):
        emulator.execute(launches, isa=plant())


@pytest.mark.emulated
def test_a_stage_that_is_left_with_products_under_way_or_never_is_found():
    """Of two units a stage the products of the last stay under way while the next stage's first are asked for."""
    inputs, setting = example(CASE), {**HELD, "resident": 2, "stages": 2, "units": 2}
    launches = gemm_launches("sm_90a", CASE, inputs, CARD.outputs(CASE, inputs), **setting)
    hasty = faulty(GROUP_WAIT=emulator.GROUP_WAIT[3:] * 4)
    with pytest.raises(EmulationError, match=r"overwritten while a product|overwrites shared"):
        emulator.execute(launches, isa=hasty)
    staying = faulty(mbarrier_arrive_below=lambda barrier, index, end: None)
    with pytest.raises(EmulationError, match="deadlock"):
        emulator.execute(launches, isa=staying)


@pytest.mark.reference
def test_totals_are_held_where_registers_are_left_for_them():
    fits = {(x, w, u) for x in (16, 24, 32) for w in (6, 8, 12, 16) for u in (1, 2) if holds_totals(x, w, u)}
    assert fits == {(16, 8, 1), (16, 8, 2), (16, 12, 1), (24, 8, 1), (24, 8, 2)}


@pytest.mark.reference
def test_what_a_block_takes_is_what_is_counted_by_hand():
    assert [held_threads(w_tiles) for w_tiles in (8, 12)] == [384, 512], "a warp a tile, and a warpgroup that fetches"
    # 65536 registers of a processor over 256, 384, 512 and 640 lanes, in steps of 8; 240 at most.
    assert [launched_registers(w_tiles) for w_tiles in (4, 8, 12, 16)] == [240, 168, 128, 96]
    # Those of 8, 12, 16 and 20 warps less 4 warps' of 48 a lane, over the others: (12 * 168 - 192) / 8 = 228.
    assert [held_registers(w_tiles) for w_tiles in (4, 8, 12, 16)] == [240, 224, 152, 104]
    # Six stages of two units: 12 tiles of W in two halves and 16 of x, 512 bytes each; two scales a row; barriers.
    assert held_shared_bytes(16, 12, 2, 6) == 6 * 2 * (24 + 16) * 512 + 2 * 4 * (8 * 16) + 8 * (6 + 6 + 4)


@pytest.mark.emulated
@pytest.mark.parametrize("w_tiles", [8, 12])
def test_a_block_has_the_registers_it_asks_for_and_none_more(w_tiles):
    """Those of a processor that its launch left over are not its own: who asks for them waits for ever."""
    case = {**CASE, "m": 8, "n": 16 * w_tiles, "k": 96}
    inputs = example(case)
    launches = gemm_launches(
        "sm_90a", case, inputs, CARD.outputs(case, inputs), **{**HELD, "x_tiles": 1, "w_tiles": w_tiles, "stages": 2}
    )
    emulator.execute(launches)
    greedy = faulty(more_registers=lambda n: emulator.more_registers(n + 8))
    with pytest.raises(EmulationError, match="deadlock"):
        emulator.execute(launches, isa=greedy)


@pytest.mark.reference
@pytest.mark.parametrize(
    "setting",
    [
        {**HELD, "x_tiles": 32, "w_tiles": 12},
        {**HELD, "split": 4},
        {**HELD, "cluster": 2, "resident": 3},
        {**HELD, "w_tiles": 6},
        {**RING, "held": True},
    ],
)
def test_what_cannot_hold_its_totals_is_refused(setting):
    inputs = example(CASE)
    with pytest.raises(KernelLimit, match="set held=False"):
        CARD.launches("sm_90a", CASE, inputs, CARD.outputs(CASE, inputs), **setting)


@pytest.mark.reference
def test_sweeps_try_blocks_that_stay_and_blocks_of_one_tile():
    found = {(one.x_tiles, one.w_tiles, one.units, one.resident) for one in gemm_candidates(
        "sm_90a", 512, 1792, 4096, packed=True) if one.held}  # fmt: skip
    heights = {(16, 12): (1,), (22, 8): (1, 2), (16, 8): (1, 2), (8, 8): (1, 2), (16, 4): (1, 2), (8, 4): (1, 2)}
    shapes = {(*block, units) for block, deep in heights.items() for units in deep}
    assert found == {(*shape, resident) for shape in shapes for resident in (0, MULTIPROCESSORS)}
    paired = {
        one.x_tiles for one in gemm_candidates("sm_90a", 512, 1792, 4096, packed=True) if one.held and one.cluster > 1
    }
    assert paired == {8, 16}, "three blocks of 176 rows have no pairs"
    long = [one for one in gemm_candidates("sm_90a", 2048, 256, 4096, packed=True) if one.held and one.w_tiles == 8]
    assert {(one.x_tiles, one.cluster) for one in long} == {
        (24, 1), (22, 1), (22, 2), (16, 1), (16, 2), (8, 1), (8, 2)
    }, "eleven blocks of 192 rows, or twelve of 176, which pair"  # fmt: skip
    narrow = [one for one in gemm_candidates("sm_90a", 64, 1792, 4096, packed=True) if one.held]
    assert {(one.x_tiles, one.w_tiles, one.units) for one in narrow} == {(8, 8, 4), (8, 8, 2)}
    assert {one.resident for one in narrow} == {MULTIPROCESSORS}
    assert not any(one.held for one in gemm_candidates("sm_90a", 64, 1056, 4096, packed=True)), "a block each"


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("x_tiles", exhaustive_but([9, 16, 22, 23, 24], range(9, 25)))
def test_blocks_of_every_height_that_a_sweep_tries_are_made_without_spills(x_tiles):
    tiling = deepest("sm_90a", Tiling("group", x_tiles, 8, 2, 8, held=True), 128, blocks=1)
    variant = gemm_variant("sm_90a", "bf16", Epilogue("swiglu", quads=2), tiling, packed=True, ragged=False)
    assert compile_variant(variant, "sm_90a", disassemble=True).faults(variant) == []


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "x_tiles", "w_tiles", "units", "stages"),
    [
        ("swiglu", 16, 12, 1, 16),
        ("residual", 24, 8, 2, 16),
        ("store", 3, 4, 1, 5),
        ("store", 16, 4, 2, 16),
        ("store", 8, 8, 2, 16),
        ("store", 8, 4, 2, 16),
    ],  # the last three for small maps of 128 and 256 rows
)
def test_blocks_that_hold_their_totals_have_the_registers_and_do_so_without_spills(
    kind, x_tiles, w_tiles, units, stages
):
    tiling = Tiling("group", x_tiles, w_tiles, units, stages, held=True, cluster=2 if kind == "residual" else 1)
    tiling = deepest("sm_90a", tiling, 128, blocks=1)
    epilogue = Epilogue(kind, quads=2 if kind == "swiglu" else 0, ordered_tiles=x_tiles)
    variant = gemm_variant("sm_90a", "bf16", epilogue, tiling, packed=True, ragged=False)
    # The assembler ignores a hand-over of registers that it cannot follow: two USETMAXREG are expected.
    made = compile_variant(variant, "sm_90a", disassemble=True)
    assert made.faults(variant) == []
    assert made.registers == launched_registers(w_tiles)
    asked = [int(n) for n in re.findall(r"setmaxnreg\.(?:dec|inc)\.sync\.aligned\.u32 (\d+)", made.ptx)]
    assert asked == [48, held_registers(w_tiles)]
    assert 4 * asked[0] + w_tiles * asked[1] <= (4 + w_tiles) * made.registers
