"""Blocks that ask for W as fast as it comes: bits, order and time of what they ask for, random shapes, planted bugs."""

from dataclasses import replace
from random import Random

import pytest
import torch
from faulty_emulator import faulty
from planted_sources import rebuilt
from rings import seeds, slow_from
from test_gemm_bulk import BULK, RING, STORE, example, run

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.emulator.now import lane
from eagle3core.kernels.gemm import launcher
from eagle3core.kernels.gemm.card import CARD
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm, gemm_variant
from eagle3core.kernels.gemm.ring import bulk, kernel
from eagle3core.kernels.gemm.tiling import Tiling

QKV = {"kind": "qkv", "k": 128, "norm": True, "q_heads": 3, "kv_heads": 1, "head_dim": 32, "block": 16}


def differing(case, setting, seed=6):
    """Elements in which a paced launch and the ring's differ; the ring itself is held to the definition elsewhere."""
    case = {**STORE, **case}
    inputs = example(case, seed)
    made = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**BULK, **setting})
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    return sum(proof.differing(made[name], expected[name]) for name in expected)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({}, {"stages": 2, "paced": 1}),
        ({}, {"stages": 8, "paced": 700}),  # streams end before the ring does
        ({"kind": "residual", "k": 1024, "n": 48, "bias": True}, {"units": 4, "stages": 2, "w_tiles": 3, "paced": 300}),
        ({"k": 1024, "n": 16, "m": 1}, {"units": 8, "stages": 2, "paced": 300}),  # rings that take more than the sums
        ({"k": 96, "m": 11}, {"stages": 2, "paced": 300}),  # streams of another length, one without units
        (QKV, {"paced": 300}),
        ({"k": 512, "m": 14}, {"x_tiles": 2, "units": 2, "stages": 2, "paced": 300}),
        ({"fp8": True, "k": 1024}, {"units": 4, "stages": 3, "paced": 300}),
        ({"fp8": "blocks", "k": 1024, "kind": "residual"}, {"units": 4, "stages": 2, "paced": 300}),
    ],
)
def test_bits_equal_those_of_the_ring(case, setting):
    assert differing(case, setting) == 0


@pytest.mark.emulated
@pytest.mark.parametrize("seed", seeds(4, 8, 208))
def test_a_paced_block_of_any_shape_gives_the_bits_of_the_ring(seed):
    draw = Random(seed)
    x_tiles, w_tiles, units = draw.choice([1, 1, 2]), draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4])
    case = {
        "kind": draw.choice(["store", "residual"]), "m": draw.randint(1, 8 * x_tiles + 3),
        "n": 16 * w_tiles * draw.randint(1, 2), "bias": draw.random() < 0.5, "dtype": draw.choice(["bf16", "f16"]),
        "k": 32 * (draw.randint(1, 22) if units == 1 else 4 * units * draw.randint(1, 3)),
    }  # fmt: skip
    setting = {
        "x_tiles": x_tiles, "w_tiles": w_tiles, "units": units, "stages": draw.randint(2, 6),
        "paced": draw.choice([1, 40, 400, 20_000]),
    }  # fmt: skip
    assert differing(case, setting, seed) == 0, (case, setting)


PLANTED = {
    # name: (factory's module, factory, pattern, replacement)
    "a stage is asked for from another place of W": (
        bulk, "make_bulk_ring", r"i64\(stage\) \* piece", "i64(stage) * (2 * piece)",
    ),
    "a stream begins where another does": (
        bulk, "make_bulk_ring", r"first = i32\(\(stream \* n_units\) >> 2\)", "first = i32((stream * n_units) >> 3)",
    ),
    "bytes complete the barrier of a warp's first stage": (
        bulk, "make_bulk_ring", r"\(stream \* stages \+ stage\) \* 8", "(stream * stages) * 8",
    ),
    "a stage too many of a short stream": (bulk, "make_bulk_ring", r"if stage < i32\(\(", "if stage <= i32(("),
    "asked for before the barriers are there": (
        bulk, "make_bulk_ring", r"cuda\.syncthreads\(\)\n        if warp == STREAMS", "if warp == STREAMS",
    ),
    "x's barrier is a stage's": (bulk, "make_bulk_ring", r"fulls \+ STREAMS \* stages \* 8", "fulls"),
    "the warp that asks is waited for where sums meet": (
        kernel, "make_gemm_ring", r"named_barrier\(1, threads\)", "named_barrier(1, threads + 32)",
    ),
    "the warp that asks goes on to multiply": (
        kernel, "make_gemm_ring", r"if warp == STREAMS:\n                return",
        "if warp > STREAMS:\n                return",
    ),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("bug", slow_from(3, PLANTED))
def test_a_planted_bug_is_found(bug, monkeypatch):
    case, setting = {"k": 672, "m": 5, "n": 16}, {"stages": 8, "paced": 300}  # streams of five units, the last of six
    assert differing(case, setting) == 0
    module, factory, pattern, replacement = PLANTED[bug]
    rebuilt(module, pattern, replacement, monkeypatch, factory, (launcher, kernel))
    monkeypatch.setitem(launcher._KERNELS, "bulk", kernel.make_gemm_ring)
    try:
        found = differing(case, setting)
    except EmulationError:
        found = 1
    assert found, bug


@pytest.mark.emulated
@pytest.mark.parametrize("alone", [{"clock": lambda: 0}, {"mbarrier_is_over": lambda address, parity: 0}])
def test_what_is_left_of_w_comes_once_x_is_there_or_its_time_has(alone):
    inputs, outputs = run(faulty(**alone), stages=4, paced=1000)
    expected = proof.run(CARD, "sm_90a", STORE, inputs, emulator.execute, RING)
    assert proof.differing(outputs["y"], expected["y"]) == 0


@pytest.mark.emulated
def test_a_block_that_nobody_tells_of_x_is_found_out():
    with pytest.raises(EmulationError, match="for ever"):
        run(faulty(clock=lambda: 0, mbarrier_arrive=lambda address: None), stages=4, paced=1000)


@pytest.mark.emulated
def test_a_paced_block_asks_for_every_stage_in_its_turn_and_no_sooner():
    asked, looks = [], []

    def is_asking():  # one lane of the warp that does nothing else
        return lane().index == 128

    def clock():
        time = emulator.clock()
        if is_asking():
            looks.append(time)
        return time

    def copy(target, source, n_bytes, barrier):
        if is_asking():
            asked.append((looks[-1], target))
        return emulator.warp_bulk_copy(target, source, n_bytes, barrier)

    never = {"mbarrier_is_over": lambda address, parity: 0}
    run(faulty(clock=clock, warp_bulk_copy=copy, **never), {**STORE, "n": 16}, stages=4, paced=8000)
    assert [target for _, target in asked] == [w * 4096 + s * 1024 for s in range(4) for w in range(4)]
    begun = looks[0]
    assert all(at >= begun + 8000 * i for i, (at, _) in enumerate(asked)), asked


@pytest.mark.reference
@pytest.mark.parametrize("changed", [{"kernel": "ring", "paced": 800}, {"kernel": "bulk", "paced": -1}])
def test_requests_are_paced_of_bulk_copies_alone(changed):
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((4, 128), (32, 128), (4, 32)))
    tiling = replace(Tiling(**BULK), **changed)
    with pytest.raises(KernelLimit, match="paced=0"):
        gemm("sm_90a", Epilogue("store"), x=x, w=w, y=y, k=128, packed=True, weight_rows=32, tiling=tiling, operands={})


@pytest.mark.compiled
@pytest.mark.parametrize("arch", slow_from(1, ["sm_90a", "sm_100", "sm_120"]))
def test_a_paced_kernel_asks_for_each_stage_once_and_refills_in_two_places(arch):
    from eagle3core.kernels.compile import compile_variant

    tiling = Tiling("bulk", 1, 1, 8, 2, paced=800)
    variant = gemm_variant(arch, "bf16", Epilogue("residual"), tiling, True, False)
    made = compile_variant(variant, arch, disassemble=True)
    assert made.faults(variant) == []
    assert made.sass["UBLKCP"] == 4 * tiling.stages + 2, "of every stream, and in both halves of the loop"
