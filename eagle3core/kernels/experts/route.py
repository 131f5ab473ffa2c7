"""The router: logits = W_r x, the largest few experts of every row, and their shares of its sum.

Of equal logits the lower expert comes first, so that one input has one choice. Chosen experts are left in ascending
order, which is the order that they are added in.
Source: Shazeer et al., arXiv 1701.06538, section 2.1; Qwen3 and gpt-oss as transformers 5.17 has them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels.card import DTYPES, Op
from eagle3core.kernels.experts.routing.launcher import route
from eagle3core.kernels.experts.routing.lists import Lists, lists_of
from eagle3core.kernels.experts.routing.lists import Routed as Routed
from eagle3core.kernels.layer.rms_norm import accumulation_dtype

_SHARE_ERROR = 1e-5  # of a share, relative: an exponential, a sum and a reciprocal of a few fp32 roundings each


def route_meaning(
    x: Tensor, sums: Tensor, weight: Tensor, out: Routed, *, eps: float, is_normalised: bool,
    bias: Tensor | None = None, lists: Lists | None = None,
) -> None:  # fmt: skip
    """Logits, choice and shares of `x: [n, E]`, rows times a gain that are scaled here as the GEMM scales them.

    Args:
        sums: `[n, ...]` partial sums of the rows' squares before the gain. weight: `[X, E]`. bias: `[X]`.
        is_normalised: shares are a softmax over the chosen experts alone, else over all. lists: for the kernels of
            the experts' maps; None: none run.
    """
    wide = wide_of(x)
    logits = F.linear(normed(x, sums, eps), weight.to(wide))
    out.logits.copy_(logits if bias is None else logits + bias)
    chosen = chosen_of(out.logits, out.chosen.shape[1])
    out.chosen.copy_(chosen)
    stored = out.logits.to(wide)
    taken = stored.gather(1, chosen)
    out.shares.copy_(taken.softmax(1) if is_normalised else stored.softmax(1).gather(1, chosen))
    if lists is not None:
        lists.norms.copy_(inverse_rms(x, sums, eps)[:, 0])
        for made, kept in zip(lists_of(out.chosen, lists.group_rows), (lists.groups, lists.places), strict=True):
            kept.copy_(made)


def chosen_of(logits: Tensor, n_chosen: int) -> Tensor:
    """`[n, n_chosen]` int64, ascending: the largest of `logits: [n, X]`, the lower index first among equals."""
    best = logits.sort(dim=1, descending=True, stable=True).indices[:, :n_chosen]
    return best.sort(dim=1).values


def choice_faults(logits: Tensor, chosen: Tensor, shares: Tensor, *, is_normalised: bool) -> list[str]:
    """What is wrong with a choice of the logits as stored, `chosen: [n, k]`, and its shares, made in fp32."""
    best, wide = chosen_of(logits, chosen.shape[1]), logits.double()
    faults = [f"row {row} chose others than its largest logits" for row in (chosen != best).any(1).nonzero()[:, 0]]
    taken = wide.gather(1, best)
    expected = taken.softmax(1) if is_normalised else wide.softmax(1).gather(1, best)
    error = float(((shares - expected).abs() / expected).max())
    return faults if error <= _SHARE_ERROR else [*faults, f"a share is wrong by {error:.3g} of it"]


def wide_of(x: Tensor) -> torch.dtype:
    """In which sums over rows like `x` are made: see `gemm.meaning`."""
    return torch.float64 if x.dtype in DTYPES else accumulation_dtype(x.dtype)


def normed(x: Tensor, sums: Tensor, eps: float) -> Tensor:
    """`x: [n, E]` over the root of its mean square, of which `sums` are the parts; wide."""
    return (x.to(wide_of(x)) * inverse_rms(x, sums, eps)).to(wide_of(x))


def inverse_rms(x: Tensor, sums: Tensor, eps: float) -> Tensor:
    """`[n, 1]` 1 / rms of the rows of which `sums` are the parts."""
    return torch.rsqrt(sums[: len(x)].sum(dim=1, keepdim=True) / x.shape[1] + eps)


ROUTE = Op("route", route, route_meaning)
