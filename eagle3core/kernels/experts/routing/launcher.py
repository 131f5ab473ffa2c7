"""The router as launches: `score` for all experts at once, then `choose` in one block, but of one row (see `lone`)."""

from __future__ import annotations

from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import DTYPES, PLAIN_TORCH, Launch
from eagle3core.kernels.experts.routing.choose import choose_variant
from eagle3core.kernels.experts.routing.lists import Lists, Routed
from eagle3core.kernels.experts.routing.lone import choice_of
from eagle3core.kernels.experts.routing.score import ROWS, score_variant
from eagle3core.kernels.gemm.epilogue import PARTIALS_STEP, quads_of

MOST_WIDTH = 8192  # of rows: a thread holds its part of an expert's weights


def route(
    arch: str, x: Tensor, sums: Tensor, weight: Tensor, out: Routed, *, eps: float, is_normalised: bool,
    bias: Tensor | None = None, lists: Lists | None = None,
) -> list[Launch]:  # fmt: skip
    """What `route.route_meaning` says, of one row no more than logits and norm; `lists` have to be there.

    Raises:
        KernelLimit: rows other than 16-bit ones, a width that is no multiple of 16 or above 8192, no room for lists,
            or what `choose_variant` is not made for.
    """
    (rows, width), experts = x.shape, len(weight)
    if x.dtype not in DTYPES or width % 16 or width > MOST_WIDTH:
        raise KernelLimit(
            f"a router reads {width} {x.dtype}", f"multiples of 16 up to {MOST_WIDTH}, bf16 or fp16", PLAIN_TORCH
        )
    if lists is None or sums.shape[1] != PARTIALS_STEP * quads_of(width):
        raise KernelLimit("a router without lists, or sums of other rows", "the step's own buffers", PLAIN_TORCH)
    score = score_variant(arch, DTYPES[x.dtype], width, bias is not None).launch(
        (experts, -(-rows // ROWS)), x=x, sums=sums, w=weight, bias=bias, logits=out.logits, norms=lists.norms,
        rows=rows, experts=experts, eps=eps,
    )  # fmt: skip
    if choice_of(out, is_normalised) is not None:
        return [score]
    chooses = choose_variant(arch, experts, out.chosen.shape[1], is_normalised, lists.group_rows, rows)
    left = {"chosen": out.chosen, "shares": out.shares, "groups": lists.groups, "places": lists.places}
    return [score, chooses.launch((1,), logits=out.logits, rows=rows, **left)]
