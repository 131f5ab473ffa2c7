"""The experts' feed-forward: gate and up of every chosen expert, down of what they give, and the rows' weighted sums.

y = r + sum over a row's experts, ascending, of share * (W_down a + b_down), where a = gate(W_gate_up x + b_gate_up).
Each distinct expert is read once, for all rows that chose it.
Source: SwiGLU, arXiv 2002.05202; gpt-oss's clamped form as transformers 5.17 has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels.card import Op
from eagle3core.kernels.experts.gates import GATES
from eagle3core.kernels.experts.maps.launcher import expert_down, expert_gate_up
from eagle3core.kernels.experts.matrices import Matrices
from eagle3core.kernels.experts.route import normed, wide_of
from eagle3core.kernels.experts.routing.lists import Lists, Routed
from eagle3core.kernels.experts.total import expert_sum
from eagle3core.kernels.layer.embedding import partial_squares_reference


def _rows_of_experts(chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, rows, places) of every expert in `chosen: [n, k]`, ascending: its rows, and where each has it."""
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        yield expert, rows, places


def _applied(x: Tensor, maps: Matrices, expert: int) -> Tensor:
    """`x W^T + b` of one expert, in the dtype of `x`."""
    v, bias = F.linear(x, maps.of(expert, x.dtype)), maps.bias_of(expert)
    return v if bias is None else v + bias


def expert_gate_up_meaning(
    x: Tensor, sums: Tensor, routed: Routed, maps: Matrices, inner: Tensor, *, eps: float, gate: str,
    is_normalised: bool, lists: Lists | None = None,
) -> None:  # fmt: skip
    """`inner: [n, k, F]` what each chosen expert makes of its row.

    Args:
        x, sums: as of `route_meaning`. routed: what `route` leaves, whose choice is read here; kernels choose one
            row's experts by the logits, and leave choice and shares. maps: `[X, 2 F, E]`. gate: of `GATES`.
        is_normalised: as of `route_meaning`. lists: for the kernels, as `route` leaves them; neither is read here.
    """
    rows = normed(x, sums, eps)
    for expert, at, places in _rows_of_experts(routed.chosen):
        inner[at, places] = GATES[gate](_applied(rows[at], maps, expert)).to(inner.dtype)


def expert_down_meaning(
    inner: Tensor, routed: Routed, maps: Matrices, parts: Tensor, *, is_normalised: bool, lists: Lists | None = None
) -> None:
    """`parts: [n, k, E]` each chosen expert's output, one precision up from 16-bit rows; `maps: [X, E, F]`."""
    for expert, at, places in _rows_of_experts(routed.chosen):
        rows = inner[at, places].to(wide_of(inner))
        parts[at, places] = _applied(rows, maps, expert).to(parts.dtype)


def expert_sum_meaning(
    parts: Tensor, shares: Tensor, residual: Tensor, gain: Tensor, y: Tensor, scaled: Tensor, sums: Tensor
) -> None:
    """`y: [n, E]` the residual stream with the experts' part, and of it what the next map reads.

    Args:
        parts: `[n, k, E]`, added from the first place of a row to its last. shares: `[n, k]`. residual: `[n, E]`.
        gain: `[E]` of the next norm. scaled: `[n, E]` y * gain. sums: partial sums of the squares of y.
    """
    wide = wide_of(y)
    total = torch.zeros_like(residual, dtype=wide)
    for place in range(parts.shape[1]):
        total = total + shares[:, place, None].to(wide) * parts[:, place].to(wide)
    y.copy_(residual + total)
    scaled.copy_(y * gain)
    sums.copy_(partial_squares_reference(y))


EXPERT_GATE_UP = Op("expert_gate_up", expert_gate_up, expert_gate_up_meaning)
EXPERT_DOWN = Op("expert_down", expert_down, expert_down_meaning)
EXPERT_SUM = Op("expert_sum", expert_sum, expert_sum_meaning)
