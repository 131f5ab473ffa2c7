"""Bugs of how an engine serves requests: its chains' verification, steps that are not full, kept blocks, drawn drafts.

What they spoil is right in a step of one request by itself, or in a greedy one, so no stage of a pass shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3core import Engine
from eagle3core.kernels import Call
from lab.parity.faults.fault import Change, Place, after, around, entries_of
from lab.parity.faults.run_fault import RunFault


def _opened(edit: Callable[[Any], object]) -> Change:
    """`edit(out)` of what a step with drafts opens with."""

    def change(at: Place, call: Call) -> Sequence[Call]:
        if call.op != "open_step" or call.operands["out"].positions.shape[1] < 2:
            return [call]
        return after(call, lambda: edit(call.operands["out"]))

    return change


# The verification of a chain.


def _drafts_one_further(out: Any) -> None:
    out.positions[:, 1:].add_(1)


# Steps that are not full: rows of padding have length -1.


def _is_padded(out: Any) -> Tensor:
    lengths: Tensor = out.lengths
    return (lengths < 0).any()


def _features_of_padding(out: Any) -> None:
    """In a step with padding every sequence has the features of the row before, the first those of the padding."""
    rows = out.entry_rows
    rows.copy_(torch.where(_is_padded(out), rows.roll(1, dims=0).clamp_min(0), rows).where(rows >= 0, rows))


def _positions_of_padding(out: Any) -> None:
    """In a step with padding the draft's entries stand as many positions too far as there are rows of padding."""
    n = (out.lengths < 0).sum().to(out.entry_positions.dtype)
    for rows in (out.entry_positions, out.chain_positions):
        rows.copy_((rows + n).where(rows >= 0, rows))


def _lengths_of_padding(out: Any) -> None:
    """In a step with padding the draft sees the first half of its entries alone."""
    rows = out.entry_lengths
    rows.copy_(torch.where(_is_padded(out) & (rows > 0), rows // 2, rows))


# Kept blocks, and a draft's own entries.


def _without_draft_rows(engine: Engine) -> None:
    """Blocks that are found hold the target's rows alone: the draft's are those of nobody."""
    blocks, state = engine.book.blocks, engine.runner.state
    begin = blocks.begin

    def begun(request: Any) -> tuple[list[int], int]:
        held, n_cached = begin(request)
        if n_cached and state.draft is not None:
            found = torch.tensor(held[: n_cached // engine.config.block_size], device=state.draft.k.device)
            for pages in (state.draft.k, state.draft.v):
                pages.index_fill_(0, found, 0.0)
        return held, n_cached

    blocks.begin = begun  # type: ignore[method-assign]


def _stale(which: str) -> Change:
    """Entries of accepted tokens keep what a chain's later passes wrote of them, in one of both caches."""

    def change(at: Place, call: Call) -> Sequence[Call]:
        if (at.stage, at.scope, call.op) != ("draft.qkv", "extend", "gemm"):
            return [call]
        slots, page, held = call.operands["slots"], call.operands[which], list[Tensor]()

        def put_back() -> None:
            rows = slots.view(at.batch, -1) >= 0
            row = torch.arange(rows.shape[1], device=slots.device)
            is_stale = (row < rows.sum(dim=1, keepdim=True) - 1) & (row < rows.shape[1] - 2)
            page.copy_(held[0].where(entries_of(page, slots.where(is_stale.flatten(), -1)), page))

        return around(call, lambda: held.__setitem__(slice(None), [page.clone()]), put_back)

    return change


# Drawn tokens.


def _not_drawn(at: Place, call: Call) -> Sequence[Call]:
    """Drafts are the likeliest ones, and verified as if they had been drawn."""
    return [] if call.op == "draw_drafts" else [call]


def _as_certain(at: Place, call: Call) -> Sequence[Call]:
    """Drafts are drawn, and verified as if the draft had held each of them certain."""
    if call.op != "accept_by_rejection":
        return [call]
    logits, map_, tokens = (call.operands[name] for name in ("level_logits", "to_target", "tokens"))
    held: list[Tensor] = []

    def sharpen() -> None:
        held[:] = [logits.clone()]
        ids = torch.arange(logits.shape[2], device=logits.device) if map_ is None else map_[: logits.shape[2]].long()
        for level in range(tokens.shape[1] - 1):
            is_drafted = ids[None] == tokens[:, level + 1, None].long()
            logits[level, : len(tokens)].copy_(torch.where(is_drafted, 0.0, -1e4))

    return around(call, sharpen, lambda: logits.copy_(held[0]))


SERVING_FAULTS = (
    RunFault(
        "verify_positions", "drafts are verified one position too far", "chains", "tokens",
        change=_opened(_drafts_one_further),
    ),
    RunFault(
        "stale_draft_keys", "entries of accepted tokens keep the chained steps' keys", "chains", "drafts",
        change=_stale("second"),
    ),
    RunFault(
        "stale_draft_values", "entries of accepted tokens keep the chained steps' values", "chains", "drafts",
        change=_stale("third"),
    ),
    RunFault(
        "padding_features", "with rows of padding, entries have the features of the row before", "batches", "drafts",
        change=_opened(_features_of_padding),
    ),
    RunFault(
        "padding_positions", "the draft's positions count the rows of padding", "batches", "drafts",
        change=_opened(_positions_of_padding),
    ),
    RunFault(
        "padding_lengths", "with rows of padding, the draft sees half of its entries", "batches", "drafts",
        change=_opened(_lengths_of_padding),
    ),
    RunFault(
        "found_without_draft_rows", "kept blocks that are found hold nothing of the draft", "blocks", "drafts",
        spoil=_without_draft_rows,
    ),
    RunFault(
        "likeliest_as_drawn", "the draft's likeliest tokens are verified as if they had been drawn", "draws", "shares",
        change=_not_drawn,
    ),
    RunFault(
        "drawn_as_certain", "drawn drafts are verified as if the draft had held them certain", "draws", "shares",
        change=_as_certain,
    ),
)  # fmt: skip
