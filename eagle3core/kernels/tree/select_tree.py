"""The best N - 1 of all scored candidates become the draft tree, in ascending flat-id order behind the root.

Equal scores go to the lower flat id; a parent has a lower id and no lower a score than its child, so the choice is
closed under parents. Two passes: blocks rank the candidates against the whole pool, one block a tree lines them up.
Source: EAGLE-2, arXiv 2406.16858, section 4; docs/requirements.md R-39.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, row_of
from eagle3core.kernels.tree.grow_tree import grow_tree_reference, new_growth, pool_size
from eagle3core.kernels.tree.select_tree_kernels import RANK_THREADS, THREADS, make_line_up, make_rank_pool

MOST_POOL = 4096  # the second pass keeps 16 candidates in each of its threads


class Selection(NamedTuple):
    """Trees of N nodes, node 0 the root, parents before children; int32.

    Attributes:
        flat: `[B, N]` flat id of each node, -1 for the root.
        tokens: `[B, N]` target ids, -1 of nodes that are to have no token.
        parents: `[B, N]` node index of the parent, -1 for the root.
    """

    flat: Tensor
    tokens: Tensor
    parents: Tensor


def select_tree_reference(
    scores: Tensor, tokens: Tensor, parents: Tensor, roots: Tensor, n_nodes: int, token_rows: Tensor | None = None
) -> Selection:
    """The tree of each sequence from `scores, tokens, parents: [B, P]` (see `grow_tree`) and `roots: [B]`.

    Nodes whose `token_rows: [B, N]` is negative have no token.
    """
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : n_nodes - 1]
    chosen = best.sort(dim=1).values
    node_of = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
    node_of.scatter_(1, chosen, torch.arange(1, n_nodes, device=scores.device).expand_as(chosen))
    above = parents.gather(1, chosen).long()
    nodes = torch.where(above >= 0, node_of.gather(1, above.clamp_min(0)), 0)
    first = torch.full_like(roots[:, None], -1)
    ids = torch.cat([roots[:, None], tokens.gather(1, chosen)], dim=1)
    return Selection(
        torch.cat([first, chosen.to(roots.dtype)], dim=1),
        ids if token_rows is None else ids.masked_fill(token_rows < 0, -1),
        torch.cat([first, nodes.to(roots.dtype)], dim=1),
    )


def rank_variant(arch: str, pool: int) -> Variant:
    """The first pass over pools of `pool` candidates.

    Raises:
        KernelLimit: more than 4096.
    """
    if not 1 <= pool <= MOST_POOL:
        raise KernelLimit(f"{pool} candidates", f"1..{MOST_POOL}", "draft with fewer candidates or levels")
    return Variant(
        name=f"select_rank_{pool}",
        make=make_rank_pool,
        constants={"pool": pool, "overlap": overlaps(arch)},
        parameters=parameters("scores:in ranks:out"),
        threads=RANK_THREADS,
        max_registers=48,
        instructions={"BAR": 2},
        dependent=overlaps(arch),
    )


def line_up_variant(arch: str, pool: int, nodes: int) -> Variant:
    """The second pass for trees of `nodes`.

    Raises:
        KernelLimit: the pool does not hold `nodes` - 1 candidates.
    """
    if not 1 <= nodes <= pool + 1:
        raise KernelLimit(f"{nodes} nodes from {pool} candidates", f"1..{pool + 1}", "lower max_decoding_tokens")
    return Variant(
        name=f"select_line_up_{pool}_{nodes}",
        make=make_line_up,
        constants={"pool": pool, "nodes": nodes, "overlap": overlaps(arch)},
        parameters=parameters(
            "ranks:in tokens:in parents:in roots:in token_rows:in flat_of:out tokens_of:out parents_of:out"
        ),
        threads=THREADS,
        max_registers=96,
        instructions={"VOTE": 1, "POPC": 2},
        dependent=overlaps(arch),
    )  # fmt: skip


def select_tree(
    arch: str, scores: Tensor, tokens: Tensor, parents: Tensor, roots: Tensor, token_rows: Tensor, ranks: Tensor,
    out: Selection,
) -> list[Launch]:  # fmt: skip
    """`out` from `scores` f32, `tokens`, `parents` int32 `[B, P]`, `roots: [B]`, `token_rows: [B, N]`; scratch
    `ranks: [B, P]` int32.

    Raises:
        KernelLimit: P is not in 1..4096, or smaller than N - 1.
    """
    batch, pool = scores.shape
    nodes = out.flat.shape[1]
    first = rank_variant(arch, pool).launch((-(-pool // 32), batch), scores=scores, ranks=ranks)
    second = line_up_variant(arch, pool, nodes).launch(
        (batch,), ranks=ranks, tokens=tokens, parents=parents, roots=roots, token_rows=token_rows,
        flat_of=out.flat, tokens_of=out.tokens, parents_of=out.parents,
    )  # fmt: skip
    return [first, second]


def select_tree_meaning(
    scores: Tensor, tokens: Tensor, parents: Tensor, roots: Tensor, token_rows: Tensor, ranks: Tensor, out: Selection
) -> None:
    """What `select_tree` computes, in plain torch; `ranks` is the kernels' own and not read."""
    chosen = select_tree_reference(scores, tokens, parents, roots, out.flat.shape[1], token_rows)
    for made, tensor in zip(chosen, out, strict=True):
        tensor.copy_(made)


SELECT_TREE = Op("select_tree", select_tree, select_tree_meaning)


def select_tree_cost(batch: int, pool: int, nodes: int) -> Cost:
    """Score, token and parent of every candidate in, a number a node in and a triple out, the root in; two passes."""
    return Cost(batch * (pool * 12 + nodes * 16 + 4), batch * pool * pool, dependent_passes=2)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, k, levels = case["batch"], case["k"], case["levels"]
    growth = new_growth(batch, k, levels, device)
    for level in range(levels):
        shape = (batch, 1 if level == 0 else k, k)
        steps = torch.randint(-9, 1, shape, generator=generator, device=device).float() / 4  # zeros: parent ties child
        ids = torch.randint(1000, shape, generator=generator, device=device, dtype=torch.int32)
        growth = grow_tree_reference(growth, steps.sort(dim=2, descending=True).values, ids, None, level)
    roots = torch.randint(1000, (batch,), generator=generator, device=device, dtype=torch.int32)
    token_rows = torch.randint(-1, 4, (batch, case["nodes"]), generator=generator, device=device, dtype=torch.int32)
    return {"scores": growth.scores, "tokens": growth.tokens, "parents": growth.parents, "roots": roots,
            "token_rows": token_rows}  # fmt: skip


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    shape, device = (case["batch"], case["nodes"]), inputs["scores"].device
    return {name: poison(*shape, dtype=torch.int32, device=device) for name in Selection._fields}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    ranks = poison(*inputs["scores"].shape, dtype=torch.int32, device=inputs["scores"].device)
    return select_tree(arch, **inputs, ranks=ranks, out=Selection(**outputs))


def _pool(case: Case) -> int:
    return pool_size(case["k"], case["levels"])


CARD = Card(
    name="select_tree",
    equation="nodes = the N - 1 best scores, equal ones by lower flat id, in ascending flat-id order",
    source="EAGLE-2, arXiv 2406.16858, section 4",
    example=_example,
    outputs=_outputs,
    reference=lambda case, inputs: dict(select_tree_reference(**inputs, n_nodes=case["nodes"])._asdict()),
    launches=_launches,
    cost=lambda case: select_tree_cost(case["batch"], _pool(case), case["nodes"]),
    variants=lambda arch: [line_up_variant(arch, pool_size(10, 8), 60)],
    slow_variants=lambda arch: [
        rank_variant(arch, pool_size(10, 8)),
        *(rank_variant(arch, pool_size(k, levels)) for k, levels in ((4, 3), (8, 6), (16, 8))),
        *(line_up_variant(arch, pool_size(k, levels), n) for k, levels, n in ((4, 3, 8), (8, 6, 64), (16, 8, 64))),
    ],
    cases=({"batch": 2, "k": 4, "levels": 3, "nodes": 9},),
    slow_cases=(
        {"batch": 2, "k": 10, "levels": 4, "nodes": 60},
        {"batch": 1, "k": 1, "levels": 4, "nodes": 5},
        {"batch": 1, "k": 3, "levels": 3, "nodes": 2},
    ),
    shapes=tuple({"batch": b, "k": 10, "levels": 8, "nodes": 60} for b in (1, 4, 16)),
    hand_counts=(({"batch": 2, "k": 3, "levels": 2, "nodes": 5}, Cost(2 * (144 + 80 + 4), 2 * 144, 2)),),
    alone=alone("batch", "scores", "tokens", "parents", "roots", "token_rows"),
    row_of=row_of,
    n_rows=count("batch"),
)
