"""Warps of a stream that share x: the bits of a warp a stream, random shapes, limits, planted bugs."""

from dataclasses import replace
from random import Random

import pytest
from planted_sources import rebuilt
from rings import seeds, slow_from
from test_gemm_bulk import RING, STORE, example, run

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm import launcher
from eagle3core.kernels.gemm.candidates import fp8_candidates, gemm_candidates
from eagle3core.kernels.gemm.card import CARD
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm_variant
from eagle3core.kernels.gemm.ring import kernel, lanes
from eagle3core.kernels.gemm.tiling import Tiling

SHARED = {**RING, "x_tiles": 2, "w_tiles": 2, "units": 1, "stages": 3, "warps_w": 2}
QKV = {"kind": "qkv", "k": 128, "norm": True, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "block": 16}


def differing(case, setting, seed=6):
    """Elements in which a launch whose warps share x differs from the ring's; that one is tested elsewhere."""
    case = {**STORE, **case}
    inputs = example(case, seed)
    made = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**SHARED, **setting})
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    return sum(proof.differing(made[name], expected[name]) for name in expected)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({"m": 13, "n": 64}, {}),
        ({"m": 16, "n": 64, "k": 512}, {"units": 2, "w_tiles": 4, "warps_w": 4, "stages": 2}),
        ({"m": 16, "n": 64}, {"w_tiles": 4, "warps_w": 4}),  # more warps than pieces of x
        ({"m": 9, "n": 96, "kind": "residual", "bias": True}, {"w_tiles": 3, "warps_w": 3}),
        ({"m": 12, "n": 48, "kind": "swiglu", "norm": True}, {"w_tiles": 6, "warps_w": 3}),  # 12 warps, 16 rows' scales
        # 16 warps, 8 rows
        ({"m": 3, "n": 64, "kind": "head", "norm": True}, {"x_tiles": 1, "w_tiles": 4, "warps_w": 4}),
        ({"m": 40, "n": 64, "k": 256}, {"x_tiles": 4, "w_tiles": 4, "warps_w": 2, "units": 2}),
        ({"m": 11, "n": 64, "k": 80}, {}),  # K ends within a unit
        ({"m": 11, "n": 64, "k": 80, "packed": False}, {"w_tiles": 4, "warps_w": 4}),
        ({**QKV, "m": 14}, {}),
        ({"m": 15, "n": 64, "fp8": True}, {"w_tiles": 4, "warps_w": 2}),
        ({"m": 15, "n": 64, "fp8": "blocks", "k": 1024, "kind": "residual"}, {"units": 2, "w_tiles": 4, "warps_w": 4}),
    ],
)
def test_bits_equal_those_of_a_warp_a_stream(case, setting):
    assert differing(case, setting) == 0


def drawn(draw: Random):
    """A map and a setting whose warps share x."""
    x_tiles, warps, units = draw.choice([1, 2, 2, 4]), draw.choice([2, 3, 4]), draw.choice([1, 1, 2, 4])
    w_tiles, fp8 = warps * draw.choice([1, 1, 2]), draw.choice([False, True, "blocks"])
    units = min(units, 2) if w_tiles > 4 else units  # two stages of more would not fit
    case = {
        "kind": draw.choice(["store", "residual", "swiglu"]), "m": draw.randint(1, 8 * x_tiles + 3),
        "n": 16 * w_tiles * draw.randint(1, 2), "bias": draw.random() < 0.5, "dtype": draw.choice(["bf16", "f16"]),
        "k": 32 * (draw.randint(1, 22) if units == 1 else 4 * units * draw.randint(1, 3)),
    }  # fmt: skip
    case |= {"fp8": fp8} if fp8 else {"packed": draw.random() < 0.7}
    case |= {"norm": True} if case["kind"] == "swiglu" else {}
    return case, {
        "x_tiles": x_tiles,
        "w_tiles": w_tiles,
        "units": units,
        "stages": draw.randint(2, 5),
        "warps_w": warps,
    }


@pytest.mark.emulated
@pytest.mark.parametrize("seed", seeds(4, 8, 208))
def test_warps_that_share_x_give_any_shape_the_bits_of_the_ring(seed):
    case, setting = drawn(Random(seed))
    assert differing(case, setting, seed) == 0, (case, setting)


MEET = r"                if sharers > 1:\n +isa\.named_barrier\(i32\(stream \+ 1\), 32 \* sharers\)\n"
LATE = "                if sharers > 1:\n                    isa.named_barrier(i32(stream + 1), 32 * sharers)\n"
PLANTED = {
    # name: (factory's module, factory, pattern, replacement)
    "nobody waits for who shares x": (kernel, "make_gemm_ring", MEET, ""),
    "x is asked for before the others have read its stage": (
        kernel, "make_gemm_ring", MEET + r"((?:.*\n)*?                isa\.copy_commit\(\)\n)", r"\1" + LATE,
    ),
    "all parts multiply the first's tiles of W": (
        kernel, "make_gemm_ring", r"own_w = i32\(own \+ part \* \(.*\)\) if", "own_w = i32(own) if",
    ),
    "all parts leave their sums in one place": (kernel, "make_gemm_ring", r"i32\(part \* own_tiles \+ r\)", "i32(r)"),
    "a part's tiles of W are its neighbour's": (
        kernel, "make_gemm_ring", r"tile0 \+ part \* own_tiles", "tile0 + (part ^ 1) * own_tiles",
    ),
    "a piece of x is nobody's": (
        lanes, "make_lane_copies", r"if place < x_tiles \* units", "if place < x_tiles * units - 1",
    ),
    "a piece of x is another tile's": (
        lanes, "make_lane_copies", r"source \+ m \* tile_bytes", "source + (m ^ 1) * tile_bytes",
    ),
    "rows of another tile are zeros": (
        lanes, "make_lane_copies", r"i32\(i32\(part \+ j \* sharers\) >> unit_shift\)", "i32(1)",
    ),
    "scales of the last rows are not made": (
        kernel, "make_gemm_ring", r"scale_rows = -\(-x_rows // n_warps\)", "scale_rows = x_rows // n_warps",
    ),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("bug", slow_from(3, PLANTED))
def test_a_planted_bug_is_found(bug, monkeypatch):
    case, setting = (
        {"m": 14, "n": 96, "k": 512, "kind": "swiglu", "norm": True},  # more rows than a block has warps
        {"w_tiles": 6, "warps_w": 3, "stages": 2},
    )
    assert differing(case, setting) == 0
    module, factory, pattern, replacement = PLANTED[bug]
    rebuilt(module, pattern, replacement, monkeypatch, factory, (launcher, kernel))
    monkeypatch.setitem(launcher._KERNELS, "ring", kernel.make_gemm_ring)
    try:
        found = differing(case, setting)
    except EmulationError:
        found = 1
    assert found, bug


@pytest.mark.reference
@pytest.mark.parametrize(
    "setting",
    [{"warps_w": 3}, {"warps_w": 0}, {"w_tiles": 8, "warps_w": 8}],
    ids=["no whole tiles", "none", "too many"],
)
def test_warps_that_cannot_share_are_named_before_anything_is_launched(setting):
    with pytest.raises(KernelLimit, match="1 to 4, that divide w_tiles"):
        run(None, {**STORE, "n": 128}, **{**SHARED, **setting})


@pytest.mark.reference
def test_candidates_of_nine_rows_and_more_have_some_whose_warps_share_x():
    for found in (gemm_candidates("sm_90a", 16, 256, 4096, True), fp8_candidates("sm_90a", 16, 256, 4096)):
        assert {one.warps_w for one in found if one.kernel == "ring"} >= {1, 2, 4}
    assert all(one.warps_w == 1 for one in gemm_candidates("sm_90a", 8, 256, 4096, True))


@pytest.mark.reference
def test_a_kernel_whose_warps_share_x_has_a_name_and_threads_of_its_own():
    plain = Tiling("ring", 2, 4, 2, 4)
    shared = replace(plain, warps_w=4)
    assert shared.threads == 4 * plain.threads
    assert shared.shared_bytes == plain.shared_bytes
    assert shared.name == f"{plain.name}_x4"
    one, other = (gemm_variant("sm_90a", "bf16", Epilogue("store"), tiling, True, False) for tiling in (plain, shared))
    assert one.instructions["HMMA"] == 4 * other.instructions["HMMA"]
    assert "sharers" not in one.constants


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True, "blocks"])
@pytest.mark.parametrize("m", [9, 16])
def test_on_a_gpu_real_shapes_have_the_bits_of_a_warp_a_stream_every_time(gpu, m, fp8):
    device, arch, execute = gpu
    case = {"kind": "residual", "m": m, "n": 3072, "k": 4096, "dtype": "bf16", "packed": True, "bias": True}
    case |= {"fp8": fp8} if fp8 else {}
    inputs = CARD.example(case, proof.generator(m, device), device)
    expected = proof.run(CARD, arch, case, inputs, execute, {**RING, "x_tiles": 2, "units": 2, "stages": 6})
    for w_tiles, units, stages, warps in ((2, 2, 6, 2), (3, 4, 3, 3), (4, 1, 4, 2), (8, 2, 2, 4), (8, 1, 3, 4)):
        setting = {"w_tiles": w_tiles, "units": units, "stages": stages, "warps_w": warps}
        for _ in range(20):  # a race may show now and then
            made = proof.run(CARD, arch, case, inputs, execute, {**SHARED, **setting})
            assert all(proof.differing(made[name], expected[name]) == 0 for name in expected), setting
