"""The emulator computes what the instructions say."""

import numpy as np
import pytest
import torch
from emulated import run

from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.tensor_map import tensor_map

pytestmark = pytest.mark.emulated


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


def test_eight_by_eight_elements_are_transposed_between_lanes():
    x = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    y = torch.zeros(8, 8, dtype=torch.int16)

    def body(isa):
        def kernel(xp, yp):
            at = isa.cuda.threadIdx.x * 4  # lane l has row l / 4, columns 2 (l % 4) and the next
            isa.store_u32(yp + at, isa.transpose(isa.load_u32(xp + at)))

        return kernel

    run(body, "xp:in yp:out", xp=x, yp=y)
    assert torch.equal(y, x.T)


def test_stores_below_an_end_leave_the_others_alone():
    one, two, twice = (torch.full((32, n), -1, dtype=torch.int32) for n in (1, 2, 2))

    def body(isa):
        def kernel(op, tp, wp):
            lane = isa.cuda.threadIdx.x
            isa.store_u32_below(isa.address_after(op, 4, lane), lane, lane, 5)
            isa.store_u32x2_below(isa.address_after(tp, 8, lane), lane, lane + 1, lane, 6)
            at = wp + lane * 8
            isa.store_u32_twice_below(at, lane, at + 4, 2 * lane, lane, 7)

        return kernel

    run(body, "op:out tp:out wp:out", op=one, tp=two, wp=twice)
    for values, factors, added, end in ((one, (1,), (0,), 5), (two, (1, 1), (0, 1), 6), (twice, (1, 2), (0, 0), 7)):
        lanes = torch.arange(32, dtype=torch.int32)[:, None]
        expected = lanes * torch.tensor(factors, dtype=torch.int32) + torch.tensor(added, dtype=torch.int32)
        assert torch.equal(values, torch.where(lanes < end, expected, -1))


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


def multiplies_a_box(isa, *, transposed: bool = False, row: int = 16, acquires: bool = True):
    """64 rows of `a` by the box of 16 rows of 64 that begins at `row`: over its 64, or transposed over its 16."""
    n, n_products = (64, 1) if transposed else (16, 4)
    product, settle = isa.group_mma("bf16", n, False, transposed), isa.group_settle(n)

    def kernel(a, b, b_map, d):
        lane = isa.cuda.threadIdx.x
        first, g, t = (lane >> 5) * 16, (lane & 31) >> 2, lane & 3
        base = isa.shared_address(isa.cuda.shared.array(0, isa.f32, alignment=1024))
        if lane == 0:
            isa.mbarrier_init(base + 2048, 1)
            if acquires:
                isa.tensor_map_acquire(b_map)
            isa.mbarrier_expect(base + 2048, 2048)
            isa.tensor_copy(base, b_map, 0, row, base + 2048)
        isa.cuda.syncthreads()
        isa.mbarrier_wait(base + 2048, 0)
        sums = isa.cuda.local.array(n // 2, isa.f32)
        for i in range(n // 2):
            sums[i] = isa.f32(0)
        isa.group_fence()
        for p in range(n_products):
            places = [((first + g + 8 * (i & 1)) * 16 * n_products + 16 * p + 2 * t + 8 * (i >> 1)) for i in range(4)]
            fragment = [isa.load_u32(a + place * 2) for place in places]
            product(sums, *fragment, (base >> 4) + 2 * p + (64 << 32) + (1 << 62))
        isa.group_commit()
        settle(sums)
        for i in range(n // 2):
            place = (first + g + 8 * (i >> 1 & 1)) * n + (i >> 2) * 8 + 2 * t + (i & 1)
            isa.store_f32(d + place * 4, sums[i])

    return kernel


@pytest.mark.parametrize("transposed", [False, True])
def test_a_warpgroup_multiplies_a_box_as_a_tensor_copy_lays_it_down(transposed: bool):
    torch.manual_seed(5)
    a = torch.randint(-9, 10, (64, 16 if transposed else 64)).bfloat16()
    b = torch.randint(-9, 10, (3, 16, 64)).bfloat16()
    right = b[1].float() if transposed else b[1].float().T
    d = torch.full((64, right.shape[1]), float("nan"))
    run(
        lambda isa: multiplies_a_box(isa, transposed=transposed),
        "a:in b:const b_map:const d:out",
        threads=128, shared=2056, a=a, b=b, b_map=tensor_map(b, 16), d=d,
    )  # fmt: skip
    assert torch.equal(d, a.float() @ right)


def multiplies_twice(isa, *, settles_newer: bool):
    """Zeros times zeros in two batches, of which the older is waited for: its sums are stored, or the newer's."""
    product, settle_older = isa.group_mma("bf16", 16, True), isa.group_settle(16, 1)
    settle = isa.group_settle(16)

    def kernel(d):
        lane = isa.cuda.threadIdx.x
        if lane < 32:
            isa.shared_store_u32x4(lane * 16, 0, 0, 0, 0)
        isa.fence_async_shared()
        isa.cuda.syncthreads()
        older, newer = isa.cuda.local.array(8, isa.f32), isa.cuda.local.array(8, isa.f32)
        for sums in (older, newer):
            isa.group_fence()
            product(sums, 0, 0, 0, 0, (128 >> 4) << 16 | (256 >> 4) << 32)
            isa.group_commit()
        settle_older(newer if settles_newer else older)
        for i in range(8):
            isa.store_f32(d + (lane * 8 + i) * 4, (newer if settles_newer else older)[i])
        settle(newer)

    return kernel


def test_sums_of_an_older_batch_may_be_used_while_a_newer_one_is_under_way_and_not_the_other_way_around():
    d = torch.full((128, 8), float("nan"))
    run(lambda isa: multiplies_twice(isa, settles_newer=False), "d:out", threads=128, shared=512, d=d)
    assert torch.equal(d, torch.zeros(128, 8))
    with pytest.raises(EmulationError, match="a batch under way is to write"):
        run(lambda isa: multiplies_twice(isa, settles_newer=True), "d:out", threads=128, shared=512, d=d)


def test_what_nobody_has_written_is_no_number_in_a_product_of_a_warpgroup():
    def body(isa):
        product, settle = isa.group_mma("bf16", 16, True), isa.group_settle(16)

        def kernel(d):
            lane = isa.cuda.threadIdx.x
            if lane < 16:  # the first eight of 16 columns
                isa.shared_store_u32x4((lane & 1) * 128 + (lane >> 1) * 16, 0, 0, 0, 0)
            isa.fence_async_shared()
            isa.cuda.syncthreads()
            sums = isa.cuda.local.array(8, isa.f32)
            isa.group_fence()
            product(sums, 0, 0, 0, 0, (128 >> 4) << 16 | (256 >> 4) << 32)
            isa.group_commit()
            settle(sums)
            for i in range(8):
                isa.store_f32(d + (lane * 8 + i) * 4, sums[i])

        return kernel

    d = torch.full((128, 2, 4), -1.0)
    run(body, "d:out", threads=128, shared=512, d=d)
    assert torch.equal(d[:, 0], torch.zeros(128, 4))
    assert d[:, 1].isnan().all()


@pytest.mark.parametrize(
    ("about", "message"), [({"row": 40}, "a box at row 40"), ({"acquires": False}, "nobody it has met acquired")]
)
def test_a_tensor_copy_that_a_gpu_would_punish_is_reported(about: dict[str, int], message: str):
    a, b, d = torch.zeros(64, 64).bfloat16(), torch.zeros(3, 16, 64).bfloat16(), torch.zeros(64, 16)
    with pytest.raises(EmulationError, match=message):
        run(
            lambda isa: multiplies_a_box(isa, **about), "a:in b:const b_map:const d:out",
            threads=128, shared=2056, a=a, b=b, b_map=tensor_map(b, 16), d=d,
        )  # fmt: skip


@pytest.mark.reference
def test_a_matrix_has_one_map_and_another_matrix_another():
    first, second = torch.zeros(2, 16, 64).bfloat16(), torch.zeros(2, 16, 64).bfloat16()
    assert tensor_map(first, 16) is tensor_map(first, 16)
    assert tensor_map(first, 16).tolist()[:4] == [first.data_ptr(), 32, 128, 16]
    assert not torch.equal(tensor_map(first, 16), tensor_map(second, 16))
