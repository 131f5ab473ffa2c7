"""Acceptance: the longest path from the root on which every node equals the target's choice after its parent.

The target's choice is its argmax (greedy), or a token drawn from its distribution, whole or truncated to typical tokens
(`sample`): sample-and-match keeps exactly the distribution drawn from. A block owns a sequence.
Source: EAGLE, arXiv 2401.15077, section 4; docs/requirements.md R-51..R-60, R-84.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, row_of
from eagle3core.kernels.isa.reductions import redux
from eagle3core.kernels.tree.accept_kernel import make_accept
from eagle3core.kernels.tree.mask_words import pack_words

MOST_NODES = 256


def argmax_reference(logits: Tensor) -> Tensor:
    """Index of the largest entry of `[..., V]`; of equal ones the lowest index, on every device."""
    largest = logits.max(dim=-1, keepdim=True).values
    index = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == largest, index, logits.shape[-1]).min(dim=-1).values


class Commit(NamedTuple):
    """What the kernel decides, int32; a dead sequence (whose masks are 0) gets 0, 0, and -1 everywhere else.

    Attributes:
        n_accepted: `[B]` accepted drafts.
        n_committed: `[B]` tokens to commit: the accepted drafts and the bonus.
        path: `[B, P]` node indices root first, -1 past the last accepted node.
        tokens: `[B, P]` accepted drafts, then the bonus, then -1.
        bonus: `[B]` the target's own next token.
        stop: `[B]` index in `tokens` of the first end token, -1 if there is none.
    """

    n_accepted: Tensor
    n_committed: Tensor
    path: Tensor
    tokens: Tensor
    bonus: Tensor
    stop: Tensor


def new_commit(batch: int, path_len: int, device: torch.device) -> Commit:
    """Poisoned outputs for `batch` sequences."""
    shapes = ((batch,), (batch,), (batch, path_len), (batch, path_len), (batch,), (batch,))
    return Commit(*(poison(*shape, dtype=torch.int32, device=device) for shape in shapes))


def accept_reference(
    node_tokens: Tensor, choices: Tensor, parents: Tensor, depths: Tensor, alive: Tensor, ends: Tensor, path_len: int
) -> Commit:
    """The commit of every sequence, each with its own tree: `node_tokens, choices, parents, depths: [B, N]`.

    A parent precedes its children; the root's is -1. `alive: [B]` bool; `ends: [E]` end tokens. Of several deepest
    accepted nodes, which only equal siblings can give, the earliest counts.
    """
    before = parents.clamp_min(0).long()
    is_match = (node_tokens == choices.gather(1, before)) & (parents >= 0)
    accepted = torch.zeros_like(is_match)
    accepted[:, 0] = True
    for node in range(1, node_tokens.shape[1]):
        accepted[:, node] = accepted.gather(1, before[:, node : node + 1])[:, 0] & is_match[:, node]
    last = argmax_reference(torch.where(accepted, depths, -1))[:, None]  # [B, 1]
    n_accepted, bonus = depths.gather(1, last), choices.gather(1, last)
    path = torch.full((len(node_tokens), path_len), -1, dtype=torch.int64, device=node_tokens.device)
    node_at = last
    for level in range(path_len - 1, -1, -1):
        is_on = n_accepted >= level
        path[:, level : level + 1] = torch.where(is_on, node_at, -1)
        node_at = torch.where(is_on, before.gather(1, node_at), node_at)
    on_path = node_tokens.gather(1, path.clamp_min(0)).where(path >= 0, -1)
    tokens = torch.nn.functional.pad(on_path[:, 1:], (0, 1), value=-1)  # without the root, with room for the bonus
    tokens = tokens.scatter(1, n_accepted.long().clamp_max(path_len - 1), bonus.to(tokens.dtype))
    is_end = torch.isin(tokens, ends) & (tokens >= 0)
    stop = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1), -1)
    made = (n_accepted[:, 0], n_accepted[:, 0] + 1, path, tokens, bonus[:, 0], stop)
    return Commit(*(
        value.int().masked_fill(~alive.view(-1, *(1,) * (value.ndim - 1)), empty)
        for value, empty in zip(made, (0, 0, -1, -1, -1, -1), strict=True)
    ))  # fmt: skip


def accept_variant(arch: str, nodes: int, path_len: int) -> Variant:
    """Acceptance over trees of `nodes`.

    Raises:
        KernelLimit: more than 256 nodes.
    """
    if not 1 <= nodes <= MOST_NODES or path_len < 1:
        raise KernelLimit(f"{nodes} nodes", f"1..{MOST_NODES}", "lower max_decoding_tokens")
    return Variant(
        name=f"accept_{nodes}_{path_len}",
        make=make_accept,
        constants={"nodes": nodes, "path_len": path_len, "overlap": overlaps(arch)},
        parameters=parameters(
            "node_tokens:in choices:in parents:in depths:in mask:in ends:const n_accepted:out n_committed:out "
            "path:out tokens:out bonus:out stop:out n_ends:i32"
        ),
        threads=-(-nodes // 32) * 32,
        max_registers=64,
        instructions={"VOTE": 1, redux(arch): 2},
        dependent=overlaps(arch),
    )


def accept(
    arch: str,
    node_tokens: Tensor,
    choices: Tensor,
    parents: Tensor,
    depths: Tensor,
    mask: Tensor,
    ends: Tensor,
    out: Commit,
) -> list[Launch]:
    """`out` from trees `node_tokens, parents, depths: [B, N]`, the target's `choices: [B, N]`, `mask: [B, N, W]`
    words as `tree_masks` makes them, and end tokens `ends: [E]`; all int32.

    Raises:
        KernelLimit: more than 256 nodes.
    """
    batch, nodes = node_tokens.shape
    return [
        accept_variant(arch, nodes, out.path.shape[1]).launch(
            (batch,), node_tokens=node_tokens, choices=choices, parents=parents, depths=depths, mask=mask, ends=ends,
            n_ends=len(ends), **out._asdict(),
        )
    ]  # fmt: skip


def accept_meaning(
    node_tokens: Tensor,
    choices: Tensor,
    parents: Tensor,
    depths: Tensor,
    mask: Tensor,
    ends: Tensor,
    out: Commit,
) -> None:
    """What `accept` computes, in plain torch."""
    is_alive = mask[:, 0, 0] != 0
    made = accept_reference(node_tokens, choices, parents, depths, is_alive, ends, out.path.shape[1])
    for after, tensor in zip(made, out, strict=True):
        tensor.copy_(after)


ACCEPT = Op("accept", accept, accept_meaning)


def accept_cost(batch: int, nodes: int, path_len: int) -> Cost:
    """Token, choice, parent, depth and mask of every node in; paths, tokens and four numbers out."""
    return Cost(batch * (nodes * (16 + 4 * -(-nodes // 32)) + path_len * 8 + 16))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, nodes, path_len = case["batch"], case["nodes"], case["path_len"]

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    parents, depths = torch.full((batch, nodes), -1, dtype=torch.int32), torch.zeros(batch, nodes, dtype=torch.int32)
    mask = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    # Three of four nodes hang under one of the last few, so that the trees are deep.
    near = torch.rand(batch, nodes, generator=generator, device=device).tolist()
    for b in range(batch):
        for node in range(1, nodes):
            allowed = [n for n in range(node) if depths[b, n] < path_len - 1][-3 if node % 4 else 0 :]
            parent = allowed[int(near[b][node] * len(allowed))]
            parents[b, node], depths[b, node] = parent, depths[b, parent] + 1
            mask[b, node] |= mask[b, parent]
    if batch > 2:
        mask[1] = False
    words = pack_words(mask)
    made = {"node_tokens": integers(0, 3, batch, nodes), "choices": integers(0, 3, batch, nodes)}
    made |= {"parents": parents.to(device), "depths": depths.to(device), "mask": words.to(device)}
    return {**made, "ends": torch.tensor([7, 2], dtype=torch.int32, device=device)}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    read = {name: inputs[name] for name in ("node_tokens", "choices", "parents", "depths", "ends")}
    alive = inputs["mask"][:, 0, 0] != 0
    return dict(accept_reference(**read, alive=alive, path_len=case["path_len"])._asdict())


CARD = Card(
    name="accept",
    equation="path = the longest on which token(node) = choice(parent); commit its tokens and the last choice",
    source="EAGLE, arXiv 2401.15077, section 4",
    example=_example,
    outputs=lambda case, inputs: dict(new_commit(case["batch"], case["path_len"], inputs["mask"].device)._asdict()),
    reference=_reference,
    launches=lambda arch, case, inputs, outputs: accept(arch, **inputs, out=Commit(**outputs)),
    cost=lambda case: accept_cost(case["batch"], case["nodes"], case["path_len"]),
    variants=lambda arch: [accept_variant(arch, 60, 9)],
    slow_variants=lambda arch: [accept_variant(arch, n, p) for n, p in ((1, 1), (4, 4), (64, 5), (256, 12))],
    cases=({"batch": 4, "nodes": 37, "path_len": 7}, {"batch": 1, "nodes": 1, "path_len": 1}),
    slow_cases=({"batch": 5, "nodes": 4, "path_len": 4}, {"batch": 2, "nodes": 100, "path_len": 9}),
    shapes=(
        *({"batch": b, "nodes": 4, "path_len": 4} for b in (1, 4, 16)),
        *({"batch": b, "nodes": 60, "path_len": 9} for b in (1, 4, 16)),
    ),
    hand_counts=(({"batch": 2, "nodes": 5, "path_len": 3}, Cost(2 * (5 * 20 + 24 + 16))),),
    alone=alone("batch", "node_tokens", "choices", "parents", "depths", "mask"),
    row_of=row_of,
    n_rows=count("batch"),
)
