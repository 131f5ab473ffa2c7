"""What a draft tree is while it grows, and what a level adds to it: the best k of a level are the next beam.

Score = parent's score + log p, in fp32; equal scores are ordered by lower flat id, so a parent (lower id, score not
lower) always comes before its child. Flat ids: level 0 has 0..k-1, level s > 0 the k * k ids from k + (s - 1) k^2, beam
order first, candidate order second. Everything scored is kept, for the final choice (`select_tree`).
Source: EAGLE-2, arXiv 2406.16858, section 4; docs/requirements.md R-39.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Growth(NamedTuple):
    """The state of trees being grown, updated in place; int32 unless said.

    Attributes:
        scores: `[B, P]` f32 of every candidate by flat id, P = pool_size(k, levels).
        tokens: `[B, P]` target ids.
        parents: `[B, P]` flat ids, -1 below the root.
        beam_scores: `[B, k]` f32, best first.
        beam_flat, beam_tokens: `[B, k]` flat id and target id of each beam node.
        beam_rows: `[B, k]` row, among the B (level 0: the roots) or B k rows of the beam before, of the parent whose
            hidden state it continues from.
        beam_mask: `[B, k, W]` words over all beams so far, bit level * k + place: itself and its ancestors.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    beam_scores: Tensor
    beam_flat: Tensor
    beam_tokens: Tensor
    beam_rows: Tensor
    beam_mask: Tensor


def pool_size(k: int, levels: int) -> int:
    """Candidates that `levels` levels score."""
    return k + (levels - 1) * k * k


def mask_words(k: int, levels: int) -> int:
    """int32 words of a beam node's mask."""
    return -(-k * levels // 32)


def new_growth(batch: int, k: int, levels: int, device: torch.device) -> Growth:
    """State for `batch` trees of `levels` levels; level 0 overwrites the beam."""

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    pool = pool_size(k, levels)
    return Growth(
        torch.full((batch, pool), -float("inf"), device=device), integers(batch, pool), integers(batch, pool),
        torch.zeros(batch, k, device=device), integers(batch, k), integers(batch, k), integers(batch, k),
        integers(batch, k, mask_words(k, levels)),
    )  # fmt: skip


def grow_tree_reference(
    growth: Growth, log_probs: Tensor, ids: Tensor, draft_to_target: Tensor | None, level: int
) -> Growth:
    """The state after `level`, from `log_probs, ids: [B, n, k]`: n is 1 at level 0 (the root) and k later."""
    batch, n_rows, k = ids.shape
    is_first = level == 0
    above = torch.zeros_like(growth.beam_scores[:, :1]) if is_first else growth.beam_scores
    parents = torch.full_like(growth.beam_flat[:, :1], -1) if is_first else growth.beam_flat
    # A log-probability that is no number counts as 0, as in the kernel: the tree stays a tree, and its drafts fail.
    scores = (above[:, :, None] + log_probs.clamp_max(0).nan_to_num(0.0, neginf=-torch.inf)).flatten(1)
    tokens = (ids if draft_to_target is None else draft_to_target[ids.long()]).flatten(1).to(growth.tokens.dtype)
    start = 0 if is_first else pool_size(k, level)
    made = Growth(*(tensor.clone() for tensor in growth))
    span = slice(start, start + n_rows * k)
    made.scores[:, span], made.tokens[:, span] = scores, tokens
    made.parents[:, span] = parents.repeat_interleave(k, dim=1)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    made.beam_scores[:] = scores.gather(1, order)
    made.beam_flat[:], made.beam_tokens[:] = start + order, tokens.gather(1, order)
    made.beam_rows[:] = torch.arange(batch, device=order.device)[:, None] * n_rows + order // k
    masks = growth.beam_mask.gather(1, (order // k)[..., None].expand_as(growth.beam_mask))
    made.beam_mask[:] = torch.zeros_like(masks) if is_first else masks
    for place in range(k):
        bit = level * k + place
        word = 1 << (bit % 32)
        made.beam_mask[:, place, bit // 32] |= word - (1 << 32) if bit % 32 == 31 else word
    return made
