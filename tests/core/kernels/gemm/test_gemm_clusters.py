"""Blocks of a cluster that fetch W for each other: they wait, launch where they fit, and give the bits of one alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from faulty_emulator import faulty
from gemm_examples import example
from warpgroup_products import GROUP, RING, STORE, run

from eagle3core.errors import KernelLimit
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.card import CARD, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm, gemm_variant
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.gemm.scratch import workspace
from eagle3core.kernels.gemm.tiling import Tiling, deepest

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
        inputs = example(case, 6)
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
