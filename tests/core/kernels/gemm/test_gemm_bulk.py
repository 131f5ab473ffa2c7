"""The ring kernel fed by bulk copies: its bits are the ring's, and the classical bugs of rings, planted, are found."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from faulty_emulator import faulty
from rings import slow_from

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.card import CARD, LLAMA_8B, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm, gemm_variant
from eagle3core.kernels.gemm.reference import epilogue_of
from eagle3core.kernels.gemm.tiling import Tiling, choose_tiling, ruled_tiling

CPU = torch.device("cpu")
STORE = {"kind": "store", "m": 3, "n": 32, "k": 640, "dtype": "bf16", "packed": True}  # five units a stream
BULK = {"kernel": "bulk", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}
RING = {**BULK, "kernel": "ring"}
BULK_16 = {**BULK, "x_tiles": 2}
# The richest epilogue, and where it takes most registers.
SHOWN = (("sm_90a", "qkv", 4), ("sm_120", "qkv", 4))


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
        ({"kind": "residual", "k": 128, "n": 48}, {"w_tiles": 3}),  # half of the threads have a second pair
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
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({"m": 16}, {"stages": 2}),
        ({"m": 9}, {"stages": 8}),  # more than a stream has; one row in the second tile
        ({"m": 16, "k": 1024, "n": 16}, {"units": 4, "stages": 3}),  # two stages, half of each register array
        ({"m": 13, "k": 1536, "n": 16, "dtype": "f16"}, {"units": 4, "stages": 2}),  # the last stage without a partner
        ({"m": 12, "k": 1280}, {"units": 2, "stages": 2, "w_tiles": 2}),  # five stages through a ring of two
        ({"m": 10, "k": 96}, {"stages": 2}),  # a stream without units
        ({"m": 27, "k": 128, "n": 16}, {"stages": 2}),  # two blocks of rows, the last rows of the second tile missing
        ({"m": 20, "k": 128, "n": 16}, {"stages": 2}),  # two blocks of rows, no second tile in the last
        ({"kind": "residual", "m": 14, "k": 256}, {"units": 2}),
        ({"kind": "residual", "m": 13, "k": 256, "n": 48}, {"w_tiles": 3}),  # sums of three tiles, by four warps
        ({"kind": "swiglu", "m": 11, "k": 256, "n": 16, "norm": True}, {"w_tiles": 2}),
        ({"kind": "qkv", "m": 16, "k": 128, "norm": True, "q_heads": 3, "kv_heads": 1, "head_dim": 32, "block": 16},
         {}),
        ({"kind": "head", "m": 15, "k": 128, "n": 64, "norm": True, "bias": True}, {}),
    ],
)  # fmt: skip
def test_bits_of_16_rows_equal_those_of_the_ring_and_of_blocks_of_8(case, setting):
    case = {**STORE, **case}
    inputs, outputs = run(None, case, **{**BULK_16, **setting})
    for other in (RING, {**BULK, **setting}):
        expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, other)
        assert [proof.differing(outputs[name], expected[name]) for name in expected] == [0] * len(expected)
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


@pytest.mark.emulated
@pytest.mark.parametrize("units", [1, 2, 4])
def test_every_number_of_rows_up_to_16_gives_the_bits_of_16_and_writes_no_other_row(units):
    case = {**STORE, "m": 16, "n": 16, "k": 512 if units == 4 else 256, "kind": "residual"}
    inputs = example(case)
    whole = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**RING, "units": 1})
    for m in range(1, 17):
        # Rows past the last are of another tensor as far as the emulator knows: reading one is an error.
        part = {name: tensor[:m].clone() if name in ("x", "residual") else tensor for name, tensor in inputs.items()}
        outputs = CARD.outputs(case, inputs)
        poisoned = {name: tensor.clone() for name, tensor in outputs.items()}
        given = {name: tensor[:m] for name, tensor in outputs.items()}
        emulator.execute(
            gemm_launches("sm_90a", {**case, "m": m}, part, given, **{**BULK_16, "units": units, "stages": 2})
        )
        for name, tensor in outputs.items():
            assert proof.differing(tensor[:m], whole[name][:m]) == 0, (name, m)
            assert proof.differing(tensor[m:], poisoned[name][m:]) == 0, (name, m)


@pytest.mark.emulated
def test_a_row_has_the_same_bits_alone_in_company_and_in_the_kernels_of_many_rows():
    case = {**STORE, "m": 2, "n": 16, "k": 1024}
    assert choose_tiling("sm_90a", 2, 1, 1024).kernel == "bulk"
    inputs = example(case)
    assert proof.batch_dependence(CARD, "sm_90a", case, inputs, emulator.execute) == []


# ---- planted bugs


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
@pytest.mark.parametrize("setting", [{}, {"x_tiles": 2}, {"paced": 300}])
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
def test_a_planted_bug_in_the_ring_is_found(plant, message, setting):
    with pytest.raises(EmulationError, match=message):
        run(plant(), **setting)


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
        ("sm_90a", 128, True, {"x_tiles": 4}),
        ("sm_90a", 1024, True, {"x_tiles": 2, "units": 8}),
        ("sm_80", 128, True, {"x_tiles": 2}),
    ],
)
def test_what_bulk_copies_cannot_feed_is_refused_with_the_way_out(arch, k, packed, changed):
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((4, k), (32, k), (4, 32)))
    tiling = replace(Tiling(**BULK), **changed)
    with pytest.raises(KernelLimit, match="use `ring`"):
        gemm(arch, Epilogue("store"), x=x, w=w, y=y, k=k, packed=packed, weight_rows=32, tiling=tiling, operands={})


@pytest.mark.compiled
@pytest.mark.parametrize("arch", slow_from(1, ["sm_90a", "sm_100"]))
@pytest.mark.parametrize(("w_tiles", "units", "stages"), [(1, 8, 3), (2, 4, 4)])
def test_a_stage_is_one_copy_a_tile_of_w_and_no_lane_copies_for_itself(arch, w_tiles, units, stages):
    from eagle3core.kernels.compile import compile_variant

    tiling = Tiling("bulk", 1, w_tiles, units, stages)
    variant = gemm_variant(arch, "bf16", Epilogue("store"), tiling, True, False)
    made = compile_variant(variant, arch, disassemble=True)
    assert made.faults(variant) == []
    # The first stages, and a refill in each half of the loop.
    assert made.sass["UBLKCP"] == tiling.w_tiles * (tiling.stages + 2)
    assert made.sass["LDGSTS"] == 0


RARE = (pytest.mark.slow, pytest.mark.exhaustive)  # no tuned setting is one of these yet


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("arch", "case", "units"),
    [
        pytest.param(arch, case, units, marks=RARE[: 1 if (arch, case["kind"], units) in SHOWN else 2])
        for arch in ("sm_90a", "sm_100", "sm_120") for case in LLAMA_8B[:5] if case["k"] == 4096 for units in (4, 2)
    ],
)  # fmt: skip
def test_16_rows_stay_in_registers_and_one_copy_brings_a_stage(arch, case, units):
    from eagle3core.kernels.compile import compile_variant

    tiling = Tiling("bulk", 2, 1, units, 3)
    variant = gemm_variant(arch, "bf16", epilogue_of({**case, "m": 16, "packed": True}), tiling, True, False)
    made = compile_variant(variant, arch, disassemble=True)
    assert made.faults(variant) == []
    assert made.sass["UBLKCP"] == tiling.stages + 2
    assert made.sass["LDGSTS"] == 0
    assert made.sass["HMMA"] == 2 * 2 * 2 * units  # two products a unit and tile of x, in each half of the loop
