"""Blocks of up to 16 rows that stay for several tiles: the ring's bits, random shapes, limits, planted bugs."""

from random import Random

import pytest
from planted_sources import rebuilt
from rings import seeds, slow_from
from test_gemm_bulk import BULK, RING, STORE, example

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm import launcher
from eagle3core.kernels.gemm.candidates import check_tiling
from eagle3core.kernels.gemm.card import CARD, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.tiling import as_fp8
from eagle3core.kernels.gemm.launcher import gemm_variant
from eagle3core.kernels.gemm.ring import stay
from eagle3core.kernels.gemm.tiling import Tiling

STAY = {**BULK, "stages": 3, "resident": 2}
LONG = {**STORE, "n": 80, "k": 768}  # five tiles; six stages of one unit a stream
QKV = {"kind": "qkv", "k": 256, "norm": True, "q_heads": 3, "kv_heads": 2, "head_dim": 32, "block": 16}


def differing(case, setting, seed=6):
    """Elements in which a launch whose blocks stay differs from the ring's; that one is tested elsewhere."""
    case = {**LONG, **case}
    inputs = example(case, seed)
    made = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**STAY, **setting})
    expected = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, RING)
    return sum(proof.differing(made[name], expected[name]) for name in expected)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({}, {}),  # three tiles, and two
        ({}, {"resident": 1, "stages": 5}),  # rings that hold stages of two tiles at once
        ({}, {"resident": 1, "stages": 16}),  # of three
        ({"n": 32}, {"resident": 7, "stages": 8}),  # more than there are blocks: one tile each, less than a ring
        ({"k": 256}, {"stages": 2}),  # two stages a tile
        ({"kind": "residual", "k": 512, "bias": True, "n": 144}, {"units": 2, "w_tiles": 3}),
        ({"kind": "residual", "k": 2048, "n": 48, "m": 8}, {"units": 8, "stages": 2, "resident": 1}),
        ({"kind": "swiglu", "norm": True, "k": 256}, {}),  # scales of the rows serve every tile
        ({**QKV, "m": 7}, {"w_tiles": 2}),
        ({"kind": "head", "norm": True, "bias": True, "k": 256}, {}),
        ({"m": 14, "k": 512}, {"x_tiles": 2, "units": 2}),
        ({"m": 27, "n": 48, "k": 256, "dtype": "f16"}, {"x_tiles": 2}),  # two blocks of rows of x
        ({"kind": "swiglu", "norm": True, "k": 512, "m": 12}, {"x_tiles": 2, "units": 2}),
        ({"fp8": True, "k": 1024, "kind": "residual"}, {"units": 4, "stages": 3}),
        ({"fp8": True, "k": 512, "m": 11, "kind": "swiglu", "norm": True}, {"x_tiles": 2, "units": 2}),
    ],
)
def test_bits_equal_those_of_the_ring(case, setting):
    assert differing(case, setting) == 0


@pytest.mark.emulated
@pytest.mark.parametrize("seed", seeds(3, 4, 204))
def test_blocks_that_stay_give_the_bits_of_the_ring_for_any_shape(seed):
    draw = Random(seed)
    x_tiles, w_tiles, units = draw.choice([1, 1, 2]), draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4])
    case = {
        "kind": draw.choice(["store", "residual", "swiglu"]), "m": draw.randint(1, 8 * x_tiles + 3),
        "n": 16 * w_tiles * draw.randint(1, 5), "bias": draw.random() < 0.5, "dtype": draw.choice(["bf16", "f16"]),
        "k": 256 * units * draw.randint(1, 3), "fp8": draw.random() < 0.3,
    }  # fmt: skip
    case |= {"norm": True} if case["kind"] == "swiglu" else {}
    setting = {
        "x_tiles": x_tiles, "w_tiles": w_tiles, "units": units, "stages": draw.randint(2, 7),
        "resident": draw.randint(1, 4),
    }  # fmt: skip
    assert differing(case, setting, seed) == 0, (case, setting)


PLANTED = {  # pattern, replacement
    "the next tile's stages come from this one": (r"at, asked = at \+ jump, i32\(0\)", "at, asked = at, i32(0)"),
    "tiles of the block beside it": (
        r"jump = i64\(apart\) \* pitch", "jump = i64(w_tiles) * pitch",
    ),
    "x of the next tile goes on where this one's ended": (r"if left == 2:", "if left == 3:"),
    "sums of one tile only have a place": (r"2 \* \(base \+ sums_at\) \+ sums_bytes - place", "place"),
    "a stage too few is asked for": (r"i32\(unasked - 1\)", "i32(unasked - 2)"),
    "a stage is filled while lanes read it": (
        r"(multiply_odd\(.*\n *if unasked > 0:\n) *cuda\.syncwarp\(\)\n", r"\1",
    ),
    "sums of the tile before are kept": (
        r"accumulators\[i\] = zero", "accumulators[i] = zero if is_first != 0 else accumulators[i]",
    ),
    "operands of the first tile serve all": (
        r"fetched = fetch\(tile,", "fetched = fetch(i32(cuda.blockIdx.x * w_tiles + (item >> tile_shift)),",
    ),
    "rows' scales are those of the stream": (r"\(warp \+ j \* STREAMS\) \* 4\), scale", "(warp) * 4), scale"),
    "the block does not meet": (r"is_first = i32\(0\)\n            cuda\.syncthreads\(\)", "is_first = i32(0)"),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("bug", slow_from(3, PLANTED))
def test_a_planted_bug_is_found(bug, monkeypatch):
    case = {"kind": "residual", "bias": True, "m": 5} if "operands" in bug else {"m": 5}
    case |= {"kind": "swiglu", "norm": True, "m": 16} if "scales" in bug else {}
    setting = {"x_tiles": 2} if "scales" in bug else {}
    assert differing(case, setting) == 0
    pattern, replacement = PLANTED[bug]
    rebuilt(stay, pattern, replacement, monkeypatch, "make_gemm_stay", (launcher, stay))
    monkeypatch.setattr(launcher, "make_gemm_stay", stay.make_gemm_stay)
    try:
        found = differing(case, setting)
    except EmulationError:
        found = 1
    assert found > 0


@pytest.mark.reference
@pytest.mark.parametrize(
    ("tiling", "k"),
    [
        (Tiling("bulk", 1, 1, 8, 3, resident=132), 1024 * 5),  # five stages a stream
        (Tiling("bulk", 1, 1, 1, 3, resident=132), 160),
        (Tiling("bulk", 1, 1, 8, 3, resident=132, paced=400), 4096),
        (as_fp8(Tiling("bulk", 1, 1, 4, 3, resident=132), blocks=True), 4096),
    ],
)
def test_what_there_is_no_kernel_for_is_refused(tiling, k):
    with pytest.raises(KernelLimit, match="no tiling"):
        check_tiling(tiling, "sm_90a", 8, k, True)


@pytest.mark.reference
def test_what_is_refused_names_the_columns_that_are_taken():
    tiling = Tiling("bulk", 1, 1, 8, 3, resident=132)
    with pytest.raises(KernelLimit, match="k a multiple of 2048,"):
        check_tiling(tiling, "sm_90a", 8, 5120, True)
    check_tiling(tiling, "sm_90a", 8, 2048, True)


@pytest.mark.reference
def test_blocks_are_as_many_as_asked_for_and_no_more_than_there_is_work_for():
    inputs = example(LONG)
    grids = [
        gemm_launches("sm_90a", LONG, inputs, CARD.outputs(LONG, inputs), **{**STAY, "resident": n})[-1].grid
        for n in (0, 2, 132)
    ]
    assert grids == [(5, 1, 1), (2, 1, 1), (5, 1, 1)]
    names = {gemm_variant("sm_90a", "bf16", Epilogue("store"), Tiling("bulk", 1, 1, 1, 3, resident=n), True, False).name
             for n in (2, 132)}  # fmt: skip
    assert names == {"gemm_bf16_store_stay_1x1_u1_p3_packed"}  # one kernel of any grid


@pytest.mark.compiled
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling("bulk", 1, 1, 8, 6, resident=132), Tiling("bulk", 1, 2, 4, 6, resident=132),
        as_fp8(Tiling("bulk", 1, 1, 8, 6, resident=264)), Tiling("bulk", 2, 2, 4, 3, resident=132),
    ],
    ids=lambda one: one.name,
)  # fmt: skip
def test_it_compiles_without_faults(tiling):
    for epilogue in (
        Epilogue("swiglu", quads=2),
        Epilogue("residual"),
        Epilogue("qkv", quads=2, head_dim=128, block=64),
    ):
        variant = gemm_variant("sm_90a", "bf16", epilogue, tiling, True, False)
        assert compile_variant(variant, "sm_90a", disassemble=True).faults(variant) == []


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_on_a_gpu_real_shapes_have_the_bits_of_the_ring_every_time(gpu, m, fp8):
    device, arch, execute = gpu
    case = {"kind": "residual", "m": m, "n": 8192, "k": 4096, "dtype": "bf16", "packed": True, "bias": True}
    case |= {"fp8": fp8} if fp8 else {}
    inputs = CARD.example(case, proof.generator(m, device), device)
    x_tiles = 2 if m > 8 else 1
    expected = proof.run(CARD, arch, case, inputs, execute, {**RING, "x_tiles": x_tiles, "units": 2, "stages": 6})
    for w_tiles, units, stages, resident in ((1, 4, 6, 132), (2, 4, 3, 132), (1, 4, 3, 264), (1, 4, 2, 5)):
        setting = {"x_tiles": x_tiles, "w_tiles": w_tiles, "units": units, "stages": stages, "resident": resident}
        for _ in range(20):  # a race may show now and then
            made = proof.run(CARD, arch, case, inputs, execute, {**STAY, **setting})
            assert all(proof.differing(made[name], expected[name]) == 0 for name in expected), setting
