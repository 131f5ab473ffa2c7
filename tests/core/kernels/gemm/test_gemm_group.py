"""The GEMM of warpgroups: its numbers in every corner of its ring, and the classical bugs of rings, planted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.card import CARD, gemm_launches, gemm_variants_of
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.group import group_totals_in_shared
from eagle3core.kernels.gemm.launcher import gemm, gemm_variant
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.gemm.scratch import workspace
from eagle3core.kernels.gemm.tiling import Tiling, deepest

CPU = torch.device("cpu")
STORE = {"kind": "store", "m": 11, "n": 48, "k": 528, "dtype": "bf16", "packed": True}
GROUP = {"kernel": "group", "x_tiles": 2, "w_tiles": 4, "units": 1, "stages": 3, "split": 1}
RING = {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}


def example(case, seed=6):
    return CARD.example(case, proof.generator(seed, CPU), CPU)


def faulty(**replaced):
    """The emulator's instruction set with some names replaced."""
    return SimpleNamespace(**{n: v for n, v in vars(emulator).items() if n[0] != "_"} | replaced)


def run(isa, case=STORE, **setting):
    inputs = example(case)
    outputs = CARD.outputs(case, inputs)
    emulator.execute(gemm_launches("sm_90a", case, inputs, outputs, **{**GROUP, **setting}), isa=isa)
    return inputs, outputs


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
    inputs = example(STORE)
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


def waits_that_pass(which):
    """`mbarrier_wait` that returns at once for warps that fetch (False) or that multiply (True)."""

    def mbarrier_wait(address, parity):
        if (emulator.cuda.threadIdx.x < 32 * GROUP["w_tiles"]) != which:
            emulator.mbarrier_wait(address, parity)

    return faulty(mbarrier_wait=mbarrier_wait)


def no_empty_wait():
    return waits_that_pass(False)


def no_full_wait():
    return waits_that_pass(True)


def wrong_parity():
    return faulty(mbarrier_wait=lambda address, parity: emulator.mbarrier_wait(address, parity ^ 1))


def too_few_bytes():
    return faulty(mbarrier_expect=lambda address, n_bytes: emulator.mbarrier_expect(address, n_bytes - 1024))


def too_many_bytes():
    return faulty(mbarrier_expect=lambda address, n_bytes: emulator.mbarrier_expect(address, n_bytes + 1024))


RING_BUGS = [
    (no_empty_wait, "race: lanes"),
    (no_full_wait, "race|nobody has written"),
    (wrong_parity, "deadlock|race|nobody has written"),
    (too_few_bytes, "deadlock|race|nobody has written"),
    (too_many_bytes, "deadlock"),
]


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
    from eagle3core.kernels.compile import compile_variant

    variant = gemm_variant("sm_90a", "bf16", Epilogue("store"), tiling, True, False)
    made = compile_variant(variant, "sm_90a", disassemble=True)
    assert made.faults(variant) == []
    assert made.sass["WARPGROUP"] == 2  # one fence and one wait for a stage's products


# ---- blocks of a cluster that fetch W for each other


PAIR = {"x_tiles": 1, "stages": 2, "cluster": 2}
SMALL = {**STORE, "m": 16, "n": 16, "k": 128}


def lonely_arrival(address, rank):
    """At the own block's barrier alone."""
    if rank == emulator.cluster.rank():
        emulator.mbarrier_arrive(address)


def few_arrivals(address, count):
    """Half of those that a stage's `empty` waits for: as many as one block's warps make."""
    emulator.mbarrier_init(address, 4 if count == 8 else count)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"mbarrier_arrive": lonely_arrival}, "deadlock"),
        ({"arrive": lambda: None, "wait": lambda: None}, "no mbarrier|after its end"),
        ({"wait": lambda: None, "arrive": emulator.cluster.arrive}, "no mbarrier"),
    ],
)
def test_blocks_of_a_cluster_that_do_not_wait_for_each_other_are_found(replaced, words):
    isa = faulty(cluster=SimpleNamespace(**{**vars(emulator.cluster), **replaced}))
    with pytest.raises(EmulationError, match=words):
        run(isa, SMALL, **PAIR)


@pytest.mark.emulated
def test_a_block_that_writes_into_another_before_that_one_has_read_is_found():
    with pytest.raises(EmulationError, match=r"race|overwritten"):
        run(faulty(mbarrier_init=few_arrivals), {**SMALL, "k": 256}, **PAIR)


@pytest.mark.emulated
def test_a_block_that_ends_while_another_may_still_reach_it_is_found():
    met = []

    def wait_once():
        lane = emulator.lane()
        if (id(lane.block), lane.index) not in met:
            met.append((id(lane.block), lane.index))
            emulator.cluster.wait()

    isa = faulty(cluster=SimpleNamespace(**{**vars(emulator.cluster), "wait": wait_once}))
    with pytest.raises(EmulationError, match="reached after its end"):
        run(isa, {**SMALL, "k": 256}, **PAIR)


@pytest.mark.reference
def test_a_cluster_is_of_warpgroups_divides_the_tiles_of_w_and_shrinks_to_the_blocks_there_are():
    def launched(rows, **setting):
        case = {**STORE, "m": rows}
        inputs = example(case)
        return gemm_launches("sm_90a", case, inputs, CARD.outputs(case, inputs), **{**GROUP, **setting})[-1]

    assert launched(32, cluster=2).variant.cluster == (1, 2, 1)
    assert launched(48, cluster=2).variant.cluster == (1, 1, 1), "three blocks of 16 rows"
    assert launched(48, cluster=2).variant == launched(48).variant
    for wrong in ({"cluster": 3}, {**RING, "cluster": 2}):
        with pytest.raises(KernelLimit, match="blocks a cluster"):
            launched(48, **wrong)


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize(("x_tiles", "w_tiles", "units", "stages"), [(16, 12, 2, 3), (16, 8, 2, 5), (32, 8, 1, 4)])
def test_clusters_compile_without_spills_waits_for_memory_in_the_loop_or_products_one_by_one(
    x_tiles, w_tiles, units, stages
):
    tiling = Tiling("group", x_tiles, w_tiles, units, stages, cluster=4)
    variant = gemm_variant("sm_90a", "bf16", Epilogue("residual"), tiling, True, False)
    made = compile_variant(variant, "sm_90a", disassemble=True)
    assert made.faults(variant) == []
    assert made.sass["MEMBAR"] <= 4, "those of the cluster's two meetings"


@pytest.mark.gpu
@pytest.mark.parametrize(("x_tiles", "w_tiles", "stages"), [(16, 12, 3), (16, 8, 5)])
def test_clusters_and_held_totals_of_a_real_shape_give_the_bits_of_blocks_alone_in_a_chain_of_launches(
    gpu, x_tiles, w_tiles, stages
):
    device, arch, execute = gpu
    rows, n, layers = 512, 4096, 6
    scratch = workspace(device)
    weights = [torch.randn(n, n, device=device).div(n**0.5).bfloat16() for _ in range(layers)]
    packed = [pack_weight(w, Epilogue("store")) for w in weights]
    x, found = torch.randn(rows, n, device=device).bfloat16(), []
    alone = Tiling("group", x_tiles, w_tiles, 2, stages)
    held = deepest("sm_90a", replace(alone, units=1, stages=16, held=True), n // 32, blocks=1)
    staying = replace(held, resident=40)
    tilings = (alone, replace(alone, cluster=2), replace(alone, cluster=4), held, staying, replace(staying, cluster=2))
    for tiling in tilings:
        made = [x, *(torch.zeros_like(x) for _ in range(layers))]
        execute([
            launch
            for i, w in enumerate(packed)
            for launch in gemm(
                arch, Epilogue("store"), x=made[i], w=w, y=made[i + 1], k=n, packed=True, weight_rows=n,
                scratch=scratch, tiling=tiling, operands={},
            )
        ])  # fmt: skip
        torch.cuda.synchronize()
        found.append(made[-1])
    assert found[0].abs().max() > 0
    assert all(torch.equal(found[0], other) for other in found[1:])
