"""The best N - 1 of all scored candidates become the draft tree, in ascending flat-id order behind the root.

Equal scores go to the lower flat id; a parent has a lower id and no lower a score than its child, so the choice is
closed under parents. What verification needs of the tree is made with it (`tree_masks`). Blocks rank the candidates
against the whole pool; the last one of a tree lines the chosen ones up and describes them.
Source: EAGLE-2, arXiv 2406.16858, section 4; docs/requirements.md R-39.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, row_of
from eagle3core.kernels.tree.growth import grow_tree_reference, new_growth, pool_size
from eagle3core.kernels.tree.select_tree_kernels import THREADS, make_select_tree
from eagle3core.kernels.tree.tree_masks import TreeMasks, new_tree_masks, tree_masks_reference

MOST_POOL = 4096  # 8 candidates in each of a block's threads
MOST_NODES = 256  # a block has two threads a node


class Pool(NamedTuple):
    """What `grow_tree` leaves of every candidate: fields of `Growth`.

    Attributes:
        scores: `[B, P]` f32. tokens, parents: `[B, P]` int32.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor


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


class Counts(NamedTuple):
    """Room for what the blocks of a tree hand over, int32.

    Attributes:
        ranks: `[B, P]` how many candidates are ahead of each.
        arrived: `[B]`, 0 between launches.
    """

    ranks: Tensor
    arrived: Tensor


def select_tree_variant(arch: str, pool: int, nodes: int, path_len: int) -> Variant:
    """Trees of `nodes` with paths of `path_len` from pools of `pool` candidates.

    Raises:
        KernelLimit: more than 4096 candidates or 256 nodes, a pool that does not hold `nodes` - 1, or paths longer than
            the tree.
    """
    if not 1 <= pool <= MOST_POOL:
        raise KernelLimit(f"{pool} candidates", f"1..{MOST_POOL}", "draft with fewer candidates or levels")
    if not 1 <= nodes <= pool + 1:
        raise KernelLimit(f"{nodes} nodes from {pool} candidates", f"1..{pool + 1}", "lower max_decoding_tokens")
    if nodes > MOST_NODES or not 1 <= path_len <= nodes:
        raise KernelLimit(
            f"{nodes} nodes with paths of {path_len}", f"1..{MOST_NODES} nodes and paths no longer than the tree",
            "lower max_decoding_tokens or max_path_len",
        )  # fmt: skip
    return Variant(
        name=f"select_tree_{pool}_{nodes}_{path_len}",
        make=make_select_tree,
        constants={"pool": pool, "nodes": nodes, "path_len": path_len, "overlap": overlaps(arch)},
        parameters=parameters(
            "scores:in tokens:in parents:in roots:in token_rows:in lengths:in ranks:inout arrived:inout flat_of:out "
            "tokens_of:out parents_of:out mask:out depths:out positions:out leaves:out paths:out first_child:out "
            "next_sibling:out"
        ),
        threads=THREADS,
        max_registers=96,
        instructions={"BAR": 8, "VOTE": 2, "POPC": 2},
        dependent=overlaps(arch),
    )  # fmt: skip


def select_tree(
    arch: str, pool: Pool, roots: Tensor, token_rows: Tensor, lengths: Tensor, counts: Counts, out: Selection,
    masks: TreeMasks,
) -> list[Launch]:  # fmt: skip
    """`out` and `masks` from the candidates of `pool`, `roots, lengths: [B]` and `token_rows: [B, N]`, int32.

    Raises:
        KernelLimit: as `select_tree_variant`.
    """
    batch, size = pool.scores.shape
    variant = select_tree_variant(arch, size, out.flat.shape[1], masks.paths.shape[2])
    return [
        variant.launch(
            (-(-size // 32), batch), **pool._asdict(), roots=roots, token_rows=token_rows, lengths=lengths,
            **counts._asdict(), flat_of=out.flat, tokens_of=out.tokens, parents_of=out.parents, **masks._asdict(),
        )
    ]  # fmt: skip


def select_tree_meaning(
    pool: Pool, roots: Tensor, token_rows: Tensor, lengths: Tensor, counts: Counts, out: Selection, masks: TreeMasks
) -> None:
    """What `select_tree` computes, in plain torch; `counts` are the kernel's own and not read."""
    chosen = select_tree_reference(*pool, roots, out.flat.shape[1], token_rows)
    described = tree_masks_reference(chosen.parents, lengths, masks.paths.shape[2])
    for made, tensor in zip((*chosen, *described), (*out, *masks), strict=True):
        tensor.copy_(made)


SELECT_TREE = Op("select_tree", select_tree, select_tree_meaning)


def select_tree_cost(batch: int, pool: int, nodes: int, path_len: int) -> Cost:
    """Score, token and parent of every candidate in, root and length; of a node a number in and a triple, mask, depth,
    position, links and path out, and the leaf bytes; two passes."""
    node = 16 + 4 * -(-nodes // 32) + 16 + 4 * path_len
    leaves = -(-nodes // 4) * 4
    return Cost(batch * (pool * 12 + nodes * node + leaves + 8), batch * pool * pool, dependent_passes=2)


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
    lengths = torch.randint(5000, (batch,), generator=generator, device=device, dtype=torch.int32)
    if batch > 1:
        lengths[1] = -1
    return {"scores": growth.scores, "tokens": growth.tokens, "parents": growth.parents, "roots": roots,
            "token_rows": token_rows, "lengths": lengths}  # fmt: skip


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    batch, nodes, device = case["batch"], case["nodes"], inputs["scores"].device
    chosen = {name: poison(batch, nodes, dtype=torch.int32, device=device) for name in Selection._fields}
    return {**chosen, **new_tree_masks(batch, nodes, _path_len(case), device)._asdict()}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    pool = Pool(*(inputs[name] for name in Pool._fields))
    chosen = select_tree_reference(*pool, inputs["roots"], case["nodes"], inputs["token_rows"])
    described = tree_masks_reference(chosen.parents, inputs["lengths"], _path_len(case))
    return {**chosen._asdict(), **described._asdict()}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    pool = Pool(*(inputs[name] for name in Pool._fields))
    shape, device = pool.scores.shape, pool.scores.device
    counts = Counts(
        poison(*shape, dtype=torch.int32, device=device), torch.zeros(shape[0], dtype=torch.int32, device=device)
    )
    out = Selection(*(outputs[name] for name in Selection._fields))
    masks = TreeMasks(*(outputs[name] for name in TreeMasks._fields))
    return select_tree(arch, pool, inputs["roots"], inputs["token_rows"], inputs["lengths"], counts, out, masks)


def _pool(case: Case) -> int:
    return pool_size(case["k"], case["levels"])


def _path_len(case: Case) -> int:
    return min(int(case["levels"]) + 1, int(case["nodes"]))


CARD = Card(
    name="select_tree",
    equation="nodes = the N - 1 best scores, equal ones by lower flat id, in id order; mask[i] = mask[parent(i)] + {i}",
    source="EAGLE-2, arXiv 2406.16858, section 4; SpecInfer, arXiv 2305.09781, section 4",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: select_tree_cost(case["batch"], _pool(case), case["nodes"], _path_len(case)),
    variants=lambda arch: [select_tree_variant(arch, pool_size(10, 8), 60, 9)],
    slow_variants=lambda arch: [
        select_tree_variant(arch, pool_size(k, levels), nodes, levels + 1)
        for k, levels, nodes in ((4, 3, 8), (8, 6, 64), (16, 8, 64), (16, 11, 256))
    ],
    cases=({"batch": 2, "k": 5, "levels": 3, "nodes": 37},),
    slow_cases=(
        {"batch": 3, "k": 4, "levels": 3, "nodes": 9},
        {"batch": 1, "k": 10, "levels": 8, "nodes": 60},
        {"batch": 1, "k": 10, "levels": 4, "nodes": 130},
        {"batch": 1, "k": 1, "levels": 4, "nodes": 5},
        {"batch": 1, "k": 3, "levels": 3, "nodes": 2},
    ),
    shapes=tuple({"batch": b, "k": 10, "levels": 8, "nodes": 60} for b in (1, 4, 16)),
    hand_counts=(
        (
            {"batch": 2, "k": 3, "levels": 2, "nodes": 5},
            Cost(2 * (12 * 12 + 5 * (16 + 4 + 16 + 12) + 8 + 8), 2 * 144, 2),
        ),
    ),
    alone=alone("batch", *Pool._fields, "roots", "token_rows", "lengths"),
    row_of=row_of,
    n_rows=count("batch"),
)
