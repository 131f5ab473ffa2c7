"""The k most likely tokens of each row of logits, with their log-probabilities: the draft's candidates.

log p = logit - log sum exp(logits), never above 0, so that a child's score cannot exceed its parent's. Equal logits are
ordered by lower column. Two passes: blocks take the k best and the sum of a piece of a row, then one warp a row merges
the pieces' sorted lists. Source: EAGLE-2, arXiv 2406.16858, section 4; docs/requirements.md R-39.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.by_row import alone, count, one_up, row_of
from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.reductions import redux
from eagle3core.kernels.top_k_kernels import PIECE, WARPS, make_top_k_join, make_top_k_pieces

MOST_K = 16


def n_pieces(n_columns: int) -> int:
    """Blocks of the first pass a row."""
    return -(-n_columns // PIECE)


def top_k_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and columns `[rows, k]`, best first, and log sum exp `[rows]`, of `logits: [rows, V]`."""
    wide = logits.to(one_up(logits.dtype))
    lse = wide.logsumexp(dim=-1)
    ordered = wide.sort(dim=-1, descending=True, stable=True)
    return (ordered.values[:, :k] - lse[:, None]).clamp_max(0), ordered.indices[:, :k], lse


def pieces_variant(arch: str, dtype: str, k: int) -> Variant:
    """The first pass.

    Raises:
        KernelLimit: k is not in 1..16.
    """
    if not 1 <= k <= MOST_K:
        raise KernelLimit(f"top_k is {k}", f"1..{MOST_K}", "draft with fewer candidates a node")
    return Variant(
        name=f"top_k_pieces_{dtype}_{k}",
        make=make_top_k_pieces,
        constants={"dtype": dtype, "k": k, "overlap": overlaps(arch)},
        parameters=parameters("logits:in keys:out columns:out stats:out n_columns:i32 pieces:i32"),
        threads=32 * WARPS,
        max_registers=64,
        instructions={redux(arch): 4, "MUFU": 8},
        dependent=overlaps(arch),
    )


def join_variant(arch: str, k: int, pieces: int) -> Variant:
    """The second pass over `pieces` lists a row.

    Raises:
        KernelLimit: more than 256 pieces (524288 columns).
    """
    if pieces > 256:
        raise KernelLimit(f"{pieces * PIECE} columns", f"at most {256 * PIECE}", "use a draft vocabulary")
    return Variant(
        name=f"top_k_join_{k}_{pieces}",
        make=make_top_k_join,
        constants={"k": k, "pieces": pieces, "overlap": overlaps(arch)},
        parameters=parameters("keys:in columns:in stats:in log_probs:out ids:out lse:out"),
        threads=128,
        max_registers=96,
        instructions={redux(arch): 2},
        dependent=overlaps(arch),
    )


def top_k(
    arch: str,
    logits: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    lse: Tensor,
    keys: Tensor,
    columns: Tensor,
    stats: Tensor,
) -> list[Launch]:
    """`log_probs` f32 and `ids` int32 `[rows, k]`, best first, `lse: [rows]` f32, from `logits: [rows, V]`.

    Scratch: `keys, columns: [rows, n_pieces(V), k]` int32, `stats: [rows, n_pieces(V), 2]` f32.

    Raises:
        KernelLimit: k is not in 1..16, or V is not a multiple of 8 in k..524288.
    """
    rows, n_columns = logits.shape
    k, pieces = ids.shape[1], n_pieces(n_columns)
    if n_columns % 8 or n_columns < k:
        raise KernelLimit(
            f"{n_columns} logits a row with top_k {k}", "a multiple of 8, at least top_k", "pad with -inf"
        )
    first = pieces_variant(arch, DTYPES[logits.dtype], k).launch(
        (pieces, rows), logits=logits, keys=keys, columns=columns, stats=stats, n_columns=n_columns, pieces=pieces
    )
    second = join_variant(arch, k, pieces).launch(
        (rows,), keys=keys, columns=columns, stats=stats, log_probs=log_probs, ids=ids, lse=lse
    )
    return [first, second]


def top_k_cost(rows: int, n_columns: int, k: int) -> Cost:
    """Every logit in, k pairs and a sum out; two passes; a subtraction, a product, exp and a sum a logit."""
    return Cost(rows * (n_columns * 2 + k * 8 + 4), rows * n_columns * 4, dependent_passes=2)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    logits = torch.randn(case["rows"], case["columns"], generator=generator, device=device)
    # Rounding to quarters makes ties common, so that the order of equal logits is tested as well.
    return {"logits": ((3 * logits).mul(4).round() / 4).to(case["dtype"])}


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    rows, k, device = case["rows"], case["k"], inputs["logits"].device
    return {
        "log_probs": poison(rows, k, dtype=torch.float32, device=device),
        "ids": poison(rows, k, dtype=torch.int32, device=device),
        "lse": poison(rows, dtype=torch.float32, device=device),
    }


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    rows, k, pieces = case["rows"], case["k"], n_pieces(case["columns"])
    device = inputs["logits"].device
    keys, columns = (poison(rows, pieces, k, dtype=torch.int32, device=device) for _ in range(2))
    stats = poison(rows, pieces, 2, dtype=torch.float32, device=device)
    return top_k(arch, inputs["logits"], **outputs, keys=keys, columns=columns, stats=stats)


def _reference(case: Case, inputs: Tensors) -> Tensors:
    log_probs, ids, lse = top_k_reference(inputs["logits"], case["k"])
    return {"log_probs": log_probs, "ids": ids.int(), "lse": lse}


def _peer(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(k)
    return values - logits.float().logsumexp(dim=-1, keepdim=True), ids


_BF16 = torch.bfloat16

CARD = Card(
    name="top_k",
    equation="the k largest of logits - log sum exp(logits), equal ones by lower column",
    source="EAGLE-2, arXiv 2406.16858, section 4; R-39",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: top_k_cost(case["rows"], case["columns"], case["k"]),
    variants=lambda arch: [pieces_variant(arch, "bf16", 10)],
    slow_variants=lambda arch: [
        join_variant(arch, 10, n_pieces(128256)),
        pieces_variant(arch, "f16", 8),
        *(pieces_variant(arch, "bf16", k) for k in (1, 4, 8, 16)),
        *(join_variant(arch, k, n_pieces(v)) for k in (4, 8, 10) for v in (32000, 201088)),
    ],
    cases=({"rows": 4, "columns": 2072, "k": 5, "dtype": _BF16},),
    slow_cases=(
        {"rows": 9, "columns": 8, "k": 8, "dtype": torch.float16},
        {"rows": 3, "columns": 65544, "k": 10, "dtype": _BF16},
    ),
    shapes=tuple(
        {"rows": rows, "columns": columns, "k": 10, "dtype": _BF16}
        for columns in (32000, 128256) for rows in (1, 10, 40)
    ),
    hand_counts=(({"rows": 3, "columns": 1000, "k": 4}, Cost(3 * (2000 + 32 + 4), 12000, 2)),),
    order={"piece": "2048 columns: 8 a lane, butterfly, warps in order; then pieces dealt round 32 lanes, butterfly"},
    alone=alone("rows", "logits"),
    row_of=row_of,
    n_rows=count("rows"),
    peers={"torch.topk + logsumexp": lambda case, inputs: lambda: _peer(inputs["logits"], case["k"])},
)  # fmt: skip
