"""The emulator reports what a GPU would leave to luck: missing waits, wrong addresses, divided warps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import run

from eagle3core.kernels.emulator.machine import EmulationError

pytestmark = pytest.mark.emulated


# ---- each body breaks one rule


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


def moves_registers(isa, *, more: int, fewer: int = 48):
    """Two warpgroups want `more` a lane, and one gives up all but `fewer`; each lane was launched with 168."""
    take, give = isa.more_registers(more), isa.fewer_registers(fewer)

    def kernel(x, y):
        if isa.cuda.threadIdx.x < 256:
            take()
        else:
            give()

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


@pytest.mark.parametrize(
    ("more", "fewer", "message"),
    [
        (232, 48, "deadlock.*registers"),  # 2 * 232 + 48 is 512, three times 168 is 504
        (228, 48, r"ask for \[228\] registers"),
        (224, 176, "have 168 registers gives all but 176"),
    ],
)
def test_registers_that_a_block_was_not_launched_with_never_come(more: int, fewer: int, message: str):
    launch = {"threads": 384, "x": torch.zeros(1), "y": torch.zeros(1)}
    run(lambda isa: moves_registers(isa, more=224), "x:in y:out", **launch)
    run(lambda isa: moves_registers(isa, more=232, fewer=40), "x:in y:out", **launch)
    with pytest.raises(EmulationError, match=message):
        run(lambda isa: moves_registers(isa, more=more, fewer=fewer), "x:in y:out", **launch)


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


def bulk_ring(isa, *, forget: bool, further: int = 0):
    def kernel(x, y):
        tid = isa.cuda.threadIdx.x
        if tid == 0:
            isa.mbarrier_init(2048, 1)
            isa.mbarrier_fence_init()
        isa.cuda.syncthreads()
        if tid == 0:
            isa.mbarrier_expect(2048, 256)
            isa.bulk_copy(0, x, 256, 2048)
            if further:
                isa.bulk_copy(1024, x, further, 2048)
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


def test_bytes_that_nobody_announced_are_reported_though_nobody_waits_for_them():
    """They would leave the barrier's next phase open, or land in a block that has gone."""
    with pytest.raises(EmulationError, match="ends with 64 bytes more than those that the barrier at 2048 was told of"):
        run(
            lambda isa: bulk_ring(isa, forget=False, further=64), "x:in y:out", 64, 4096,
            x=torch.randn(64), y=torch.zeros(64),
        )  # fmt: skip
