"""One decode step over the active slots: expand, verify, accept, commit.

Plain greedy decoding is the same step with a tree of the root alone, so the two cannot drift apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.decode.expand import Proposal, expand
from eagle3core.decode.rewind import KVCacheRewindParams, compute_rewind_lengths, rewind_kv_cache
from eagle3core.decode.slots import active_slots
from eagle3core.decode.state import DecodeState
from eagle3core.errors import InvariantViolated
from eagle3core.kernels.tree.accept import Acceptance, accept_greedy_reference, argmax_reference
from eagle3core.model.block import Pass
from eagle3core.model.draft import DraftModel
from eagle3core.model.target import TargetModel, TargetOutput
from eagle3core.trace import Trace


class StepResult(NamedTuple):
    """What a step committed, a row per active slot.

    Attributes:
        slots: `[A]` int64.
        drafts: `[A, N - 1]` int64 drafted tokens, in tree order.
        tokens: `[A, depth + 1]` int64 committed tokens, -1 padded: accepted drafts, then the bonus.
        n_accepted: `[A]` int64 accepted drafts.
        n_rewound: `[A]` int64 drafted tokens taken back.
        ranks: `[A, depth]` int64 the draft's rank of the target's token at each level, -1 outside the draft
            vocabulary; None unless asked for. Levels past n_accepted + 1 say nothing, since their prefix was wrong.
    """

    slots: Tensor
    drafts: Tensor
    tokens: Tensor
    n_accepted: Tensor
    n_rewound: Tensor
    ranks: Tensor | None


def decode_step(
    target: TargetModel, draft: DraftModel | None, state: DecodeState, trace: Trace, *, collect_ranks: bool = False
) -> StepResult:
    """Advance every active slot by one step.

    Raises:
        InvariantViolated: acceptance outside 0..depth, or a KV row outside the slot's blocks.
    """
    slots = active_slots(state.active)
    reserve(state, slots)
    proposal = expand(draft, state, slots, trace)
    output = verify(target, state, slots, proposal.tokens, trace)
    assert output.logits is not None, "verification asks for the logits of every node"
    with trace.span("EAGLE_ACCEPT"), trace.span("accept"):
        choices = argmax_reference(output.logits)
        depths, parents = state.tree.depths.to(slots.device), torch.tensor(state.tree.parents, device=slots.device)
        acceptance = accept_greedy_reference(proposal.tokens, choices, parents, depths)
    trace.tap("tree.tokens", proposal.tokens)
    trace.tap("tree.parents", parents[None])
    trace.tap("accept.tokens", acceptance.tokens, acceptance.tokens >= 0)
    ranks = draft_ranks(draft, proposal, choices) if collect_ranks and draft is not None else None
    with trace.span("EAGLE_TAIL_COMMIT"), trace.span("commit"):
        n_rewound = commit(state, slots, acceptance, output, trace)
    return StepResult(slots, proposal.tokens[:, 1:], acceptance.tokens, acceptance.n_accepted, n_rewound, ranks)


def reserve(state: DecodeState, slots: Tensor) -> None:
    """Blocks for everything this step may write."""
    n_nodes = state.tree.n_nodes
    for slot in slots.tolist():
        state.target_cache.reserve(slot, int(state.lengths[slot]) + n_nodes)
        if state.draft_cache is not None:
            entries = int(state.draft_lengths[slot] + state.pending_counts[slot])
            state.draft_cache.reserve(slot, entries + n_nodes - 1)


def verify(target: TargetModel, state: DecodeState, slots: Tensor, tokens: Tensor, trace: Trace) -> TargetOutput:
    """One target pass over every node `tokens: [A, N]` of every slot's tree (docs/requirements.md R-53)."""
    starts = state.lengths[slots]
    with trace.span("EAGLE_TREE_MASKS"), trace.span("tree.masks"):
        depths, mask = state.tree.depths.to(slots.device), state.tree.mask.to(slots.device)
        at = Pass(
            positions=starts[:, None] + depths,
            prefix_lens=starts,
            mask=mask.expand(len(slots), -1, -1),
            valid=torch.ones_like(tokens, dtype=torch.bool),
        )
    with trace.scope("verify"):
        return target.forward(tokens, at, state.target_cache.view(slots), trace)


def commit(state: DecodeState, slots: Tensor, acceptance: Acceptance, output: TargetOutput, trace: Trace) -> Tensor:
    """Keep the accepted path, take the rest back; drafted tokens rewound per slot `[A]` int64.

    The kept nodes' taps become the draft's pending entries, so its next pass reads true target states.
    """
    starts, kept = state.lengths[slots], acceptance.path >= 0
    n_committed = acceptance.n_accepted + 1
    n_drafts = state.tree.n_nodes - 1
    if bool((acceptance.n_accepted < 0).any()) or bool((acceptance.n_accepted > state.tree.max_depth).any()):
        raise InvariantViolated(
            f"accepted lengths {acceptance.n_accepted.tolist()}",
            f"0..{state.tree.max_depth}",
            "report this: the acceptance walk left the tree",
        )
    state.target_cache.view(slots).move(starts, acceptance.path.clamp_min(0), kept)
    if state.draft_cache is not None:
        path = acceptance.path.clamp_min(0)[..., None].expand(-1, -1, output.taps.shape[-1])
        state.pending_taps[slots] = output.taps.gather(1, path)
        state.pending_tokens[slots] = acceptance.tokens.clamp_min(0)  # rows past the bonus are padding, still embedded
        state.pending_counts[slots] = n_committed
    state.lengths[slots] = starts + n_committed
    state.roots[slots] = acceptance.bonus
    with trace.span("EAGLE::KVCacheRewind"), trace.span("rewind"):
        n_rewound = compute_rewind_lengths(torch.full_like(n_committed, n_drafts), acceptance.n_accepted)
        rewind_kv_cache(KVCacheRewindParams(state.target_cache, slots, starts + n_drafts + 1, n_rewound))
        if state.draft_cache is not None:
            true_entries = state.draft_lengths[slots]
            chained = torch.full_like(true_entries, max(state.tree.max_depth - 1, 0))
            rewind_kv_cache(KVCacheRewindParams(state.draft_cache, slots, true_entries + chained, chained))
    return n_rewound


def draft_ranks(draft: DraftModel, proposal: Proposal, choices: Tensor) -> Tensor:
    """Rank `[A, depth]` int64 of the target's token in the draft's order at each level of a chain, -1 if outside."""
    ranks = []
    for level, logits in enumerate(proposal.level_logits):
        wanted = draft.to_draft_ids(choices[:, level])  # [A], -1 outside the draft vocabulary
        score = logits.gather(1, wanted.clamp_min(0)[:, None])
        ids = torch.arange(logits.shape[1], device=logits.device)
        ahead = (logits > score) | ((logits == score) & (ids < wanted[:, None]))
        ranks.append(ahead.sum(dim=1).where(wanted >= 0, -1))
    return torch.stack(ranks, dim=1)
