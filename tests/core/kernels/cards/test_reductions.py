"""Sums, prefixes and extremes over warps and blocks equal numpy's, and give every lane the same answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eagle3core.kernels.card import Variant, parameters
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.isa import reductions

pytestmark = pytest.mark.emulated

WARPS = 3
THREADS = 32 * WARPS


def run(body, **values) -> None:
    text = " ".join(f"{name}:{'out' if name.startswith('y') else 'in'}" for name in values)
    variant = Variant("test", lambda isa: body(isa), {}, parameters(text), THREADS, 1024)
    emulator.execute([variant.launch((1,), **values)])


def test_block_sums_and_prefixes_of_integers_are_exact():
    x = torch.randint(-1000, 1000, (THREADS,), dtype=torch.int32)
    total, before, before_twice, all_of = (torch.zeros(THREADS, dtype=torch.int32) for _ in range(4))

    def body(isa):
        block_sum, prefix = (
            reductions.make_block_sum_i32(isa, WARPS),
            reductions.make_block_prefix_pair_i32(isa, WARPS),
        )

        def kernel(x, y_total, y_before, y_twice, y_all):
            tid = isa.cuda.threadIdx.x
            v = isa.load_u32(x + tid * 4)
            isa.store_u32(y_total + tid * 4, block_sum(v, 0, tid))
            twice, below, everything = prefix(2 * v, v, 64, tid)
            isa.store_u32(y_before + tid * 4, below)
            isa.store_u32(y_twice + tid * 4, twice)
            isa.store_u32(y_all + tid * 4, everything)

        return kernel

    run(body, x=x, y_total=total, y_before=before, y_twice=before_twice, y_all=all_of)
    assert torch.equal(total, x.sum().int().expand(THREADS))
    assert torch.equal(all_of, total)
    assert torch.equal(before, (x.cumsum(0) - x).int())
    assert torch.equal(before_twice, 2 * before)


def test_block_sums_and_prefixes_of_floats_are_right_and_equal_in_every_lane():
    x = torch.randn(THREADS)
    total, upto = torch.zeros(THREADS), torch.zeros(THREADS)

    def body(isa):
        block_sum, prefix = reductions.make_block_sum(isa, WARPS), reductions.make_block_prefix_f32(isa, WARPS)

        def kernel(x, y_total, y_upto):
            tid = isa.cuda.threadIdx.x
            v = isa.load_f32(x + tid * 4)
            isa.store_f32(y_total + tid * 4, block_sum(v, 0, tid))
            isa.store_f32(y_upto + tid * 4, prefix(v, 64, tid)[1])

        return kernel

    run(body, x=x, y_total=total, y_upto=upto)
    assert len(total.unique()) == 1
    assert torch.allclose(total, x.sum().expand(THREADS), atol=1e-5)
    assert torch.allclose(upto, x.cumsum(0), atol=1e-5)


def test_the_best_of_a_block_is_the_largest_and_of_equal_ones_the_lowest():
    x = torch.randint(-4, 5, (THREADS,)).float()
    best, place, least = torch.zeros(THREADS), torch.zeros(THREADS).int(), torch.zeros(THREADS).int()

    def body(isa):
        block_best, block_min = (
            reductions.make_block_best(isa, WARPS),
            reductions.make_block_min_i32(isa, WARPS),
        )

        def kernel(x, y_best, y_place, y_least):
            tid = isa.cuda.threadIdx.x
            value, index = block_best(isa.load_f32(x + tid * 4), tid, 0, tid)
            isa.store_f32(y_best + tid * 4, value)
            isa.store_u32(y_place + tid * 4, index)
            isa.store_u32(y_least + tid * 4, block_min(5 - tid, 64, tid))

        return kernel

    run(body, x=x, y_best=best, y_place=place, y_least=least)
    assert torch.equal(best, x.max().expand(THREADS))
    assert torch.equal(place, x.eq(x.max()).int().argmax().int().expand(THREADS))
    assert torch.equal(least, torch.full((THREADS,), 6 - THREADS, dtype=torch.int32))


def test_sortable_integers_order_as_their_floats_do():
    special = [float("-inf"), -3e38, -1.5, -1e-30, -0.0, 0.0, 1e-30, 1.5, 3e38, float("inf")]
    x = torch.cat([torch.tensor(special), torch.randn(THREADS - len(special))])
    y = torch.zeros(THREADS, dtype=torch.int32)

    def body(isa):
        sortable = reductions.make_sortable(isa)

        def kernel(x, y):
            tid = isa.cuda.threadIdx.x
            isa.store_u32(y + tid * 4, sortable(isa.load_f32(x + tid * 4)))

        return kernel

    run(body, x=x, y=y)
    assert bool((x[y.argsort()].diff().nan_to_num(0) >= 0).all())
    assert y[4] < y[5]


@pytest.mark.parametrize(("base", "less"), [(0.0, 0.0), (21.75, 1e-6), (-133.0, -3e-6)])
def test_a_logarithm_added_to_a_base_of_sixteen_bits_is_rounded_once(base, less):
    x = torch.cat([torch.rand(THREADS // 2) * 2 + 1e-3, torch.rand(THREADS // 2) * 3e5])
    y = torch.zeros(THREADS)
    base, less = np.float32(base), np.float32(less)

    def body(isa):
        add_log = reductions.make_add_log(isa)

        def kernel(x, y):
            tid = isa.cuda.threadIdx.x
            isa.store_f32(y + tid * 4, add_log(base, isa.load_f32(x + tid * 4), less))

        return kernel

    run(body, x=x, y=y)
    wanted = float(base) + x.double().log() - float(less) * math.log(2)
    one_rounding = np.finfo(np.float32).eps / 2 * torch.exp2(wanted.abs().log2().floor())
    assert bool(((y.double() - wanted).abs() <= 2.5e-7 + one_rounding).all())


def test_two_sums_over_the_same_scratch_words_are_reported_as_a_race():
    def body(isa):
        block_sum = reductions.make_block_sum(isa, WARPS)

        def kernel(x, y):
            tid = isa.cuda.threadIdx.x
            v = isa.load_f32(x + tid * 4)
            isa.store_f32(y + tid * 4, block_sum(v, 0, tid) + block_sum(v, 0, tid))

        return kernel

    with pytest.raises(EmulationError, match="race"):
        run(body, x=torch.randn(THREADS), y=torch.zeros(THREADS))
