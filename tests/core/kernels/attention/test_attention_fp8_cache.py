"""Attention over a cache in e4m3: the order of sums of 16-bit keys, their bits, and what no kernel takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rings import slow_from
from torch import Tensor

from eagle3core.kernels import proof
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.launcher import attention, attention_scratch
from eagle3core.kernels.attention.layout import Shape, shape_over
from eagle3core.kernels.attention.offers import attention_variants_of
from eagle3core.kernels.attention.plan import choose_plan, order_of
from eagle3core.kernels.card import ARCHES, SHARED_BYTES, Case, Tensors
from eagle3core.kernels.emulator import instructions as emulator

pytestmark = pytest.mark.emulated

CPU = torch.device("cpu")
ORDER = (2, 2)
_STREAMS: dict[str, Any] = {"heads": 2, "kv_heads": 1, "tokens": 3, "prefix": (93, 14), "tree": "chain"}
_KINDS: dict[str, Case] = {
    "eight rows": _STREAMS,
    "two tiles, head of 128": {**_STREAMS, "dim": 128, "heads": 8, "prefix": (150,)},
    "many rows": {**_STREAMS, "dim": 128, "tokens": 33, "prefix": (70,), "tree": "random"},
    "a tree's paths": {**_STREAMS, "heads": 4, "tokens": 6, "prefix": (41, -2), "tree": "random", "paths": True},
    "fp16, a window and earlier keys": {**_STREAMS, "dtype": "f16", "earlier": 5, "window": 20, "prefix": (75, 9)},
}


def multiplied_order(dim: int) -> Tensor:
    """Which element of a head stands at each place of the products of 16-bit keys, for the same sums over e4m3.

    A lane's 16 bytes are elements 16t .. 16t + 15 of 64, the operands of four products: pairs 2t and 2t + 8 of each.
    """
    order = []
    for product in range(dim // 16):
        for pair in range(2):
            for t in range(4):
                first = 64 * (product // 4) + 16 * t + 4 * (product % 4) + 2 * pair
                order += [first, first + 1]
    return torch.tensor(order)


def sums(case: Case, inputs: Tensors, arch: str = "sm_90a") -> tuple[Tensor, ...]:
    """Bits of what the first kernel leaves of a case's inputs, whatever its cache is stored in; scales of 1."""
    q, out = inputs["q"], torch.full_like(inputs["q"], float("nan"))
    (batch, tokens, n_heads, dim), n_kv = q.shape, inputs["k"].shape[1]
    shape = Shape(case["dtype"], dim, n_heads // n_kv, *ORDER)
    path_len = int(inputs["mask"].sum(-1).max()) if case.get("paths") else 0
    scratch = attention_scratch(shape, batch, tokens, n_kv, CPU)
    emulator.execute(attention(
        arch, q=q, k_blocks=inputs["k"], v_blocks=inputs["v"], block_tables=inputs["tables"],
        prefix_lens=inputs["prefix"], masks=inputs["words"], out=out, scratch=scratch, order=ORDER,
        window=case.get("window", 0), positions=inputs["positions"], earlier=case.get("earlier", 0),
        path_len=path_len,
    ))  # fmt: skip
    assert out.isfinite().all()
    return tuple(part.view(torch.int32) for part in scratch)


@pytest.mark.parametrize("kind", slow_from(3, list(_KINDS)))
def test_sums_over_e4m3_are_those_over_the_same_values_in_fp16(kind: str) -> None:
    case = {"dtype": "bf16", "dim": 64, "order": ORDER, "fp8": True, **_KINDS[kind]}
    inputs = CARD.example(case, proof.generator(4, CPU), CPU)
    order = multiplied_order(case["dim"])
    half = {name: inputs[name].to(torch.float16) for name in ("q", "k", "v")}
    in_order = {name: half[name][..., order].contiguous() for name in "qk"}
    theirs = sums({**case, "dtype": "f16"}, {**inputs, **half, **in_order})
    for arch in ("sm_90a", "sm_80"):  # which converts in integers
        ours = sums(case, inputs, arch)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_order_of_products_has_every_element_once() -> None:
    for dim in (64, 128):
        assert sorted(multiplied_order(dim).tolist()) == list(range(dim))


@pytest.mark.reference
@pytest.mark.parametrize("arch", ARCHES)
def test_a_ring_of_half_the_bytes_holds_twice_the_keys(arch: str) -> None:
    for dim, group in ((128, 4), (64, 8)):
        for tokens in (1, 4, 8, 16, 64):
            order = order_of(arch, 8, dim)
            stored, sixteen = (shape_over(arch, fp8, "bf16", dim, group, order) for fp8 in (True, False))
            assert 2 * stored.unit_bytes == sixteen.unit_bytes
            plan = choose_plan(arch, stored, tokens, 1, 8)
            about = {"dtype": "bf16", "dim": dim, "heads": 8 * group, "kv_heads": 8, "batch": 1, "kv": 1024}
            [first, _] = attention_variants_of(arch, {**about, "tokens": tokens, "fp8": True})
            assert first.shared_bytes <= SHARED_BYTES[arch]
            if not plan.row_warps:
                assert plan.units >= 2, "a set's place also takes a tile's sums"


@pytest.mark.reference
def test_warpgroups_are_left_out_where_the_cache_is_in_e4m3() -> None:
    order = order_of("sm_90a", 8, 128)
    shapes = [shape_over("sm_90a", fp8, "bf16", 128, 4, order) for fp8 in (False, True)]
    grouped = [choose_plan("sm_90a", shape, 64, 1, 8).grouped for shape in shapes]
    assert grouped == [True, False]
