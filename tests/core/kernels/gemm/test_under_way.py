"""Blocks that share K with products under way between units: the same bits, where it is possible, without spills."""

import struct
from types import SimpleNamespace

import pytest
import torch
from rings import exhaustive_but
from test_gemm_group import RING_BUGS

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.candidates import fp8_candidates, gemm_candidates
from eagle3core.kernels.gemm.card import CARD, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.group import keeps_under_way
from eagle3core.kernels.gemm.held import held_registers, launched_registers
from eagle3core.kernels.gemm.launcher import gemm_variant
from eagle3core.kernels.gemm.tiling import Tiling, deepest

CPU = torch.device("cpu")
CASE = {"kind": "store", "m": 19, "n": 80, "k": 528, "dtype": "bf16", "packed": True}
SHARED = {"kernel": "group", "x_tiles": 3, "w_tiles": 4, "units": 2, "stages": 2, "split": 4, "ahead": True}
RING = {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}


def launches_of(case=CASE, **setting):
    inputs = CARD.example(case, proof.generator(6, CPU), CPU)
    return gemm_launches("sm_90a", case, inputs, CARD.outputs(case, inputs), **{**SHARED, **setting})


def emulator_with(**replaced):
    return SimpleNamespace(**{n: v for n, v in vars(emulator).items() if n[0] != "_"} | replaced)


CASES = [
    ({}, {"together": True}),  # streams of 4 and 5 units: a stage that starts earlier
    ({"m": 30}, {"x_tiles": 2}),  # two blocks of x; who comes last adds the sums
    ({"k": 80}, {"together": True}),  # a stream without units
    ({"k": 1040}, {"units": 4, "stages": 3}),
    ({"kind": "swiglu", "n": 40, "norm": True}, {"together": True, "stages": 3}),
    pytest.param({"n": 144, "dtype": "f16"}, {"w_tiles": 8, "together": True}, marks=pytest.mark.slow),
]


@pytest.mark.emulated
@pytest.mark.parametrize(("case", "setting"), CASES)
def test_bits_equal_those_of_the_ring(case, setting):
    case = {**CASE, **case}
    inputs = CARD.example(case, proof.generator(6, CPU), CPU)
    outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**SHARED, **setting})
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    assert proof.differing(outputs["y"], expected["y"]) == 0
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "x_tiles", "w_tiles"), [(256, 4096, 32, 8), (187, 4096, 24, 8), (128, 6144, 16, 12)]
)
@pytest.mark.parametrize("k", [4096, 14336, 4240])
def test_bits_equal_those_of_the_chosen_tiling_on_the_gpu(m, n, x_tiles, w_tiles, k, gpu):
    device, arch, execute = gpu
    if arch != "sm_90a":
        pytest.skip(f"warpgroups multiply on sm_90a alone, and this is {arch}")
    case = {**CASE, "m": m, "n": n, "k": k}
    tiling = deepest(arch, Tiling("group", x_tiles, w_tiles, 2, 8, split=4, together=True, ahead=True), 128, blocks=1)
    setting = {name: getattr(tiling, name) for name in (*SHARED, "together")}
    for seed in range(2):
        inputs = CARD.example(case, proof.generator(seed, device), device)
        ours, chosen = (proof.run(CARD, arch, case, inputs, execute, each) for each in (setting, {}))
        assert proof.differing(ours["y"], chosen["y"]) == 0


@pytest.mark.emulated
@pytest.mark.parametrize(("plant", "message"), RING_BUGS)
def test_a_planted_bug_in_the_ring_is_found(plant, message):
    with pytest.raises(EmulationError, match=message):
        emulator.execute(launches_of(), isa=plant())


@pytest.mark.emulated
def test_a_stage_that_is_left_with_products_under_way_or_never_is_found():
    launches = launches_of({**CASE, "k": 1040})  # more stages than the ring has
    emulator.execute(launches)
    hasty = emulator_with(GROUP_WAIT=emulator.GROUP_WAIT[3:] * 4)
    with pytest.raises(EmulationError, match=r"overwritten while a product|overwrites shared"):
        emulator.execute(launches, isa=hasty)
    staying = emulator_with(mbarrier_arrive_below=lambda barrier, index, end: None)
    with pytest.raises(EmulationError, match="deadlock"):
        emulator.execute(launches, isa=staying)


@pytest.mark.emulated
def test_sums_that_are_left_before_the_last_products_are_done_are_found():
    hasty = emulator_with(group_settle=lambda n: lambda sums: None)
    with pytest.raises(struct.error, match="not a float"):  # but a sum that is under way
        emulator.execute(launches_of(), isa=hasty)


@pytest.mark.reference
@pytest.mark.parametrize("changed", [{"split": 1}, {"units": 1}, {"cluster": 2}, {"x_tiles": 32, "w_tiles": 12}, RING])
def test_what_cannot_keep_products_under_way_is_refused(changed):
    inputs = CARD.example(CASE, proof.generator(6, CPU), CPU)
    with pytest.raises(KernelLimit, match="set ahead=False"):
        CARD.launches("sm_90a", CASE, inputs, CARD.outputs(CASE, inputs), **{**SHARED, **changed})


@pytest.mark.reference
def test_sweeps_try_it_where_four_blocks_that_share_k_run_at_once():
    def tried(rows, n_w):
        found = gemm_candidates("sm_90a", rows, n_w // 16, 4096, packed=True)
        return {(one.x_tiles, one.w_tiles) for one in found if one.ahead}

    assert tried(256, 4096) == {(32, 8)}, "12 tiles of W by 256 rows have too few registers"
    assert tried(128, 4096) == {(16, 8), (16, 12)}
    assert tried(128, 6144) == {(16, 12)}
    assert tried(256, 28672) == set(), "896 blocks"
    assert not any(one.ahead for one in fp8_candidates("sm_90a", 256, 256, 4096))


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("x_tiles", exhaustive_but([9, 16, 24, 32], range(9, 33)))
def test_blocks_of_every_height_are_made_without_spills(x_tiles):
    for w_tiles in (8, 12):
        if not keeps_under_way(x_tiles, w_tiles, 2, 4, 1):
            continue
        tiling = Tiling("group", x_tiles, w_tiles, 2, 8, split=4, together=True, ahead=True)
        tiling = deepest("sm_90a", tiling, 128, blocks=1)
        assert tiling.units == 2
        variant = gemm_variant("sm_90a", "bf16", Epilogue("residual"), tiling, packed=True, ragged=False)
        # The assembler ignores a hand-over of registers that it cannot follow: two USETMAXREG are expected.
        made = compile_variant(variant, "sm_90a", disassemble=True)
        assert made.faults(variant) == []
        assert made.registers == launched_registers(w_tiles)
        assert f"setmaxnreg.inc.sync.aligned.u32 {held_registers(w_tiles)}" in made.ptx
