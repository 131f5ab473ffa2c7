"""Products under way between units, of blocks that share K and of wide ones that do not: bits, limits, no spills."""

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
ALONE = {**SHARED, "x_tiles": 5, "units": 1, "stages": 4, "split": 1}  # two stages of one unit at once
EVEN = {**CASE, "k": 1024}  # of which every stream has whole pairs
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
    (EVEN, ALONE),
    ({"k": 256, "m": 50}, {**ALONE, "stages": 8}),  # one pair a stream
    ({**EVEN, "kind": "swiglu", "n": 40, "norm": True}, {**ALONE, "stages": 6}),
    pytest.param({**EVEN, "m": 90, "n": 144, "dtype": "f16"}, {**ALONE, "w_tiles": 8}, marks=pytest.mark.slow),
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
@pytest.mark.parametrize("k", [4096, 14336, 4240])
@pytest.mark.parametrize(
    ("m", "x_tiles", "w_tiles", "split"),
    [(256, 32, 8, 4), (187, 24, 8, 4), (128, 16, 12, 4), (256, 32, 8, 1), (300, 24, 8, 1)],
)
def test_bits_equal_those_of_the_chosen_tiling_on_the_gpu(m, x_tiles, w_tiles, split, k, gpu):
    device, arch, execute = gpu
    if arch != "sm_90a":
        pytest.skip(f"warpgroups multiply on sm_90a alone, and this is {arch}")
    if split == 1 and k % 256:
        k -= k % 256
    case = {**CASE, "m": m, "n": 4096, "k": k}
    tiling = Tiling("group", x_tiles, w_tiles, 2 if split > 1 else 1, 8, split=split, together=split > 1, ahead=True)
    tiling = deepest(arch, tiling, 128, blocks=1)
    setting = {name: getattr(tiling, name) for name in (*SHARED, "together")} | {"stages": tiling.stages // 2 * 2}
    for seed in range(2):
        inputs = CARD.example(case, proof.generator(seed, device), device)
        ours, chosen = (proof.run(CARD, arch, case, inputs, execute, each) for each in (setting, {}))
        assert proof.differing(ours["y"], chosen["y"]) == 0


@pytest.mark.emulated
@pytest.mark.parametrize("setting", [SHARED, ALONE], ids=["shared", "alone"])
@pytest.mark.parametrize(("plant", "message"), RING_BUGS)
def test_a_planted_bug_in_the_ring_is_found(plant, message, setting):
    with pytest.raises(EmulationError, match=message):
        emulator.execute(launches_of(EVEN, **setting), isa=plant())


@pytest.mark.emulated
@pytest.mark.parametrize("setting", [SHARED, ALONE], ids=["shared", "alone"])
def test_a_stage_that_is_left_with_products_under_way_or_never_is_found(setting):
    launches = launches_of(EVEN, **setting)  # more stages than the ring has
    emulator.execute(launches)
    hasty = emulator_with(GROUP_WAIT=emulator.GROUP_WAIT[3:] * 4)
    with pytest.raises(EmulationError, match=r"overwritten while a product|overwrites shared"):
        emulator.execute(launches, isa=hasty)
    staying = emulator_with(mbarrier_arrive_below=lambda barrier, index, end: None)
    with pytest.raises(EmulationError, match="deadlock"):
        emulator.execute(launches, isa=staying)


@pytest.mark.emulated
@pytest.mark.parametrize("setting", [SHARED, ALONE], ids=["shared", "alone"])
def test_sums_that_are_left_before_the_last_products_are_done_are_found(setting):
    hasty = emulator_with(group_settle=lambda n: lambda sums: None)
    with pytest.raises((struct.error, TypeError), match=r"not a float|UnderWay"):  # but a sum that is under way
        emulator.execute(launches_of(EVEN, **setting), isa=hasty)


@pytest.mark.reference
@pytest.mark.parametrize(
    "changed",
    [
        {"split": 1},
        {"units": 1},
        {"cluster": 2},
        {"x_tiles": 32, "w_tiles": 12},
        RING,
        ALONE,  # K of streams of 4 and 5 units
    ],
)
def test_what_cannot_keep_products_under_way_is_refused(changed):
    inputs = CARD.example(CASE, proof.generator(6, CPU), CPU)
    with pytest.raises(KernelLimit, match="set ahead=False"):
        CARD.launches("sm_90a", CASE, inputs, CARD.outputs(CASE, inputs), **{**SHARED, **changed})


@pytest.mark.reference
@pytest.mark.parametrize("changed", [{"stages": 2}, {"stages": 5}, {"x_tiles": 4}, {"units": 2}])
def test_what_cannot_take_stages_by_pairs_is_refused(changed):
    inputs = CARD.example(EVEN, proof.generator(6, CPU), CPU)
    with pytest.raises(KernelLimit, match="set ahead=False"):
        CARD.launches("sm_90a", EVEN, inputs, CARD.outputs(EVEN, inputs), **{**ALONE, **changed})


@pytest.mark.reference
def test_sweeps_try_it_where_four_blocks_that_share_k_run_at_once():
    def tried(rows, n_w, split, k=4096):
        found = gemm_candidates("sm_90a", rows, n_w // 16, k, packed=True)
        return {(one.x_tiles, one.w_tiles) for one in found if one.ahead and one.split == split}

    assert tried(256, 4096, 4) == {(32, 8)}, "12 tiles of W by 256 rows have too few registers"
    assert tried(128, 4096, 4) == {(16, 8), (16, 12)}
    assert tried(128, 6144, 4) == {(16, 12)}
    assert tried(256, 28672, 4) == set(), "896 blocks"
    assert tried(256, 28672, 1) == {(32, 4), (32, 8), (16, 4), (16, 8)}
    assert tried(256, 28672, 1, k=4096 + 128) == set(), "streams of 33 units"
    assert not any(one.ahead for one in fp8_candidates("sm_90a", 256, 256, 4096))


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("x_tiles", exhaustive_but([9, 16, 24, 32], range(9, 33)))
def test_blocks_of_every_height_are_made_without_spills(x_tiles):
    for w_tiles, units, split in ((8, 2, 4), (12, 2, 4), (8, 1, 1), (12, 1, 1)):
        if not keeps_under_way(x_tiles, w_tiles, units, split, 1):
            continue
        tiling = Tiling("group", x_tiles, w_tiles, units, 8, split=split, together=split > 1, ahead=True)
        tiling = deepest("sm_90a", tiling, 128, blocks=1)
        assert tiling.units == units
        variant = gemm_variant("sm_90a", "bf16", Epilogue("swiglu", quads=2), tiling, packed=True, ragged=False)
        # The assembler ignores a hand-over of registers that it cannot follow: two USETMAXREG are expected.
        made = compile_variant(variant, "sm_90a", disassemble=True)
        assert made.faults(variant) == []
        assert made.registers == launched_registers(w_tiles)
        assert f"setmaxnreg.inc.sync.aligned.u32 {held_registers(w_tiles)}" in made.ptx
