"""The GEMM's layout and limits; its numbers, bits and machine code are derived in test_registry."""

from dataclasses import replace

import pytest
import torch
from gemm_examples import STORE, example

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.card import ARCHES, SHARED_BYTES
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.tiling import choose_fp8_tiling
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.gemm.reference import partial_squares
from eagle3core.kernels.gemm.scratch import COUNTERS, WORKSPACE_BYTES, scratch_words, workspace, workspace_bytes
from eagle3core.kernels.gemm.tile import totals_in_shared
from eagle3core.kernels.gemm.tiling import Tiling, choose_tiling

# ---- layout


@pytest.mark.reference
@pytest.mark.parametrize(
    ("epilogue", "rows", "partner"),
    [
        (Epilogue("store"), 48, lambda tile, pair: (16 * tile + pair, 16 * tile + pair + 8)),
        (Epilogue("swiglu"), 48, lambda tile, pair: (8 * tile + pair, 24 + 8 * tile + pair)),
        (Epilogue("qkv", head_dim=32, block=16), 96, lambda tile, pair: (
            32 * (tile // 2) + 8 * (tile % 2) + pair, 32 * (tile // 2) + 8 * (tile % 2) + pair + 16)),
    ],
)  # fmt: skip
def test_packing_puts_every_weight_where_its_lane_reads_it(epilogue, rows, partner):
    k = 80  # two units of 32 and a half
    w = torch.arange(rows * k, dtype=torch.float32).view(rows, k)
    packed = pack_weight(w, epilogue).view(rows // 16, 3, 2, 8, 32)  # tile, unit, half of the pair, pair, k
    for tile in range(rows // 16):
        for pair in range(8):
            for half, row in enumerate(partner(tile, pair)):
                line = packed[tile, :, half, pair].flatten()
                assert torch.equal(line[:k], w[row])
                assert not line[k:].any()


@pytest.mark.reference
def test_partial_squares_add_up_to_the_row_and_are_padded_with_zeros():
    h = torch.randn(3, 2080, dtype=torch.float64)
    sums = partial_squares(h)
    assert sums.shape == (3, 256)
    assert torch.allclose(sums.sum(-1), h.square().sum(-1))
    assert not sums[:, 130:].any()


# ---- tilings


@pytest.mark.reference
@pytest.mark.parametrize("arch", ARCHES)
def test_every_tiling_fits_its_architecture(arch):
    for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, 240, 1000):
        for n_tiles in (1, 180, 256, 384, 896, 12568):
            for k in (16, 2880, 4096, 14336):
                tiling = choose_tiling(arch, rows, n_tiles, k)
                assert tiling.shared_bytes <= SHARED_BYTES[arch]
                assert tiling.stages >= (3 if tiling.kernel == "group" else 2)
                units = -(-k // 32)
                streams = [(s * units // 4, (s + 1) * units // 4) for s in range(4)]
                if tiling.kernel == "group":
                    assert tiling.units <= units
                else:
                    assert all((end - start) % tiling.units == 0 for start, end in streams)


@pytest.mark.reference
def test_a_block_that_fits_nowhere_is_refused():
    with pytest.raises(KernelLimit, match="use smaller blocks"):
        gemm_launches("sm_120", {**STORE, "m": 240}, example(STORE), {}, kernel="tile", x_tiles=64, w_tiles=64, units=2)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("dtype", "n", "k", "message"),
    [
        (torch.float32, 32, 32, "x is torch.float32"),
        (torch.bfloat16, 24, 32, r"W is \[24, 32\]"),
        (torch.bfloat16, 32, 40, r"W is \[32, 40\]"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_the_way_out(dtype, n, k, message):
    x, w, y = torch.zeros(2, k, dtype=dtype), torch.zeros(n, k, dtype=dtype), torch.zeros(2, n, dtype=dtype)
    with pytest.raises(KernelLimit, match=message):
        gemm("sm_90a", Epilogue("store"), x=x, w=w, y=y, k=k, packed=False, weight_rows=n, operands={})


@pytest.mark.reference
def test_operands_that_are_not_contiguous_are_refused():
    x, w = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(32, 32, dtype=torch.bfloat16)
    with pytest.raises(KernelLimit, match="x is not contiguous"):
        gemm("sm_90a", Epilogue("store"), x=x[:, :32], w=w, y=torch.zeros(2, 32), k=32, packed=False, weight_rows=32,
             operands={})  # fmt: skip


@pytest.mark.reference
def test_scratch_that_is_too_small_for_a_split_is_refused_and_without_scratch_nothing_is_split():
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((64, 4096), (512, 4096), (64, 512)))
    (launch,) = gemm("sm_90a", Epilogue("store"), x=x, w=w, y=y, k=4096, packed=False, weight_rows=512, operands={})
    assert launch.grid[2] == 1
    assert choose_tiling("sm_90a", 64, 32, 4096).split == 4
    with pytest.raises(KernelLimit, match="scratch holds 10 words and 1 counters"):
        gemm("sm_90a", Epilogue("store"), x=x, w=w, y=y, k=4096, packed=False, weight_rows=512, operands={},
             scratch=(torch.zeros(10), torch.zeros(1, dtype=torch.int32)))  # fmt: skip


@pytest.mark.reference
def test_a_head_size_that_is_no_power_of_two_is_refused():
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((4, 128), (288, 128), (4, 96)))
    with pytest.raises(KernelLimit, match="head_dim is 96"):
        gemm("sm_90a", Epilogue("qkv", head_dim=96, block=64), x=x, w=w, y=y, k=128, packed=False, weight_rows=288,
             operands={})  # fmt: skip


@pytest.mark.reference
def test_a_tiling_names_every_field_that_shapes_its_kernel():
    base = Tiling("tile", 8, 8, 1, 4, 2, 2, 1)
    changed = [
        replace(base, **{name: value})
        for name, value in {"x_tiles": 4, "w_tiles": 4, "units": 2, "stages": 5, "warps_x": 1, "warps_w": 1, "split": 4,
                            "kernel": "ring"}.items()
    ]  # fmt: skip
    assert len({tiling.name for tiling in [base, *changed]}) == 9


# ---- bits


@pytest.mark.emulated
def test_totals_kept_in_shared_memory_give_the_same_bits_as_totals_in_registers():
    case = {**STORE, "n": 64, "m": 2, "k": 336}
    wide = {"kernel": "tile", "x_tiles": 8, "w_tiles": 4, "warps_x": 1, "warps_w": 1, "stages": 2, "units": 1}
    card = replace(CARD, settings=({}, wide), alone=None)
    assert totals_in_shared(8, 4, 1, split=1)
    assert proof.batch_dependence(card, "sm_90a", case, example(case), emulator.execute) == []


# ---- on a GPU


@pytest.mark.gpu
def test_a_chain_of_dependent_launches_in_a_graph_equals_separate_launches(gpu):
    from eagle3core.kernels import launch

    device, arch, execute = gpu
    n, n_layers = 1024, 12
    weights = [torch.randn(n, n, device=device).div(32).bfloat16() for _ in range(n_layers)]
    rows = [torch.randn(4, n, device=device).bfloat16() for _ in range(n_layers + 1)]
    chain = [
        item
        for i, w in enumerate(weights)
        for item in gemm(
            arch, Epilogue("store"), x=rows[i], w=w, y=rows[i + 1], k=n, packed=False, weight_rows=n, operands={}
        )
    ]
    for item in chain:
        execute([replace(item, overlap=False)])
    expected = rows[-1].clone()
    bound = launch.bind(chain)
    bound()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    for _ in range(20):
        for y in rows[1:]:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(rows[-1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 17, 31, 32, 33, 48, 64])
def test_rows_of_a_real_shape_have_the_same_bits_at_every_batch(gpu, m):
    device, arch, execute = gpu
    case = {"kind": "store", "m": m, "n": 4096, "k": 2880, "dtype": "bf16", "packed": True}
    inputs = CARD.example(case, proof.generator(m, device), device)
    assert proof.batch_dependence(CARD, arch, case, inputs, execute) == []


# ---- the workspace

# (rows of W, columns) of Llama-3.1 8B's maps and 70B's, and of their heads and drafts' inputs.
MAPS = [
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (4096, 12288), (6144, 8192),
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (128256, 8192), (8192, 24576), (10240, 16384),
]  # fmt: skip


@pytest.mark.reference
@pytest.mark.parametrize("arch", ARCHES)
def test_the_workspace_holds_what_every_pass_of_its_rows_takes(arch):
    for n_w, k in MAPS:
        for rows in (1, 8, 16, 24, 64, 65, 128, 320, 512, 576, 1024, 2944, 3072, 4096, 8192):
            of_fp8 = (choose_fp8_tiling(arch, rows, n_w // 16, k, blocks=blocks) for blocks in (False, True))
            for tiling in (choose_tiling(arch, rows, n_w // 16, k), *of_fp8):
                words = sum(scratch_words(tiling, rows, n_w // 16, k))
                assert 4 * words <= workspace_bytes(rows, k), (n_w, k, rows, tiling)
                n_blocks = -(-rows // (8 * tiling.x_tiles)) * -(-n_w // 16 // tiling.w_tiles)
                assert tiling.split == 1 or n_blocks <= COUNTERS
    assert workspace_bytes(512, 14336) == WORKSPACE_BYTES, "an engine that keeps the usual chunk pays no more"


@pytest.mark.gpu
def test_a_pass_of_thousands_of_rows_gives_the_bits_of_its_parts(gpu):
    device, arch, execute = gpu
    rows, n, k, part = 3072, 4096, 14336, 512
    w = pack_weight(torch.randn(n, k, device=device).div(k**0.5).bfloat16(), Epilogue("store"))
    x = torch.randn(rows, k, device=device).bfloat16()
    y, parts = torch.zeros(2, rows, n, device=device, dtype=torch.bfloat16)
    common = {"w": w, "k": k, "packed": True, "weight_rows": n, "operands": {}}
    wide, narrow = workspace(device, workspace_bytes(rows, k)), workspace(device)
    execute(gemm(arch, Epilogue("store"), x=x, y=y, scratch=wide, **common))
    for at in range(0, rows, part):
        own = slice(at, at + part)
        execute(gemm(arch, Epilogue("store"), x=x[own], y=parts[own], scratch=narrow, **common))
    assert y.abs().max() > 0
    assert torch.equal(y.view(torch.int16), parts.view(torch.int16))
