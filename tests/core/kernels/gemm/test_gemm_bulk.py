"""The ring kernel fed by bulk copies: its bits are the ring's, and the classical bugs of rings, planted, are found."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.card import CARD, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm, gemm_variant
from eagle3core.kernels.gemm.tiling import Tiling, choose_tiling, ruled_tiling

CPU = torch.device("cpu")
STORE = {"kind": "store", "m": 3, "n": 32, "k": 640, "dtype": "bf16", "packed": True}  # five units a stream
BULK = {"kernel": "bulk", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}
RING = {**BULK, "kernel": "ring"}


def example(case, seed=6):
    return CARD.example(case, proof.generator(seed, CPU), CPU)


def run(isa=None, case=STORE, **setting):
    inputs = example(case)
    outputs = CARD.outputs(case, inputs)
    emulator.execute(gemm_launches("sm_90a", case, inputs, outputs, **{**BULK, **setting}), isa=isa)
    return inputs, outputs


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({}, {"stages": 2}),
        ({}, {"stages": 8}),  # more than a stream has
        ({"k": 512, "m": 8, "dtype": "f16"}, {"units": 2, "stages": 2, "w_tiles": 2}),
        ({"k": 1024, "n": 16, "m": 1}, {"units": 8, "stages": 2}),
        ({"k": 1536, "n": 16}, {"units": 4, "stages": 2}),  # three stages, the last without a partner
        ({"k": 96, "m": 11}, {"stages": 2}),  # a stream without units, two blocks of rows
        ({"kind": "residual", "k": 256}, {"units": 2}),
        ({"kind": "swiglu", "k": 256, "n": 16, "norm": True}, {"w_tiles": 2}),
        ({"kind": "qkv", "k": 128, "norm": True, "q_heads": 3, "kv_heads": 1, "head_dim": 32, "block": 16}, {}),
        ({"kind": "head", "k": 128, "n": 64, "norm": True, "bias": True}, {}),
    ],
)
def test_bits_equal_those_of_the_ring(case, setting):
    case = {**STORE, **case}
    inputs, outputs = run(None, case, **setting)
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    assert [proof.differing(outputs[name], expected[name]) for name in expected] == [0] * len(expected)
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


@pytest.mark.emulated
def test_a_row_has_the_same_bits_alone_in_company_and_in_the_kernels_of_many_rows():
    case = {**STORE, "m": 2, "n": 16, "k": 1024}
    assert choose_tiling("sm_90a", 2, 1, 1024).kernel == "bulk"
    inputs = example(case)
    assert proof.batch_dependence(CARD, "sm_90a", case, inputs, emulator.execute) == []


# ---- planted bugs


def faulty(**replaced):
    """The emulator's instruction set with some names replaced."""
    return SimpleNamespace(**{n: v for n, v in vars(emulator).items() if n[0] != "_"} | replaced)


def no_wait():
    return faulty(mbarrier_wait=lambda address, parity: None)


def wrong_parity():
    return faulty(mbarrier_wait=lambda address, parity: emulator.mbarrier_wait(address, parity ^ 1))


def too_few_bytes():
    return faulty(mbarrier_expect=lambda address, n_bytes: emulator.mbarrier_expect(address, n_bytes - 512))


def too_many_bytes():
    return faulty(mbarrier_expect=lambda address, n_bytes: emulator.mbarrier_expect(address, n_bytes + 512))


def lanes_do_not_meet():
    names = {n: getattr(emulator.cuda, n) for n in ("threadIdx", "blockIdx", "gridDim", "blockDim", "shared", "local")}
    return faulty(cuda=SimpleNamespace(**names, syncthreads=emulator.cuda.syncthreads, syncwarp=lambda: None))


def another_slot():
    """The copy of a stage lands one unit further."""
    return faulty(
        warp_bulk_copy=lambda target, source, n_bytes, barrier: emulator.warp_bulk_copy(
            target + 1024, source, n_bytes, barrier
        )
    )


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (no_wait, "race|nobody has written"),
        (wrong_parity, "deadlock|race|nobody has written"),
        (too_few_bytes, "deadlock|race|nobody has written"),
        (too_many_bytes, "deadlock"),
        (lanes_do_not_meet, "race|no mbarrier"),
        (another_slot, "race|nobody has written|outside|bounds"),
    ],
)
def test_a_planted_bug_in_the_ring_is_found(plant, message):
    with pytest.raises(EmulationError, match=message):
        run(plant())


# ---- choice and limits


@pytest.mark.reference
def test_bulk_copies_feed_up_to_8_rows_where_they_exist_and_stages_are_whole():
    def kernel(arch="sm_90a", rows=4, k=4096, packed=True):
        return ruled_tiling(arch, rows, 256, k, packed).kernel

    assert [kernel(arch) for arch in ("sm_80", "sm_90a", "sm_100", "sm_120")] == ["ring", "bulk", "bulk", "bulk"]
    assert [kernel(rows=rows) for rows in (1, 8, 9, 16)] == ["bulk", "bulk", "ring", "ring"]
    assert [kernel(k=k) for k in (1024, 2880, 14336)] == ["bulk", "ring", "bulk"]
    assert kernel(packed=False) == "ring"


@pytest.mark.reference
@pytest.mark.parametrize(
    ("arch", "k", "packed", "changed"),
    [
        ("sm_80", 128, True, {}),
        ("sm_90a", 128, False, {}),
        ("sm_90a", 144, True, {}),
        ("sm_90a", 128, True, {"x_tiles": 2}),
    ],
)
def test_what_bulk_copies_cannot_feed_is_refused_with_the_way_out(arch, k, packed, changed):
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((4, k), (32, k), (4, 32)))
    tiling = replace(Tiling(**BULK), **changed)
    with pytest.raises(KernelLimit, match="use `ring`"):
        gemm(arch, Epilogue("store"), x=x, w=w, y=y, k=k, packed=packed, weight_rows=32, tiling=tiling, operands={})


@pytest.mark.compiled
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_a_stage_is_one_copy_and_no_lane_copies_for_itself(arch):
    from eagle3core.kernels.compile import compile_variant

    tiling = choose_tiling(arch, 4, 256, 4096)
    variant = gemm_variant(arch, "bf16", Epilogue("store"), tiling, True, False)
    made = compile_variant(variant, arch, disassemble=True)
    assert made.faults(variant) == []
    assert made.sass["UBLKCP"] == tiling.stages + 2  # the first stages, and a refill in each half of the loop
    assert made.sass["LDGSTS"] == 0
