"""The k most likely tokens of each row of logits, with their log-probabilities: the draft's candidates.

log p = logit - log sum exp(logits), never above 0, so that a child's score cannot exceed its parent's. Equal logits are
ordered by lower column. The GEMM that makes the logits leaves the best and the sum of powers of each piece of 16
(`isa.powers`), so one pass is enough: it reads those, and of the logits only the few pieces that can hold the k best.
Source: EAGLE-2, arXiv 2406.16858, section 4; docs/requirements.md R-39.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.choice.top_k_kernel import THREADS, make_top_k
from eagle3core.kernels.choice.top_k_keys import per_thread
from eagle3core.kernels.isa.by_row import alone, count, one_up, row_of
from eagle3core.kernels.isa.powers import PIECE, pieces_of
from eagle3core.kernels.isa.reductions import redux

MOST_K = 16
MOST_PIECES = 16384  # 32 in each thread


def top_k_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and columns `[rows, k]`, best first, and log sum exp `[rows]`, of `logits: [rows, V]`."""
    wide = logits.to(one_up(logits.dtype))
    lse = wide.logsumexp(dim=-1)
    ordered = wide.sort(dim=-1, descending=True, stable=True)
    return (ordered.values[:, :k] - lse[:, None]).clamp_max(0), ordered.indices[:, :k], lse


def top_k_variant(arch: str, dtype: str, k: int, n_columns: int) -> Variant:
    """The choice from rows of `n_columns`.

    Raises:
        KernelLimit: k is not in 1..16, or more than 262144 columns.
    """
    if not 1 <= k <= MOST_K:
        raise KernelLimit(f"top_k is {k}", f"1..{MOST_K}", "draft with fewer candidates a node")
    pieces = n_columns // PIECE
    if pieces > MOST_PIECES:
        raise KernelLimit(f"{n_columns} columns", f"at most {MOST_PIECES * PIECE}", "use a draft vocabulary")
    return Variant(
        name=f"top_k_{dtype}_{k}_{pieces}",
        make=make_top_k,
        constants={"dtype": dtype, "k": k, "pieces": pieces, "held": per_thread(pieces), "overlap": overlaps(arch)},
        parameters=parameters("logits:in best:in powers:in log_probs:out ids:out lse:out n_columns:i32"),
        threads=THREADS,
        max_registers=128,
        instructions={redux(arch): 2, "BAR": 5, "MUFU": 2},
        dependent=overlaps(arch),
    )


def top_k(
    arch: str, logits: Tensor, best: Tensor, powers: Tensor, log_probs: Tensor, ids: Tensor, lse: Tensor
) -> list[Launch]:
    """`log_probs` f32 and `ids` int32 `[rows, k]`, best first, `lse: [rows]` f32, from `logits: [rows, V]`.

    `best, powers: [rows, V / 16]` f32: what the GEMM left of every 16 logits.

    Raises:
        KernelLimit: k is not in 1..16, or V is not a multiple of 16 in k..262144.
    """
    rows, n_columns = logits.shape
    k = ids.shape[1]
    if n_columns % PIECE or n_columns < k:
        raise KernelLimit(
            f"{n_columns} logits a row with top_k {k}", f"a multiple of {PIECE}, at least top_k", "pad with -inf"
        )
    variant = top_k_variant(arch, DTYPES[logits.dtype], k, n_columns)
    return [
        variant.launch(
            (rows,), logits=logits, best=best, powers=powers, log_probs=log_probs, ids=ids, lse=lse,
            n_columns=n_columns,
        )
    ]  # fmt: skip


def top_k_meaning(logits: Tensor, best: Tensor, powers: Tensor, log_probs: Tensor, ids: Tensor, lse: Tensor) -> None:
    """What `top_k` computes, in plain torch; `best` and `powers` are for the kernel and not read."""
    for made, out in zip(top_k_reference(logits, ids.shape[1]), (log_probs, ids, lse), strict=True):
        out.copy_(made)


TOP_K = Op("top_k", top_k, top_k_meaning)


def top_k_cost(rows: int, n_columns: int, k: int) -> Cost:
    """Two numbers a piece in, and k pieces of logits; k pairs and a sum out; exp, a product and sums a piece."""
    pieces = n_columns // PIECE
    return Cost(rows * (pieces * 8 + min(k * PIECE, n_columns) * 2 + k * 8 + 4), rows * pieces * 4)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    logits = torch.randn(case["rows"], case["columns"], generator=generator, device=device)
    # Rounding to quarters makes ties common, so that the order of equal logits is tested as well.
    return with_pieces(((3 * logits).mul(4).round() / 4).to(case["dtype"]))


def with_pieces(logits: Tensor) -> Tensors:
    """Inputs of a case: `logits: [rows, V]`, and what a GEMM leaves beside them."""
    best, powers = pieces_of(logits)
    return {"logits": logits, "best": best, "powers": powers}


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    rows, k, device = case["rows"], case["k"], inputs["logits"].device
    return {
        "log_probs": poison(rows, k, dtype=torch.float32, device=device),
        "ids": poison(rows, k, dtype=torch.int32, device=device),
        "lse": poison(rows, dtype=torch.float32, device=device),
    }


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    return top_k(arch, **inputs, **outputs)


def _reference(case: Case, inputs: Tensors) -> Tensors:
    log_probs, ids, lse = top_k_reference(inputs["logits"], case["k"])
    return {"log_probs": log_probs, "ids": ids.int(), "lse": lse}


_BF16 = torch.bfloat16

CARD = Card(
    name="top_k",
    equation="the k largest of logits - log sum exp(logits), equal ones by lower column",
    source="EAGLE-2, arXiv 2406.16858, section 4",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: top_k_cost(case["rows"], case["columns"], case["k"]),
    variants=lambda arch: [top_k_variant(arch, "bf16", 10, 32000)],
    slow_variants=lambda arch: [
        top_k_variant(arch, "f16", 8, 16),
        *(top_k_variant(arch, "bf16", k, v) for k, v in ((1, 32000), (4, 32000), (10, 128256), (16, 201088))),
    ],
    cases=({"rows": 4, "columns": 2080, "k": 5, "dtype": _BF16},),
    slow_cases=(
        {"rows": 9, "columns": 16, "k": 8, "dtype": torch.float16},
        {"rows": 1, "columns": 65552, "k": 10, "dtype": _BF16},
    ),
    shapes=tuple(
        {"rows": rows, "columns": columns, "k": 10, "dtype": _BF16}
        for columns in (32000, 128256) for rows in (1, 10, 40)
    ),
    hand_counts=(({"rows": 3, "columns": 1024, "k": 4}, Cost(3 * (512 + 128 + 32 + 4), 768)),),
    order={"powers": "16 columns where they are made; then dealt round 512 threads, butterfly, warps in order"},
    alone=alone("rows", "logits", "best", "powers"),
    row_of=row_of,
    n_rows=count("rows"),
)  # fmt: skip
