"""What the router and the experts compute, against loops over single rows; and that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.experts.feed import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    expert_down_meaning,
    expert_gate_up_meaning,
    expert_sum_meaning,
)
from eagle3core.kernels.experts.gates import clamped_gate
from eagle3core.kernels.experts.matrices import PlainMatrices
from eagle3core.kernels.experts.route import ROUTE, Routed, chosen_of, route_meaning
from eagle3core.kernels.layer.embedding import partial_squares_reference

pytestmark = pytest.mark.reference

N, HIDDEN, INNER, X, K, EPS = 7, 32, 24, 6, 3, 1e-5


class Layer:
    """Random rows and experts."""

    def __init__(self, dtype: torch.dtype, *, bias: bool = False, seed: int = 0) -> None:
        self.random, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.h, self.gain, self.next_gain = self.normal(N, HIDDEN), self.normal(HIDDEN), self.normal(HIDDEN)
        self.router, self.router_bias = self.normal(X, HIDDEN), self.normal(X) if bias else None
        self.gate_up = PlainMatrices(self.normal(X, 2 * INNER, HIDDEN), self.normal(X, 2 * INNER) if bias else None)
        self.down = PlainMatrices(self.normal(X, HIDDEN, INNER), self.normal(X, HIDDEN) if bias else None)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def run(self, rows: list[int], *, normalised: bool = True, gate: str = "silu") -> tuple[Routed, Tensor]:
        """Choice and new residual stream of some of the rows, by the meanings."""
        h = self.h[rows]
        n, wide = len(rows), torch.float64 if self.dtype == torch.float64 else torch.float32
        scaled, sums = h * self.gain, partial_squares_reference(h)
        routed = Routed(*(torch.full((n, w), -1, dtype=d) for w, d in ((X, wide), (K, torch.int32), (K, wide))))
        route_meaning(scaled, sums, self.router, routed, eps=EPS, is_normalised=normalised, bias=self.router_bias)
        inner, parts = torch.full((n, K, INNER), torch.nan, dtype=self.dtype), torch.full((n, K, HIDDEN), torch.nan)
        parts = parts.to(wide)
        by = {"is_normalised": normalised}
        expert_gate_up_meaning(scaled, sums, routed, self.gate_up, inner, eps=EPS, gate=gate, **by)
        expert_down_meaning(inner, routed, self.down, parts, **by)
        y, next_scaled, next_sums = torch.empty_like(h), torch.empty_like(h), torch.empty_like(sums)
        expert_sum_meaning(parts, routed.shares, h, self.next_gain, y, next_scaled, next_sums)
        assert torch.equal(next_scaled, y * self.next_gain)
        assert torch.equal(next_sums, partial_squares_reference(y))
        return routed, y


@pytest.mark.parametrize("gate", ["silu", "clamped"])
@pytest.mark.parametrize("normalised", [True, False])
def test_rows_are_those_of_a_loop_over_tokens(gate: str, normalised: bool) -> None:
    layer = Layer(torch.float64, bias=gate == "clamped")
    routed, y = layer.run(list(range(N)), normalised=normalised, gate=gate)
    for row in range(N):
        h = layer.h[row]
        x = h * layer.gain / (h.square().mean() + EPS).sqrt()
        logits = layer.router @ x + (layer.router_bias if layer.router_bias is not None else 0.0)
        best = sorted(range(X), key=lambda i: -float(logits[i]))[:K]
        probabilities = logits.softmax(0)
        whole = sum(float(probabilities[i]) for i in best) if normalised else 1.0
        expected = h.clone()
        for i in best:
            v = layer.gate_up.weight[i] @ x
            if gate == "silu":
                a = v[:INNER] * torch.sigmoid(v[:INNER]) * v[INNER:]
            else:
                assert layer.gate_up.bias is not None
                v = v + layer.gate_up.bias[i]
                g, up = v[::2].clamp(max=7.0), v[1::2].clamp(-7.0, 7.0)
                a = (up + 1) * g * torch.sigmoid(1.702 * g)
            out = layer.down.weight[i] @ a + (layer.down.bias[i] if layer.down.bias is not None else 0.0)
            expected = expected + probabilities[i] / whole * out
        assert routed.chosen[row].tolist() == sorted(best)
        torch.testing.assert_close(y[row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    together, y = layer.run(list(range(N)))
    for row in range(N):
        alone, one = layer.run([row])
        assert torch.equal(one[0], y[row])
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
    _, turned = layer.run(list(range(N))[::-1])
    assert torch.equal(turned.flip(0), y)


def test_of_equal_logits_the_lower_expert_is_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0]])
    assert chosen_of(logits, 2).tolist() == [[1, 2], [0, 1]]
    assert chosen_of(logits, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    assert chosen_of(-logits, 2).tolist() == [[0, 3], [0, 1]]


def test_shares_of_all_experts_add_up_to_less_than_one_and_those_of_the_chosen_to_one() -> None:
    layer = Layer(torch.float64)
    for normalised in (True, False):
        shares = layer.run(list(range(N)), normalised=normalised)[0].shares.sum(1)
        assert bool((abs(shares - 1) < 1e-12).all()) == normalised
        assert bool((shares < 1 - 1e-9).all()) != normalised


def test_the_clamped_gate_bounds_gate_above_and_up_on_both_sides() -> None:
    far = torch.tensor([[50.0, 50.0, -50.0, -50.0, 1.0, -50.0]], dtype=torch.float64)  # gate, up in turn
    seven = 7 / (1 + torch.exp(torch.tensor(-1.702 * 7, dtype=torch.float64)))
    one = 1 / (1 + torch.exp(torch.tensor(-1.702, dtype=torch.float64)))
    low = -50 / (1 + torch.exp(torch.tensor(1.702 * 50, dtype=torch.float64)))
    expected = torch.stack([8 * seven, -6 * low, -6 * one])[None]
    torch.testing.assert_close(clamped_gate(far), expected, rtol=1e-12, atol=0)


def test_a_launch_over_matrices_that_are_not_in_the_kernels_order_is_refused() -> None:
    layer = Layer(torch.bfloat16)
    routed, inner = Routed(*(torch.zeros(N, width) for width in (X, K, K))), layer.normal(N, K, INNER)
    by = {"is_normalised": True}
    with pytest.raises(KernelLimit, match="experts PlainMatrices, no lists"):
        EXPERT_GATE_UP.launcher("sm_90a", layer.h, layer.h, routed, layer.gate_up, inner, eps=EPS, gate="silu", **by)
    with pytest.raises(KernelLimit, match="OrderedMatrices, lists"):
        EXPERT_DOWN.launcher("sm_90a", inner, routed, layer.down, inner, **by)


def test_a_router_without_room_for_its_lists_is_refused() -> None:
    layer = Layer(torch.bfloat16)
    routed = Routed(*(torch.zeros(N, width) for width in (X, K, K)))
    with pytest.raises(KernelLimit, match="without lists"):
        ROUTE.launcher("sm_90a", layer.h, layer.h, layer.router, routed, eps=EPS, is_normalised=True)
