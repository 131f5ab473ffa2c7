"""The emulator computes what the instructions say, and refuses what a GPU would leave to luck."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eagle3core.kernels.card import Variant, parameters
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError

pytestmark = pytest.mark.emulated


def run(body: Callable[[Any], Callable[..., None]], text: str, threads: int = 32, shared: int = 0, grid: int = 1,
        dependent: bool = False, **values: Any) -> None:  # fmt: skip
    variant = Variant("test", lambda isa: body(isa), {}, parameters(text), threads, shared, dependent=dependent)
    emulator.execute([variant.launch((grid,), **values)])


def test_both_instruction_sets_offer_the_same_names():
    from eagle3core.kernels.isa import ptx

    own = {"instruction", "intrinsic", "ir", "types"}
    names = {n for n, v in vars(ptx).items() if n[0] != "_" and n not in own and getattr(v, "__name__", "") != "numpy"}
    kept = {n for n in names if n not in ("annotations", "Any", "Callable", "Sequence")}
    assert len(kept) > 60
    assert sorted(n for n in kept if not hasattr(emulator, n)) == []


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_a_tensor_core_product_equals_a_matrix_product(kind: str):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    torch.manual_seed(3)
    a, b = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype)
    c, d = torch.randn(16, 8), torch.full((16, 8), float("nan"))

    def body(isa):
        def kernel(ap, bp, cp, dp):
            lane = isa.cuda.threadIdx.x
            g, t = lane >> 2, lane & 3
            at = [ap + ((g + 8 * (i & 1)) * 16 + 2 * t + 8 * (i >> 1)) * 2 for i in range(4)]
            bt = [bp + (g * 16 + 2 * t + 8 * i) * 2 for i in range(2)]
            ct = [((g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)) * 4 for i in range(4)]
            fragments = [isa.load_u32(p) for p in at + bt] + [isa.load_f32(cp + o) for o in ct]
            for offset, value in zip(ct, isa.MMA[kind](*fragments), strict=True):
                isa.store_f32(dp + offset, value)

        return kernel

    run(body, "ap:in bp:in cp:in dp:out", ap=a, bp=b, cp=c, dp=d)
    assert torch.allclose(d, a.float() @ b.float().T + c, rtol=1e-5, atol=1e-5)


def test_ldmatrix_gives_each_lane_its_pairs_and_trans_the_transposed_ones():
    x = torch.arange(256, dtype=torch.int16).view(32, 8)
    plain, trans = torch.zeros(32, 4, dtype=torch.int32), torch.zeros(32, 4, dtype=torch.int32)

    def body(isa):
        def kernel(xp, pp, tp):
            lane = isa.cuda.threadIdx.x
            isa.shared_store_u32x4(lane * 16, *isa.load_u32x4(xp + lane * 16))
            isa.cuda.syncwarp()
            isa.store_u32x4(pp + lane * 16, *isa.ldmatrix_x4(lane * 16))
            isa.store_u32x4(tp + lane * 16, *isa.ldmatrix_x4_trans(lane * 16))

        return kernel

    run(body, "xp:in pp:out tp:out", shared=512, xp=x, pp=plain, tp=trans)
    blocks = x.view(4, 8, 8).numpy()
    for lane in range(32):
        row, pair = lane >> 2, lane & 3
        for block in range(4):
            low, high = np.int32(plain[lane, block]) & 0xFFFF, int(plain[lane, block]) >> 16
            assert (low, high) == tuple(blocks[block, row, 2 * pair : 2 * pair + 2])
            low, high = np.int32(trans[lane, block]) & 0xFFFF, int(trans[lane, block]) >> 16
            assert (low, high) == tuple(blocks[block, 2 * pair : 2 * pair + 2, row])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_packing_rounds_to_nearest_even_as_torch_does(kind: str):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    x = torch.cat([torch.randn(56), torch.tensor([0.0, -0.0, 1e30, -1e30, 1.00390625, 1.01171875, 3e-6, float("inf")])])
    y, z = torch.zeros(32, dtype=torch.int32), torch.zeros(64)

    def body(isa):
        def kernel(xp, yp, zp):
            lane = isa.cuda.threadIdx.x
            pair = isa.PACK[kind](isa.load_f32(xp + lane * 8 + 4), isa.load_f32(xp + lane * 8))
            isa.store_u32(yp + lane * 4, pair)
            isa.store_f32x2(zp + lane * 8, isa.LOW[kind](pair), isa.HIGH[kind](pair))

        return kernel

    run(body, "xp:in yp:out zp:out", xp=x, yp=y, zp=z)
    assert torch.equal(y.view(dtype).view(torch.int16), x.to(dtype).view(torch.int16))
    assert torch.equal(z, x.to(dtype).float())


def test_barriers_shuffles_and_votes_exchange_values():
    y = torch.zeros(64)

    def body(isa):
        def kernel(yp):
            tid = isa.cuda.threadIdx.x
            isa.shared_store_f32(tid * 4, isa.f32(tid))
            isa.cuda.syncthreads()
            other = isa.shared_load_f32((tid ^ 32) * 4)
            lane = tid & 31
            wide = isa.shuffle_xor_f32(other, 3) + isa.shuffle_i32(lane, 5) + isa.popcount(isa.ballot(lane < 7))
            isa.store_f32(yp + tid * 4, wide + isa.any_lane(tid == 40))

        return kernel

    run(body, "yp:out", threads=64, shared=256, yp=y)
    tid = torch.arange(64)
    expected = ((tid ^ 3) ^ 32).float() + 5 + 7 + (tid >= 32).float()
    assert torch.equal(y, expected)


# ---- planted bugs: each body breaks one rule


def missing_block_barrier(isa):
    def kernel(x, y):
        tid = isa.cuda.threadIdx.x
        isa.shared_store_f32(tid * 4, isa.load_f32(x + tid * 4))
        isa.store_f32(y + tid * 4, isa.shared_load_f32((tid ^ 32) * 4))

    return kernel


def missing_warp_barrier(isa):
    def kernel(x, y):
        tid = isa.cuda.threadIdx.x
        isa.shared_store_f32(tid * 4, isa.load_f32(x + tid * 4))
        same = isa.shuffle_xor_f32(isa.f32(0), 1)  # a shuffle does not order memory
        isa.store_f32(y + tid * 4, isa.shared_load_f32((tid ^ 1) * 4) + same)

    return kernel


def overwrite_before_all_have_read(isa):
    def kernel(x, y):
        tid = isa.cuda.threadIdx.x
        isa.shared_store_f32(tid * 4, isa.load_f32(x + tid * 4))
        isa.cuda.syncthreads()
        other = isa.shared_load_f32((tid ^ 32) * 4)
        isa.shared_store_f32(tid * 4, other)
        isa.store_f32(y + tid * 4, other)

    return kernel


def read_before_the_copy_has_landed(isa):
    def kernel(x, y):
        tid = isa.cuda.threadIdx.x
        for stage in range(2):
            isa.copy16(stage * 1024 + tid * 16, x + (tid & 15) * 16)
            isa.copy_commit()
        isa.COPY_WAIT[1]()
        isa.store_f32(y + tid * 4, isa.shared_load_f32(1024 + tid * 16))
        isa.COPY_WAIT[0]()

    return kernel


def read_past_the_end(isa):
    def kernel(x, y):
        tid = isa.cuda.threadIdx.x
        isa.store_f32(y + tid * 4, isa.load_f32(x + tid * 4 + 4))

    return kernel


def write_to_an_input(isa):
    def kernel(x, y):
        isa.store_f32(x, isa.f32(1))

    return kernel


def misaligned(isa):
    def kernel(x, y):
        isa.load_u32x4(x + 8)

    return kernel


def shared_out_of_bounds(isa):
    def kernel(x, y):
        isa.shared_store_f32(4096, isa.f32(1))

    return kernel


def never_written(isa):
    def kernel(x, y):
        isa.shared_load_f32(0)

    return kernel


def divided_warp(isa):
    def kernel(x, y):
        if isa.cuda.threadIdx.x & 1:
            isa.shuffle_xor_f32(isa.f32(0), 1)
        else:
            isa.cuda.syncwarp()

    return kernel


def barrier_in_a_branch(isa):
    def kernel(x, y):
        if isa.cuda.threadIdx.x < 32:
            isa.cuda.syncthreads()
        else:
            isa.named_barrier(1, 64)

    return kernel


def copies_under_way_at_the_end(isa):
    def kernel(x, y):
        isa.copy16(isa.cuda.threadIdx.x * 16, x)
        isa.copy_commit()

    return kernel


def index_wider_than_32_bits(isa):
    def kernel(x, y):
        isa.i32(1 << 33)

    return kernel


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (missing_block_barrier, "nobody has written|race"),
        (missing_warp_barrier, "race"),
        (overwrite_before_all_have_read, "race"),
        (read_before_the_copy_has_landed, "under way"),
        (read_past_the_end, "out of bounds: 256 bytes into x"),
        (write_to_an_input, "x is written"),
        (misaligned, "not aligned to 16"),
        (shared_out_of_bounds, "out of bounds"),
        (never_written, "nobody has written"),
        (divided_warp, "divided"),
        (barrier_in_a_branch, "deadlock"),
        (copies_under_way_at_the_end, "under way"),
        (index_wider_than_32_bits, "does not fit"),
    ],
)
def test_a_planted_bug_is_reported(body: Callable[[Any], Any], message: str):
    with pytest.raises(EmulationError, match=message):
        run(body, "x:in y:out", threads=64, shared=4096, x=torch.randn(64), y=torch.zeros(64))


def early_read(isa):
    def kernel(x, y):
        isa.load_f32(x)
        isa.wait_previous()

    return kernel


def early_write(isa):
    def kernel(x, y):
        isa.store_f32(y, isa.f32(0))
        isa.wait_previous()

    return kernel


def one_lane_does_not_wait(isa):
    def kernel(x, y):
        if isa.cuda.threadIdx.x > 0:
            isa.wait_previous()

    return kernel


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (early_read, "x is touched before wait_previous"),
        (early_write, "y is touched before wait_previous"),
        (one_lane_does_not_wait, "lane 0 ends without wait_previous"),
    ],
)
def test_a_dependent_kernel_must_wait_before_it_touches_what_others_write(body: Callable[[Any], Any], message: str):
    with pytest.raises(EmulationError, match=message):
        run(body, "x:in y:out", dependent=True, x=torch.randn(64), y=torch.zeros(64))


def test_constants_may_be_read_before_the_wait():
    y = torch.zeros(1)

    def body(isa):
        def kernel(x, y):
            value = isa.load_f32(x)
            isa.wait_previous()
            isa.store_f32(y, value)

        return kernel

    run(body, "x:const y:out", dependent=True, x=torch.tensor([5.0]), y=y)
    assert y.item() == 5


def bulk_ring(isa, *, forget: bool):
    def kernel(x, y):
        tid = isa.cuda.threadIdx.x
        if tid == 0:
            isa.mbarrier_init(2048, 1)
            isa.mbarrier_fence_init()
        isa.cuda.syncthreads()
        if tid == 0:
            isa.mbarrier_expect(2048, 256)
            isa.bulk_copy(0, x, 256, 2048)
        if not forget:
            isa.mbarrier_wait(2048, 0)
        isa.store_f32(y + tid * 4, isa.shared_load_f32(tid * 4))

    return kernel


def test_a_bulk_copy_is_visible_to_lanes_that_waited_for_its_barrier():
    x, y = torch.randn(64), torch.zeros(64)
    run(lambda isa: bulk_ring(isa, forget=False), "x:in y:out", threads=64, shared=4096, x=x, y=y)
    assert torch.equal(x, y)


def test_reading_a_bulk_copy_without_waiting_is_reported():
    with pytest.raises(EmulationError, match="race"):
        run(lambda isa: bulk_ring(isa, forget=True), "x:in y:out", 64, 4096, x=torch.randn(64), y=torch.zeros(64))
