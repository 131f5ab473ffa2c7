"""The router: logits = W_r x, the largest few experts of every row, and their shares of its sum.

Of equal logits the lower expert comes first, so that one input has one choice. Chosen experts are left in ascending
order, which is the order that they are added in.
Source: Shazeer et al., arXiv 1701.06538, section 2.1; Qwen3 and gpt-oss as transformers 5.17 has them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import DTYPES, PLAIN_TORCH, Launch, Op
from eagle3core.kernels.layer.rms_norm import accumulation_dtype

NEEDED = "layers of one feed-forward each: kernels for experts are not built"


class Routed(NamedTuple):
    """What the router leaves: `logits: [n, X]`, `chosen: [n, k]` int32 ascending, `shares: [n, k]` of the sum.

    Logits and shares are one precision up from 16-bit rows.
    """

    logits: Tensor
    chosen: Tensor
    shares: Tensor


def no_kernels(arch: str, *operands: object, **named: object) -> list[Launch]:
    """The launches of an op over experts, of which there are none yet.

    Raises:
        KernelLimit: always.
    """
    raise KernelLimit(f"a layer has experts, on {arch}", NEEDED, PLAIN_TORCH)


def route_meaning(
    x: Tensor, sums: Tensor, weight: Tensor, out: Routed, *, eps: float, is_normalised: bool,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Logits, choice and shares of `x: [n, E]`, rows times a gain that are scaled here as the GEMM scales them.

    Args:
        sums: `[n, ...]` partial sums of the rows' squares before the gain. weight: `[X, E]`. bias: `[X]`.
        is_normalised: shares are a softmax over the chosen experts alone, else over all.
    """
    wide = wide_of(x)
    logits = F.linear(normed(x, sums, eps), weight.to(wide))
    out.logits.copy_(logits if bias is None else logits + bias)
    chosen = chosen_of(out.logits, out.chosen.shape[1])
    out.chosen.copy_(chosen)
    stored = out.logits.to(wide)
    taken = stored.gather(1, chosen)
    out.shares.copy_(taken.softmax(1) if is_normalised else stored.softmax(1).gather(1, chosen))


def chosen_of(logits: Tensor, n_chosen: int) -> Tensor:
    """`[n, n_chosen]` int64, ascending: the largest of `logits: [n, X]`, the lower index first among equals."""
    best = logits.sort(dim=1, descending=True, stable=True).indices[:, :n_chosen]
    return best.sort(dim=1).values


def wide_of(x: Tensor) -> torch.dtype:
    """In which sums over rows like `x` are made: see `gemm.meaning`."""
    return torch.float64 if x.dtype in DTYPES else accumulation_dtype(x.dtype)


def normed(x: Tensor, sums: Tensor, eps: float) -> Tensor:
    """`x: [n, E]` over the root of its mean square, of which `sums` are the parts; wide."""
    wide = wide_of(x)
    mean = sums[: len(x)].sum(dim=1, keepdim=True) / x.shape[1]
    return (x.to(wide) * torch.rsqrt(mean + eps)).to(wide)


ROUTE = Op("route", no_kernels, route_meaning)
