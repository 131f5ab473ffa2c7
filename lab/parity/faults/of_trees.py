"""Bugs in how a tree is grown, verified and kept, and in what a small model's cache holds; one sequence shows each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3core.kernels import Call
from lab.parity.faults.fault import Change, Place, after, around, before
from lab.parity.faults.run_fault import RunFault

WORD = 32  # nodes of a mask's word


def _own_bits(n_nodes: int, device: torch.device) -> Tensor:
    """`[N, W]` int32 words in which each node sees itself alone."""
    node = torch.arange(n_nodes)
    words = torch.zeros(n_nodes, -(-n_nodes // WORD), dtype=torch.int64)
    words[node, node // WORD] = torch.ones_like(node) << (node % WORD)
    return words.to(torch.int32).to(device)  # a bit 31 becomes the sign


def _with_siblings(mask: Tensor, parents: Tensor, own: Tensor) -> Tensor:
    """The words `[B, N, W]` in which a node sees the sibling before it too."""
    is_next = (parents[:, 1:] == parents[:, :-1])[:, :, None]
    seen = mask.clone()
    seen[:, 1:] |= own[:-1].expand_as(mask[:, 1:]).where(is_next, 0)
    return seen


def _sibling_in_the_mask(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "select_tree":
        return [call]
    mask, parents = call.operands["masks"].mask, call.operands["out"].parents
    own = _own_bits(mask.shape[1], mask.device)
    return after(call, lambda: mask.copy_(_with_siblings(mask, parents, own)))


def _sibling_in_attention() -> Change:
    """A node's attention alone; the walk of acceptance reads the right words."""
    parents: list[Tensor] = []  # of the trees whose masks were made last

    def change(at: Place, call: Call) -> Sequence[Call]:
        if call.op == "select_tree":
            parents[:] = [call.operands["out"].parents]
        if not (at.batch and call.op == "attention" and at.stage.startswith("target.")):
            return [call]
        mask, of = call.operands["masks"], parents[0]
        own, held = _own_bits(mask.shape[1], mask.device), list[Tensor]()

        def show() -> None:
            held[:] = [mask.clone()]
            mask.copy_(_with_siblings(mask, of, own))

        return around(call, show, lambda: mask.copy_(held[0]))

    return change


def _one_further(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "select_tree":
        return [call]
    return after(call, lambda: call.operands["masks"].positions[:, 1:].add_(1))


def _wrong_parents(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "grow_tree" or call.operands["level"] == 0:
        return [call]
    growth, level = call.operands["growth"], call.operands["level"]
    k = growth.beam_flat.shape[1]
    start = k + (level - 1) * k * k
    here = growth.parents[:, start : start + k * k]
    return after(call, lambda: here.copy_(here.roll(k, dims=1)))


def _wrong_states(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "grow_tree" or call.operands["level"] == 0:
        return [call]
    rows = call.operands["growth"].beam_rows
    return after(call, lambda: rows.copy_(rows.roll(1, dims=1)))


def _beams_one_further(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "open_step":
        return [call]
    return after(call, lambda: call.operands["out"].chain_positions.add_(1))


def _neighbours_rows(at: Place, call: Call) -> Sequence[Call]:
    """The accepted path's rows come from the node before each accepted one, the root's own but for that."""
    if call.op != "compact_kv":
        return [call]
    path = call.operands["path"]
    return before(call, lambda: path.copy_((path - 1).where(path > 0, path)))


def _not_rewound(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "open_step":
        return [call]
    entries, levels = call.operands["out"].entry_positions, call.operands["out"].chain_positions
    n_drafts = len(levels) + 1
    return after(call, lambda: [rows.add_(n_drafts) for rows in (entries, levels)])


def _last_draft_unread(at: Place, call: Call) -> Sequence[Call]:
    """Accepted drafts are not read again, of which the last never was."""
    if call.op != "open_step":
        return [call]
    slots, last = call.operands["out"].entry_slots, call.operands["out"].last_rows
    row = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
    return after(call, lambda: slots.masked_fill_(row != last[:, None], -1))


TREE_FAULTS = (
    RunFault(
        "tree_sibling_mask", "the words of a node hold the sibling before it", "trees", "tokens",
        change=_sibling_in_the_mask,
    ),
    RunFault(
        "tree_sibling_attention", "a node's attention sees the sibling before it", "trees", "tokens",
        change=_sibling_in_attention(),
    ),
    RunFault(
        "tree_positions", "the nodes of a tree stand one position too far", "trees", "tokens",
        change=_one_further,
    ),
    RunFault(
        "tree_parents", "candidates hang under the beam node beside their own", "trees", "drafts",
        change=_wrong_parents,
    ),
    RunFault(
        "tree_states", "a beam node goes on from the state of the one beside its parent", "trees", "drafts",
        change=_wrong_states,
    ),
    RunFault("beam_positions", "beams stand one position too far", "trees", "drafts", change=_beams_one_further),
    RunFault(
        "compacted_rows", "the accepted path keeps the cache rows of the nodes before its own", "trees", "tokens",
        change=_neighbours_rows,
    ),
    RunFault(
        "small_not_rewound", "a small model goes on behind the drafts of the step before, accepted or not",
        "small model", "drafts", change=_not_rewound,
    ),
    RunFault(
        "small_last_draft", "a small model's cache lacks the last draft where all were accepted", "small model",
        "drafts", change=_last_draft_unread,
    ),
)  # fmt: skip
