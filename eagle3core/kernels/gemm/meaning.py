"""What a linear map with its epilogue computes, in plain torch: the GEMM's meaning in a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels.card import DTYPES, Op
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.fp8.operands import by_element
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.order.pack import OrderedRows
from eagle3core.kernels.gemm.order.weight import unpack_scales, unpack_weight
from eagle3core.kernels.gemm.reference import EPS
from eagle3core.kernels.isa.powers import pieces_of
from eagle3core.kernels.layer.cache_write import write_cache_rows
from eagle3core.kernels.layer.embedding import PARTIAL, partial_squares_reference
from eagle3core.kernels.layer.rms_norm import accumulation_dtype

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu,
}  # fmt: skip


def gemm_meaning(
    epilogue: Epilogue,
    *,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    k: int,
    packed: bool,
    weight_rows: int,
    scratch: tuple[Tensor, Tensor] | None = None,
    q_heads: int = 0,
    kv_heads: int = 0,
    eps: float = EPS,
    ordered: OrderedRows | None = None,
    leave: OrderedRows | None = None,
    operands: Mapping[str, Tensor],
) -> None:
    """What `gemm` computes, for any widths and dtype: sums and epilogue in fp64 (fp32 for fp32).

    Args as `gemm`; `scratch`, `ordered` and `leave` are not read: they hold rows in another order, beside the rows.
    """
    weight = unpack_weight(w, epilogue, k) if packed else w
    # Sums of 16-bit rows are made in fp64: rounded once, they are the same bits at any number of rows, as the kernels'.
    wide = torch.float64 if x.dtype in DTYPES else accumulation_dtype(x.dtype)
    rows = x.to(wide)
    if epilogue.quads:
        mean = operands["sums"][: len(x)].sum(dim=1, keepdim=True) / k  # [M, 1]
        rows = (rows * torch.rsqrt(mean + eps)).to(wide)
    weight, scales = weight.to(wide), operands.get("scales")
    if scales is not None and scales.ndim > 1:  # of blocks, which sums cannot wait for
        weight = weight * by_element(unpack_scales(scales, epilogue) if packed else scales, k)
    v = F.linear(rows, weight)  # [M, n_w]
    if scales is not None and scales.ndim == 1:
        v = v * scales
    if epilogue.has_bias:
        v = v + operands["bias"]
    if epilogue.kind == "swiglu":
        gate, up = v.chunk(2, dim=1)
        v = ACTIVATIONS[epilogue.activation](gate) * up  # [M, n_w / 2]
    elif epilogue.kind == "residual" and epilogue.has_residual:
        v = operands["residual"] + v
    elif epilogue.kind == "qkv":
        v = _rotate_and_cache(v, epilogue.head_dim, q_heads, kv_heads, operands)
    y.copy_(v)
    if epilogue.kind == "residual":
        operands["second"].copy_(y * operands["gain"])
        operands["third"].copy_(partial_squares_reference(y))
    if epilogue.kind == "head" and epilogue.has_powers:
        for made, out in zip(pieces_of(y), (operands["second"], operands["third"]), strict=True):
            out.copy_(made)
    elif epilogue.kind == "head":
        _best_of_groups(y, operands["second"], operands["third"])


def _rotate_and_cache(v: Tensor, dim: int, q_heads: int, kv_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
    """Rotated q `[M, H * D]` of merged rows `v: [M, (H + 2 K) * D]`; k and v of rows with a slot go to the cache."""
    heads = v.view(len(v), -1, dim)
    cos, sin = operands["table"][operands["positions"].long()][:, None].unbind(-1)  # [M, 1, D / 2]
    first, second = heads[:, : q_heads + kv_heads].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    factors = operands.get("factors", (None, None))
    write_cache_rows(operands["second"], operands["slots"], turned[:, q_heads:], factors[0])
    write_cache_rows(operands["third"], operands["slots"], heads[:, q_heads + kv_heads :], factors[1])
    return turned[:, :q_heads].flatten(1)


def _best_of_groups(logits: Tensor, best: Tensor, column: Tensor) -> None:
    """The largest of every 16 logits, and the lowest column that has it; a NaN counts as infinite."""
    groups = logits.view(len(logits), -1, PARTIAL)
    groups = torch.where(groups.isnan(), torch.inf, groups)
    largest = groups.max(dim=-1)
    best.copy_(largest.values)
    first = (groups == largest.values[..., None]).int().argmax(-1)
    column.copy_(first + PARTIAL * torch.arange(groups.shape[1], device=logits.device))


GEMM = Op("gemm", gemm, gemm_meaning)
