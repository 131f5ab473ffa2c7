"""The GEMM of warpgroups: its numbers in every corner of its ring, and the classical bugs of rings, planted."""

from dataclasses import replace

import pytest
import torch
from faulty_emulator import faulty
from gemm_examples import example
from warpgroup_products import GROUP, RING, RING_BUGS, STORE, run

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.card import CARD, gemm_launches, gemm_variants_of
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.group import group_totals_in_shared
from eagle3core.kernels.gemm.launcher import gemm, gemm_variant
from eagle3core.kernels.gemm.tiling import Tiling


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({}, {"units": 2}),  # streams of 4 and 5 units: stages that are not full, and one that starts earlier
        ({}, {"units": 2, "split": 4, "stages": 5}),
        ({"k": 80}, {}),  # a stream without units
        ({"k": 80}, {"split": 4}),
        pytest.param(
            {"m": 41, "n": 144}, {"split": 4, "x_tiles": 3, "w_tiles": 8, "together": True}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"m": 41, "n": 80, "k": 160, "dtype": "f16"},
            {"x_tiles": 5, "units": 2, "stages": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param({"m": 20, "n": 144, "k": 128}, {"w_tiles": 8, "x_tiles": 1}, marks=pytest.mark.slow),
        ({"m": 16, "n": 80, "k": 128}, {"x_tiles": 1, "stages": 2, "cluster": 2}),  # tiles past the last
        pytest.param({"m": 30, "n": 48}, {"x_tiles": 1, "units": 2, "stages": 3, "cluster": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"m": 27, "n": 144, "k": 272},
            {"x_tiles": 1, "w_tiles": 8, "split": 4, "cluster": 4},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bits_equal_those_of_the_ring(case, setting):
    case = {**STORE, **case}
    inputs, outputs = run(None, case, **setting)
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    assert proof.differing(outputs["y"], expected["y"]) == 0
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


@pytest.mark.reference
def test_totals_leave_the_registers_of_wide_blocks_only():
    assert not group_totals_in_shared(4, 4, 1)
    assert group_totals_in_shared(4, 4, 1, blocks=True), "sums of a block of scales are beside those of a stream"
    assert group_totals_in_shared(5, 4, 1)
    assert not group_totals_in_shared(16, 8, 4)


# ---- blocks that finish together


@pytest.mark.emulated
def test_counters_are_ready_for_the_next_launch_and_a_block_that_never_arrives_is_a_deadlock():
    setting = {"split": 4, "together": True}
    inputs = example(STORE, 6)
    outputs = CARD.outputs(STORE, inputs)
    launches = gemm_launches("sm_90a", STORE, inputs, outputs, **{**GROUP, **setting})
    emulator.execute(launches)
    counters = launches[-1].values[[p.name for p in launches[-1].variant.parameters].index("counters")]
    assert counters.count_nonzero() == 0
    absent = faulty(wait_count=lambda address, value: emulator.wait_count(address, 2 * value))
    with pytest.raises(EmulationError, match="deadlock: 4 blocks wait for a count"):
        run(absent, **setting)


@pytest.mark.emulated
def test_sums_added_before_the_others_have_arrived_are_found():
    hasty = faulty(wait_count=lambda address, value: None)
    inputs, outputs = run(hasty, split=4, together=True)
    assert not all(d.passes for d in proof.deviations(CARD, STORE, inputs, outputs))


# ---- planted bugs


@pytest.mark.emulated
@pytest.mark.parametrize(("plant", "message"), RING_BUGS)
def test_a_planted_bug_in_the_ring_is_found(plant, message):
    with pytest.raises(EmulationError, match=message):
        run(plant())


@pytest.mark.emulated
def test_a_stage_released_before_its_products_are_done_is_found():
    """The barrier is told before the wait; the copy that follows overwrites x under the tensor cores."""

    def early(n):
        settle = emulator.group_settle(n)
        empty = {}

        def group_settle(sums):
            lane = emulator.lane()
            at = sorted(lane.block.mbarriers)
            turn = empty[lane.index] = empty.get(lane.index, -1) + 1
            emulator.cuda.syncwarp()
            if lane.index % 32 == 0:
                emulator.mbarrier_arrive(at[GROUP["stages"] + turn % GROUP["stages"]])
            emulator.named_barrier(2, 32 * GROUP["w_tiles"])
            for _ in range(4):
                emulator.cuda.syncwarp()
            settle(sums)

        return group_settle

    def mbarrier_arrive(address):
        if emulator.cuda.threadIdx.x >= 32 * GROUP["w_tiles"]:
            emulator.mbarrier_arrive(address)

    with pytest.raises(EmulationError, match=r"overwritten while a product|overwrites shared"):
        run(faulty(group_settle=early, mbarrier_arrive=mbarrier_arrive))


# ---- limits


@pytest.mark.reference
@pytest.mark.parametrize(("packed", "changed"), [(False, {}), (True, {"units": 4})], ids=["rows", "units"])
def test_what_the_kernel_cannot_do_is_refused_with_the_way_out(packed, changed):
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((20, 64), (32, 64), (20, 32)))
    tiling = replace(Tiling(**GROUP), **changed)
    with pytest.raises(KernelLimit, match="pack the weight"):
        gemm("sm_90a", Epilogue("store"), x=x, w=w, y=y, k=64, packed=packed, weight_rows=32, tiling=tiling,
             operands={})  # fmt: skip


@pytest.mark.reference
def test_only_packed_weights_on_sm_90a_are_given_to_warpgroups():
    case = {**STORE, "m": 240, "n": 4096, "k": 4096}

    def kernel(arch, **changed):
        return gemm_variants_of(arch, {**case, **changed}, **GROUP)[-1].name.split("_")[3]

    assert kernel("sm_90a") == "group"
    assert kernel("sm_90a", packed=False) == "tile"
    assert kernel("sm_120") == "tile"


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("tiling", [Tiling("group", 8, 8, 2, 4, split=4), Tiling("group", 15, 16, 1, 4)])
def test_products_of_a_warpgroup_are_not_serialised(tiling):
    variant = gemm_variant("sm_90a", "bf16", Epilogue("store"), tiling, True, False)
    made = compile_variant(variant, "sm_90a", disassemble=True)
    assert made.faults(variant) == []
    assert made.sass["WARPGROUP"] == 2  # one fence and one wait for a stage's products
