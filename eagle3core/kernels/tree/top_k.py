"""The k most likely tokens of each row of logits, with their log-probabilities: a level's candidates (`grow_tree`).

log p = logit - log sum exp(logits), never above 0, so that a child's score cannot exceed its parent's. Equal logits are
ordered by lower column. The GEMM that makes the logits leaves the best and the sum of powers of each piece of 16
(`isa.powers`), so one pass is enough: it reads those, and of the logits only the few pieces that can hold the k best.
Source: EAGLE-2, arXiv 2406.16858, section 4; docs/requirements.md R-39.
"""

from __future__ import annotations

from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Tensors
from eagle3core.kernels.isa.by_row import one_up
from eagle3core.kernels.isa.powers import PIECE, pieces_of

MOST_K = 16  # a warp a chosen piece; 256 candidates of a level in a block
MOST_PIECES = 16384  # 32 in each thread


def top_k_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and columns `[rows, k]`, best first, and log sum exp `[rows]`, of `logits: [rows, V]`."""
    wide = logits.to(one_up(logits.dtype))
    lse = wide.logsumexp(dim=-1)
    ordered = wide.sort(dim=-1, descending=True, stable=True)
    return (ordered.values[:, :k] - lse[:, None]).clamp_max(0), ordered.indices[:, :k], lse


def check_top_k(k: int, n_columns: int) -> None:
    """What the kernel chooses from.

    Raises:
        KernelLimit: k is not in 1..16, or a row's columns are not a multiple of 16 in k..262144.
    """
    if not 1 <= k <= MOST_K:
        raise KernelLimit(f"top_k is {k}", f"1..{MOST_K}", "draft with fewer candidates a node")
    if n_columns % PIECE or n_columns < k:
        raise KernelLimit(
            f"{n_columns} logits a row with top_k {k}", f"a multiple of {PIECE}, at least top_k", "pad with -inf"
        )
    if n_columns // PIECE > MOST_PIECES:
        raise KernelLimit(f"{n_columns} columns", f"at most {MOST_PIECES * PIECE}", "use a draft vocabulary")


def with_pieces(logits: Tensor) -> Tensors:
    """Inputs of a case: `logits: [rows, V]`, and what a GEMM leaves beside them."""
    best, powers = pieces_of(logits)
    return {"logits": logits, "best": best, "powers": powers}
