"""Expand: the draft's proposal for one step.

First the extend pass over the taps of what was just committed, which also rewrites the draft's cache from true target
states; then one chained pass a level, each feeding the head's own output back. Only the extend pass moves
`draft_lengths`, so whatever the chained passes wrote is thrown away with the step (EAGLE-3, arXiv 2503.01840, 3.1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.decode.state import DecodeState
from eagle3core.kernels.tree.accept import argmax_reference
from eagle3core.model.block import Pass
from eagle3core.model.draft import DraftModel, DraftOutput
from eagle3core.trace import Trace


class Proposal(NamedTuple):
    """A flattened tree of candidate tokens.

    Attributes:
        tokens: `[A, N]` int64 node tokens, column 0 the roots.
        level_logits: per level `[A, Vd]`, what the draft thought of each level's parent; empty without a draft.
    """

    tokens: Tensor
    level_logits: list[Tensor]


def expand(draft: DraftModel | None, state: DecodeState, slots: Tensor, trace: Trace) -> Proposal:
    """Candidates for the `slots: [A]` int64; the roots alone when there is no draft."""
    roots = state.roots[slots][:, None]
    if draft is None:
        return Proposal(roots, [])
    with trace.scope("extend"):
        output, last = extend_pending(draft, state, slots, trace)
    rows = torch.arange(len(slots), device=slots.device)
    feedback = output.feedback[rows, last][:, None]  # [A, 1, Hd]
    tokens, level_logits = [roots], []
    n_levels = state.tree.max_depth
    for level in range(1, n_levels + 1):
        assert output.logits is not None, "extend and chain passes of a step always give logits"
        level_logits.append(output.logits[:, 0])
        with trace.span("EAGLE_TREE_MASKS"), trace.span("tree.grow"):
            drafted = draft.to_target_ids(argmax_reference(output.logits[:, 0]))[:, None]
        tokens.append(drafted)
        if level < n_levels:
            with trace.scope(f"chain{level}"):
                output = chain_level(draft, state, slots, feedback, drafted, level, trace)
            feedback = output.feedback
    return Proposal(torch.cat(tokens, dim=1), level_logits)


def extend_pending(draft: DraftModel, state: DecodeState, slots: Tensor, trace: Trace) -> tuple[DraftOutput, Tensor]:
    """Read the pending entries of `slots`; the output and the row `[A]` of each sequence's last entry."""
    assert state.draft_cache is not None, "a draft has a cache"
    counts, starts = state.pending_counts[slots], state.draft_lengths[slots]
    width = int(counts.max())
    offsets = torch.arange(width, device=slots.device)
    mask = torch.ones(width, width, dtype=torch.bool, device=slots.device).tril()
    at = Pass(
        positions=starts[:, None] + offsets,
        prefix_lens=starts,
        mask=mask.expand(len(slots), -1, -1),
        valid=offsets < counts[:, None],
    )
    taps, tokens = state.pending_taps[slots, :width], state.pending_tokens[slots, :width]
    output = draft.extend(taps, tokens, at, state.draft_cache.view(slots), trace, counts - 1)
    state.draft_lengths[slots] = starts + counts
    state.pending_counts[slots] = 0
    return output, counts - 1


def chain_level(
    draft: DraftModel, state: DecodeState, slots: Tensor, feedback: Tensor, tokens: Tensor, level: int, trace: Trace
) -> DraftOutput:
    """One chained pass: the level's drafted tokens `[A, 1]` with their parents' output `[A, 1, Hd]`."""
    assert state.draft_cache is not None, "a draft has a cache"
    at_entry = state.draft_lengths[slots] + level - 1
    ones = torch.ones(len(slots), 1, dtype=torch.bool, device=slots.device)
    at = Pass(positions=at_entry[:, None], prefix_lens=at_entry, mask=ones[:, None], valid=ones)
    return draft.chain(feedback, tokens, at, state.draft_cache.view(slots), trace)
